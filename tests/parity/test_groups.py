"""Runs with groups of parameters are those of a plain loop whose AdamW has the same groups, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain import final_weights, metrics, plain_loop
from ready import Start, ready, run_of
from torch import Tensor

from forked import work
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.config.schema import Optimizer
from tonnage.decide.decision import Decision
from tonnage.errors import UserError
from tonnage.rundir.directory import RunDirectory

STEPS, SAVED, PACKS = 6, 3, 4
GROUPS = [
    {"match": "*embed*", "lr": 3e-4, "weight_decay": 0.0},
    {"match": "blocks[-1:].*", "lr": 6e-3},
    {"match": "down_proj.weight", "weight_decay": 0.5},
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "disk": {"memory": {"optimizer_tier": "disk", "gradient_tier": "disk", "parameter_tier": "disk"}},
    "host": {"memory": {"optimizer_tier": "host", "gradient_tier": "host"}},
    "zero 0": {"workers": 2, "memory": {"zero": 0}},
    "zero 3": {"workers": 2, "memory": {"zero": 3}},
    "tensor": {"workers": 2, "parallel": {"tensor": 2}},
    "pipeline": {"workers": 2, "parallel": {"pipeline": 2}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    write_rows(folder / "rows.jsonl", alpaca_rows(200))
    write_model(folder / "model", llama_config(num_hidden_layers=2))
    return folder


def written(folder: Path, name: str, start: Start | None = None, **changes: Any) -> Decision:
    keys: dict[str, Any] = {"workers": 1, "memory": {}, "parallel": {}, "optimizer": {"groups": GROUPS}} | changes
    text = {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": 64,
            "template": "plain",
            "over_length": "drop",
            "max_loss": 1.0,
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": PACKS},
        "steps": STEPS,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 2} | keys["optimizer"],
        "precision": "fp32",
        "kernels": {"widening": "off"},  # torch's Muon computes in bf16 on every processor
        "memory": {"micro_batch": PACKS // 2, "moments": "fp32"} | keys["memory"],
        "parallel": keys["parallel"],
        "launch": {"workers": keys["workers"], "threads": 1},
        "checkpoint": {"every": SAVED, "keep": 99},
        "track": [],
        "output": str(folder / name.replace(" ", "-")),
        "seed": 3,
    }
    return ready(folder, text, start)


def torch_groups(model: Any, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """The groups of ``GROUPS``, written out for the names of the model."""
    groups = []
    for name, parameter in model.named_parameters():
        decay = settings.weight_decay
        own: dict[str, Any] = {}
        if "embed" in name:
            own, decay = {"lr": 3e-4}, 0.0
        elif name.startswith("model.layers.1."):
            own = {"lr": 6e-3}
        elif name.endswith("down_proj.weight"):
            decay = 0.5
        groups.append({"params": [parameter], "weight_decay": decay if parameter.dim() >= 2 else 0.0, **own})
    return [torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), eps=settings.eps)]


def assert_equal(run: RunDirectory, steps: list[dict[str, float]], weights: dict[str, Tensor]) -> None:
    first = STEPS - len(metrics(run))
    for ours, plain in zip(metrics(run), steps[first:], strict=True):
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5), (run.path.name, ours["step"])
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), (run.path.name, ours["step"])
    for name, weight in final_weights(run, STEPS).items():
        difference = float((weight - weights[name]).norm() / weights[name].norm())
        assert difference < 1e-5, f"{run.path.name}, {name}: {difference:g}"


@pytest.mark.matrix
def test_every_layout_and_every_resumed_run_equals_the_plain_loop(folder: Path) -> None:
    decision, runs = trained(folder, LAYOUTS, "groups", {"groups": GROUPS})
    steps, weights = plain_loop(decision, optimizers_of=torch_groups)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    for run in runs.values():
        assert_equal(run, steps, weights)


MUON: dict[str, Any] = {"kind": "muon", "lr": 5e-3, "adamw_lr": 2e-3, "momentum": 0.9}


def torch_muon(model: Any, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """Muon of the matrices of the blocks, AdamW of the rest."""
    inside = {name: one for name, one in model.named_parameters() if ".layers." in name and one.dim() == 2}
    others = [(name, one) for name, one in model.named_parameters() if name not in inside]
    groups = [{"params": [one], "weight_decay": 0.1 if one.dim() == 2 else 0.0} for _, one in others]
    return [
        torch.optim.Muon(inside.values(), lr=5e-3, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=settings.eps),
    ]


def rounded_otherwise(model: Any, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """As ``torch_muon``, of gradients that differ as much as those of sums in another order."""
    generator = torch.Generator().manual_seed(0)
    optimizers = torch_muon(model, settings)

    def disturb(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for gradient in (one.grad for group in optimizer.param_groups for one in group["params"]):
            size = gradient.square().mean().sqrt()
            gradient += 1e-6 * size * torch.randn(gradient.shape, generator=generator)

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(disturb)
    return optimizers


def apart(got: dict[str, Tensor], weights: dict[str, Tensor]) -> float:
    """How far weights are from each other, as a part of their size."""
    return max(float((value - weights[name]).norm() / weights[name].norm()) for name, value in got.items())


@pytest.mark.matrix
def test_muon_in_every_layout_and_every_resumed_run_is_the_plain_loop(folder: Path) -> None:
    """As near as another plain loop, whose gradients are rounded otherwise: what is orthogonal is so in bf16, so a last
    bit of a gradient may become one of 256 of an update. ``optimizer_ranks`` compares updates of the same gradients."""
    layouts = LAYOUTS | {"zero 3, tensor": {"workers": 4, "memory": {"zero": 3}, "parallel": {"tensor": 2}}}
    layouts["zero 2 on disk"] = {"workers": 2, "memory": {"zero": 2, "optimizer_tier": "disk"}}
    decision, runs = trained(folder, layouts, "muon", MUON)
    steps, weights = plain_loop(decision, optimizers_of=torch_muon)
    limit = 1.5 * apart(plain_loop(decision, optimizers_of=rounded_otherwise)[1], weights)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    assert limit < 0.02
    for name, run in runs.items():
        records = metrics(run)
        for ours, plain in zip(records, steps[STEPS - len(records) :], strict=True):
            assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-4), (name, ours["step"])
        assert apart(final_weights(run, STEPS), weights) < limit, name
    for name in ("disk", "host"):
        assert metrics_of_bits(runs[name]) == metrics_of_bits(runs["one"])
    assert metrics_of_bits(runs["zero 2 on disk"]) == metrics_of_bits(runs["zero 3"])


@pytest.mark.slow
def test_muon_updates_divided_matrices_on_disk_as_in_memory(folder: Path) -> None:
    """No update is put together beside a forward pass that exchanges with the same workers."""
    keys: dict[str, Any] = {"workers": 2, "parallel": {"tensor": 2}, "optimizer": MUON}
    in_memory = run_of(written(folder, "muon divided", **keys))
    on_disk = run_of(written(folder, "muon divided on disk", **keys, memory={"optimizer_tier": "disk"}))
    work("small_tiles", (2, [str(in_memory.path), str(on_disk.path)]))
    assert len(metrics(on_disk)) == STEPS
    assert metrics_of_bits(on_disk) == metrics_of_bits(in_memory)


def metrics_of_bits(run: RunDirectory) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in metrics(run)]


def trained(
    folder: Path, layouts: dict[str, dict[str, Any]], prefix: str, optimizer: dict[str, Any]
) -> tuple[Decision, dict[str, RunDirectory]]:
    """Runs in all layouts, and such as go on with one worker from two and with two and four from one; and what was
    decided for one worker."""
    decisions = {
        name: written(folder, f"{prefix} {name}", **keys, optimizer=optimizer) for name, keys in layouts.items()
    }
    runs = {name: run_of(decision) for name, decision in decisions.items()}
    starts = dict.fromkeys(("one to two", "one to four"), (runs["one"], SAVED))
    starts["two to one"] = (runs["zero 3"], SAVED)
    number = {"two to one": 1, "one to two": 2, "one to four": 4}
    for name, start in starts.items():
        keys = {"workers": number[name], "optimizer": optimizer}
        runs[name] = run_of(written(folder, f"{prefix} {name}", start, **keys))
    by_workers: dict[int, list[str]] = {}
    for name in layouts:
        by_workers.setdefault(layouts[name].get("workers", 1), []).append(str(runs[name].path))
    work("small_tiles", *by_workers.items())
    work("small_tiles", *((number[name], [str(runs[name].path)]) for name in starts))
    return decisions["one"], runs


def test_a_pattern_that_matches_nothing_is_refused_before_the_run(folder: Path) -> None:
    with pytest.raises(UserError, match=r"\*wte\*: no trained parameters of the model"):
        written(folder, "nothing", optimizer={"groups": [{"match": "*wte*", "lr": 1e-3}]})


@pytest.mark.parametrize("workers", [1, 2])
def test_ten_updates_equal_those_of_torch(workers: int) -> None:
    work("optimizer_ranks", (workers, ["groups"]))


@pytest.mark.parametrize(("workers", "axis"), [(1, []), (2, []), (3, []), (2, ["tensor"]), (4, ["tensor"])])
def test_twenty_updates_by_muon_equal_those_of_torch(workers: int, axis: list[str]) -> None:
    work("optimizer_ranks", (workers, ["muon", "original", *axis]))
