"""State, gradients and parameters that rest elsewhere, of a model that is divided among workers (``parallel.tensor``,
``parallel.pipeline``): the same bits as in memory beside each other, and the numbers of one worker.

The model is tied, so a pipeline has its embedding twice; tiles are so small that its state is many of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import metrics
from ready import Start, ready, run_of
from safetensors.torch import load_file
from transformers import AutoConfig

from forked import work
from tiny import alpaca_rows, byte_tokenizer, llama_config, write_model, write_rows
from tonnage.checkpoint.description import ExportForm
from tonnage.checkpoint.export import Start as StartedFrom
from tonnage.checkpoint.export import export
from tonnage.checkpoint.save import checkpoint_path, complete_checkpoints
from tonnage.checkpoint.shards import Shards
from tonnage.data import PackedDataset, pack_at
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory

STEPS, SAVED, PACKS, SEED, CLIP, BLOCKS = 4, 2, 5, 7, 0.5, 5
AXES: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "interleaved": {"pipeline": 2, "schedule": "interleaved"},
    "zero bubble": {"pipeline": 2, "schedule": "zero_bubble"},
    "tensor x pipeline": {"tensor": 2, "pipeline": 2},
    "tensor x shard": {"tensor": 2, "shard": 2},
    "pipeline x shard": {"pipeline": 2, "shard": 2},
}
IN_MEMORY: dict[str, Any] = {}
BOTH: dict[str, Any] = {"optimizer_tier": "disk", "gradient_tier": "disk"}
TIERS: dict[str, dict[str, Any]] = {
    "memory": IN_MEMORY,
    "state": {"optimizer_tier": "disk"},
    "gradients": {"gradient_tier": "disk"},
    "both": BOTH,
    "both, some stay": {**BOTH, "optimizer_resident": 3 << 15},
    "host": {"optimizer_tier": "host", "gradient_tier": "host"},
    "parameters": {"parameter_tier": "disk"},
    "all": {**BOTH, "parameter_tier": "disk"},
    "all on the host": {"optimizer_tier": "host", "gradient_tier": "host", "parameter_tier": "host"},
}
Made = dict[tuple[str, str], RunDirectory]
"""Runs by axes and tiers."""


def workers_of(axes: str) -> int:
    keys = AXES[axes]
    return int(keys.get("tensor", 1) * keys.get("pipeline", 1) * keys.get("shard", 1))


def written(
    folder: Path, axes: str, tiers: str, name: str = "", start: Start | None = None, **changes: Any
) -> RunDirectory:
    """A run that is ready for its workers; ``start`` is the run and the step that it goes on from."""
    memory = {"zero": 3, "micro_batch": 1, "recompute": "none", "moments": "fp32"} | TIERS[tiers]
    text = {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "validation": 0.05,
            "max_length": 64,
            "template": "plain",
            "over_length": "drop",
            "max_loss": 1.0,
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": PACKS},
        "steps": STEPS,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": CLIP, "warmup": 2, "schedule": "constant"},
        "precision": "fp32",
        "memory": memory | changes.pop("memory", {}),
        "parallel": {key: value for key, value in AXES[axes].items() if key != "shard"},
        "launch": {"workers": workers_of(axes), "threads": 1},
        "checkpoint": {"every": SAVED, "keep": 99},
        "evaluate": {"every": SAVED},
        "track": [],
        "output": str(folder / f"{axes}-{tiers}-{name}".replace(" ", "").replace(",", "-")),
        "seed": SEED,
    } | changes
    return run_of(ready(folder, text, start))


def trained(runs: Made, suffix: str = "") -> None:
    """Let the workers of all of them train."""
    by_workers: dict[int, list[str]] = {}
    for (axes, _), run in runs.items():
        by_workers.setdefault(workers_of(axes), []).append(f"{run.path}{suffix}")
    work("small_tiles", *by_workers.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiers")
    write_rows(folder / "rows.jsonl", alpaca_rows(200))
    write_model(folder / "model", llama_config(num_hidden_layers=BLOCKS, vocab_size=259))
    return folder


def figures(run: RunDirectory) -> list[dict[str, Any]]:
    """Losses, norms and evaluations, in their order."""
    records = map(json.loads, run.metrics.read_text().splitlines())
    kept = ("step", "loss", "grad_norm", "skipped", "eval_loss")
    return [{key: one[key] for key in kept if key in one} for one in records if "loss" in one or "eval_loss" in one]


def assert_same_bits(run: RunDirectory, memory: RunDirectory) -> None:
    """Of losses, norms, evaluations and every rank's part of every checkpoint: weights, moments, low halves."""
    assert figures(run) == figures(memory), run.path.name
    saved = complete_checkpoints(memory.checkpoints)
    assert saved
    for checkpoint in saved:
        files = {file.name: file for file in (run.checkpoints / checkpoint.name).glob("*.safetensors")}
        assert files.keys() == {file.name for file in checkpoint.glob("*.safetensors")}
        for name, file in files.items():
            tensors, others = load_file(checkpoint / name), load_file(file)
            assert tensors.keys() == others.keys()
            for key, tensor in tensors.items():
                assert tensor.equal(others[key]), (run.path.name, name, key)


def assert_close(run: RunDirectory, alone: RunDirectory, after: int = 0, within: float = 1e-5) -> None:
    """Losses and norms of the steps ``after`` one are those of one worker."""
    want = {record["step"]: record for record in metrics(alone) if "loss" in record}
    got = [record for record in metrics(run) if "loss" in record]
    assert [record["step"] for record in got] == [step for step in want if step > after]
    for record in got:
        where = f"{run.path.name}, step {record['step']}"
        assert record["loss"] == pytest.approx(want[record["step"]]["loss"], rel=within), where
        assert record["grad_norm"] == pytest.approx(want[record["step"]]["grad_norm"], rel=10 * within), where


def assert_rests_elsewhere(run: RunDirectory, axes: str, tiers: str) -> None:
    """Each worker's log says where its part rests."""
    said, keys = run.log.read_text(), TIERS[tiers]
    assert ("optimizer state on disk" in said) == (keys.get("optimizer_tier") == "disk"), (axes, tiers)
    assert ("gradients in host memory" in said) == (keys.get("gradient_tier") == "host"), (axes, tiers)
    assert ("parameters of the blocks on disk" in said) == (keys.get("parameter_tier") == "disk"), (axes, tiers)
    assert ("parameters of the blocks in host memory" in said) == (keys.get("parameter_tier") == "host"), (axes, tiers)
    if keys.get("gradient_tier") == "disk" or keys.get("optimizer_tier") == "disk":
        assert all((run.path / "offload" / f"rank-{rank}").is_dir() for rank in range(workers_of(axes)))


def compared(folder: Path, axes: Iterable[str], tiers: Iterable[str], **changes: Any) -> Made:
    """Runs of every combination, each held against the one with the same axes in memory alone."""
    runs = {one: written(folder, *one, **changes) for one in product(axes, ("memory", *tiers))}
    trained(runs)
    for (axis, tier), run in runs.items():
        assert_rests_elsewhere(run, axis, tier)
        assert_same_bits(run, runs[axis, "memory"])
    return runs


@pytest.mark.matrix
def test_all_of_two_workers_on_disk(folder: Path) -> None:
    """The short one of these tests, for every day."""
    runs = compared(folder, ("tensor", "pipeline"), ("both", "all"), name="short", steps=2)
    assert any(record["grad_norm"] > CLIP for record in metrics(runs["tensor", "all"]))


@pytest.mark.matrix
@pytest.mark.parametrize("axes", list(AXES)[1:])
def test_every_tier_with_every_axis(axes: str, folder: Path) -> None:
    runs = compared(folder, (axes,), list(TIERS)[1:], name="matrix")
    alone = written(folder, "one", "memory", name=f"for {axes}")
    trained({("one", "memory"): alone})
    assert metrics(alone)[STEPS - 1]["loss"] < metrics(alone)[0]["loss"] - 0.1
    for run in runs.values():
        assert_close(run, alone)


@pytest.mark.matrix
def test_weights_of_16_bits_have_their_low_halves_elsewhere(folder: Path) -> None:
    axes = ("tensor", "pipeline", "interleaved", "zero bubble", "tensor x shard")
    compared(folder, axes, ("both", "all", "all on the host"), name="halves", precision="bf16")


@pytest.mark.matrix
@pytest.mark.parametrize("adapter", [{"rank": 4}, {"rank": 4, "quantize": "nf4"}])
def test_what_is_frozen_of_a_divided_model_is_read_from_disk(adapter: dict[str, Any], tmp_path: Path) -> None:
    """Two workers divide rows of 128 numbers, between those that share a scale."""
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(200))
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_model(tmp_path / "model", llama_config(num_hidden_layers=BLOCKS, vocab_size=259, **sizes))
    axes = ("tensor", "pipeline", "interleaved", "tensor x pipeline", "tensor x shard")
    runs = {one: written(tmp_path, *one, adapter=adapter) for one in product(axes, ("memory", "parameters", "all"))}
    trained(runs)
    for (axis, _), run in runs.items():
        assert_same_bits(run, runs[axis, "memory"])


@pytest.mark.matrix
def test_what_rests_elsewhere_goes_on_in_other_layouts_and_is_exported_alike(folder: Path) -> None:
    """Saved by two workers that divide matrices, with all on disk."""
    saved, alone = written(folder, "tensor", "all", "saved"), written(folder, "one", "memory", "alone")
    trained({("tensor", "all"): saved, ("one", "memory"): alone})
    others = [("one", "memory"), ("one", "state"), ("pipeline", "all on the host"), ("tensor x pipeline", "all")]
    gone_on = {one: written(folder, *one, "gone on", (saved, SAVED)) for one in others}
    trained(gone_on)
    for run in gone_on.values():
        assert_close(run, alone, SAVED)
    again = {one: written(folder, *one, "again", (saved, STEPS), steps=STEPS + 1) for one in others}
    trained(again, "+")
    exported = {export_of(folder, run) for run in (saved, *again.values())}
    assert len(exported) == 1


def export_of(folder: Path, run: RunDirectory) -> bytes:
    """The weights of a run as they are exported."""
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    export(
        complete_checkpoints(run.checkpoints)[-1],
        run.path / "exported",
        ExportForm(AutoConfig.from_pretrained(folder / "model"), folder / "tokenizer", [256], torch.float32),
        StartedFrom(folder / "model"),
    )
    return (run.path / "exported" / "model.safetensors").read_bytes()


@pytest.mark.matrix
@pytest.mark.parametrize("axes", [pytest.param("tensor", marks=pytest.mark.matrix), "pipeline"])
def test_a_step_that_is_not_finite_leaves_what_rests_elsewhere_as_it_was(axes: str, folder: Path) -> None:
    """A document of the second step is poison, as in ``test_nonfinite``: state in memory stays as it was there."""
    runs = {(axes, tiers): written(folder, axes, tiers, "poisoned") for tiers in ("memory", "both", "host", "all")}
    data = PackedDataset.open(Path(Plan.read(runs[axes, "memory"].plan).data.train_path))
    poison = str(data.pack(pack_at(PACKS + 1, data.num_packs, SEED)).documents[0])
    work("poisoned_runs", (2, [poison, "model.layers.3.mlp", "gradient", *(str(run.path) for run in runs.values())]))
    assert [record["skipped"] for record in metrics(runs[axes, "memory"])] == [False, True, False, False]
    for run in runs.values():
        assert_same_bits(run, runs[axes, "memory"])


@pytest.mark.matrix
def test_moments_in_8_bits_have_the_same_blocks_where_rows_are_cut_between_them(tmp_path: Path) -> None:
    """Two workers divide rows of 512 numbers. Blocks are those of one worker, whose sums are other ones in their last
    bits: so a number may be rounded to another code. What is saved goes round as it is."""
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(200))
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_model(tmp_path / "model", llama_config(num_hidden_layers=2, vocab_size=259, **sizes))
    coarse: dict[str, Any] = {"memory": {"moments": "int8"}, "optimizer": {"lr": 3e-4, "clip": CLIP}}
    runs = compared(tmp_path, ("tensor", "tensor x pipeline"), ("both", "host"), name="coarse", **coarse)
    alone = written(tmp_path, "one", "memory", "coarse", **coarse)
    trained({("one", "memory"): alone})
    for run in runs.values():
        assert_close(run, alone, within=1e-4)

    start = runs["tensor", "both"], STEPS
    others = [("one", "memory"), ("tensor", "host"), ("tensor x pipeline", "both")]
    again = {one: written(tmp_path, *one, "again", start, steps=STEPS + 1, **coarse) for one in others}
    trained(again, "+")
    want = Shards(checkpoint_path(runs["tensor", "both"].checkpoints, STEPS))
    assert any(name.endswith("down_proj.weight.m_scale") for name in want.names("optimizer."))
    for run in again.values():
        found = Shards(complete_checkpoints(run.checkpoints)[-1])
        assert found.names() == want.names()
        for name in want.names():
            assert found.read(name).equal(want.read(name)), (run.path.name, name)
