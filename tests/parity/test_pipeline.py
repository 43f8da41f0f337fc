"""A model in stages on several workers trains as in one piece: every schedule, with shards, and from layout to layout.

The reference is a run on one worker (which ``test_layouts`` holds against a plain loop). The packs of a step (7) divide
neither by the workers nor by the stages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import final_weights, metrics
from ready import Start, ready, run_of
from test_tensor import with_biases
from transformers import AutoConfig

from forked import work
from tiny import alpaca_rows, byte_tokenizer, llama_config, neox_config, write_model, write_rows
from tonnage.checkpoint.description import ExportForm
from tonnage.checkpoint.export import Start as StartedFrom
from tonnage.checkpoint.export import export
from tonnage.checkpoint.save import complete_checkpoints
from tonnage.decide.decision import Decision
from tonnage.rundir.directory import RunDirectory

FAMILIES = {
    "neox": neox_config(hidden_size=64, intermediate_size=128, num_hidden_layers=5),
    "llama": llama_config(num_hidden_layers=5),  # tied
}
SAVED = 2
PACKS_PER_STEP = 7
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"workers": 1},
    "gpipe": {"workers": 2, "pipeline": 2, "schedule": "gpipe"},
    "1f1b": {"workers": 2, "pipeline": 2},
    "zero_bubble": {"workers": 2, "pipeline": 2, "schedule": "zero_bubble"},
    "interleaved": {"workers": 2, "pipeline": 2, "schedule": "interleaved"},
    "shard": {"workers": 2},
    "1f1b x shard": {"workers": 4, "pipeline": 2},
    "interleaved x replicate": {"workers": 4, "pipeline": 2, "schedule": "interleaved", "zero": 0},
    "1f1b x tensor": {"workers": 4, "pipeline": 2, "tensor": 2},
    "1f1b x shard x tensor": {"workers": 8, "pipeline": 2, "tensor": 2, "recompute": "full"},
}
NUM_STAGES = {"one": 0, "shard": 0, "interleaved": 4, "interleaved x replicate": 4}
"""2 if not named."""
TRAINED = {
    "neox": ("one", "gpipe"),
    "llama": ("one", "1f1b", "interleaved", "zero_bubble", "1f1b x shard", "1f1b x tensor"),
}
"""What CI tries; the rest is of the matrix."""
REST = {
    "neox": ("1f1b x shard", "1f1b x tensor", "1f1b x shard x tensor"),
    "llama": ("interleaved x replicate", "1f1b x shard x tensor"),
}
SHORT, LONG = 4, 8
"""Steps; long are the runs that others go on from, for six."""
CHANGES = {
    "one": ("1f1b x tensor",),
    "1f1b": ("shard",),
    "interleaved": ("zero_bubble",),
    "1f1b x shard": ("one",),
}
"""Layouts in which a run goes on that was saved in another."""
MORE_CHANGES = {"one": ("1f1b", "1f1b x shard"), "1f1b": ("one",), "1f1b x tensor": ("shard",)}
"""Of the matrix."""
BITS = ("one", "1f1b x shard", "zero_bubble", "1f1b x tensor", "one")
"""Layouts in which a state goes round, from halves with their low parts to fp32 masters and back."""
ON_HOST: dict[str, Any] = {"recompute": "full", "activation_tier": "host", "micro_batch": 1, "moments": "fp32"}
"""Of ``memory``: inputs of blocks in the host's memory."""
Made = tuple[RunDirectory, Decision]


def written(folder: Path, family: str, layout: str, name: str, start: Start | None = None, **changes: Any) -> Made:
    """A run directory that is ready for its workers; ``start`` is the run and step that it goes on from.

    A checkpoint that is not there yet must be when the workers come to it.
    """
    keys = dict(LAYOUTS[layout])
    workers, zero, recompute = keys.pop("workers"), keys.pop("zero", 3), keys.pop("recompute", "none")
    text = {
        "model": str(folder / family),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "validation": 0.05,
            "max_length": 64,
            "template": "plain",
            "over_length": "drop",
            "max_loss": 1.0,
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": PACKS_PER_STEP},
        "steps": LONG,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 2, "schedule": "constant"},
        "precision": "fp32",
        "memory": {"zero": zero, "micro_batch": 1, "moments": "fp32", "recompute": recompute},
        "parallel": keys,
        "launch": {"workers": workers, "threads": 1},
        "checkpoint": {"keep": 99},
        "evaluate": {"every": SHORT},
        "track": [],
        "output": str(folder / name.replace(" ", "")),
        "seed": 7,
    } | changes
    decision = ready(folder, text, start)
    return run_of(decision), decision


def train(*groups: tuple[list[Made], str]) -> None:
    """Train runs, group after group, those of a group that have as many workers together; each with a suffix."""
    told: list[tuple[int, list[str]]] = []
    for runs, suffix in groups:
        by_workers: dict[int, list[str]] = {}
        for run, decision in runs:
            by_workers.setdefault(decision.plan.workers, []).append(f"{run.path}{suffix}")
        told += by_workers.items()
    work("train_runs", *told)


def evaluation(run: RunDirectory) -> float:
    records = map(json.loads, run.metrics.read_text().splitlines())
    return float(next(record["eval_loss"] for record in records if "eval_loss" in record and record["step"] == SHORT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    write_rows(folder / "rows.jsonl", alpaca_rows(300))
    for family, config in FAMILIES.items():
        write_model(folder / family, config)
        with_biases(folder / family / "model.safetensors")
    return folder


@dataclass(frozen=True)
class Runs:
    whole: dict[tuple[str, str], Made]
    """By family and layout."""
    gone_on: list[RunDirectory]
    bits: list[Made]


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    whole = {
        (family, layout): written(
            folder,
            family,
            layout,
            f"{family}-{layout}",
            steps=LONG if family == "llama" and layout in CHANGES else SHORT,
            checkpoint={"every": SAVED, "keep": 99},
        )
        for family, layouts in TRAINED.items()
        for layout in layouts
    }
    changes: dict[str, tuple[str, ...]] = dict(CHANGES)
    gone_on = going_on(folder, changes, {before: whole["llama", before] for before in CHANGES})
    halves: dict[str, Any] = {"steps": SAVED, "precision": "bf16"}
    bits = [written(folder, "llama", BITS[0], "bits-0", **halves)]
    for number, layout in enumerate(BITS[1:], start=1):
        start = bits[-1][0], SAVED + number - 1
        bits.append(written(folder, "llama", layout, f"bits-{number}", start, **halves))
    train(([*whole.values(), bits[0]], ""), (gone_on, ""), *(([made], "+") for made in bits[1:]))
    return Runs(whole, [run for run, _ in gone_on], bits)


def going_on(folder: Path, changes: Mapping[str, Sequence[str]], saved: dict[str, Made]) -> list[Made]:
    """Runs that go on from what was saved in other layouts."""
    return [
        written(folder, "llama", after, f"{before}-then-{after}", (saved[before][0], SAVED))
        for before, layouts in changes.items()
        for after in layouts
    ]


@pytest.mark.slow
def test_two_stages_train_as_one_piece(folder: Path) -> None:
    """The short one of these tests, for every day."""
    one, two = (written(folder, "llama", layout, f"short-{layout}", steps=3) for layout in ("one", "1f1b"))
    train(([one, two], ""))
    assert_same_numbers(two[0], metrics(one[0]))


def assert_same_numbers(run: RunDirectory, want: list[dict[str, Any]]) -> None:
    """The steps of a run, which may be fewer."""
    got = metrics(run)
    assert len(got) in (3, SHORT, LONG)
    for ours, one in zip(got, want, strict=False):
        where = f"{run.path.name}, step {ours['step']}"
        assert ours["loss"] == pytest.approx(one["loss"], rel=1e-5), where
        assert ours["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4), where


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llama", pytest.param("neox", marks=pytest.mark.matrix)])
def test_stages_train_as_one_piece(family: str, runs: Runs) -> None:
    assert_one_piece({layout: runs.whole[family, layout] for layout in TRAINED[family]})


@pytest.mark.matrix
@pytest.mark.parametrize("family", REST)
def test_stages_on_more_workers_train_as_one_piece(family: str, folder: Path) -> None:
    how: dict[str, Any] = {"steps": SHORT, "checkpoint": {"every": SAVED, "keep": 99}}
    made = {
        layout: written(folder, family, layout, f"more-{family}-{layout}", **how) for layout in ("one", *REST[family])
    }
    train((list(made.values()), ""))
    assert_one_piece(made)


def assert_one_piece(made: dict[str, Made]) -> None:
    """Losses, norms, weights and evaluations of every layout are those on one worker."""
    alone, _ = made["one"]
    want, weights = metrics(alone), final_weights(alone, SHORT)
    assert want[SHORT - 1]["loss"] < want[0]["loss"] - 0.1
    assert any(one["grad_norm"] > 0.5 for one in want)
    for layout, (run, decision) in made.items():
        assert len(decision.plan.layout.stages) == NUM_STAGES.get(layout, 2)
        assert_same_numbers(run, want)
        got = final_weights(run, SHORT)
        assert got.keys() == weights.keys()
        for name, weight in weights.items():
            assert float((got[name] - weight).norm() / weight.norm()) <= 1e-5, f"{layout}, {name}"
        assert evaluation(run) == pytest.approx(evaluation(alone), rel=1e-5)


@pytest.mark.matrix
def test_a_run_goes_on_with_other_stages(runs: Runs) -> None:
    assert_gone_on(runs.gone_on, runs.whole["llama", "one"][0])


@pytest.mark.matrix
def test_a_run_goes_on_with_more_stages(folder: Path) -> None:
    saved = {
        before: written(folder, "llama", before, f"saved-{before}", checkpoint={"every": SAVED, "keep": 99})
        for before in MORE_CHANGES
    }
    gone_on = going_on(folder, MORE_CHANGES, saved)
    train((list(saved.values()), ""), (gone_on, ""))
    assert_gone_on([run for run, _ in gone_on], saved["one"][0])


def assert_gone_on(runs: list[RunDirectory], alone: RunDirectory) -> None:
    """Losses are those of the run on one worker, and steps, tokens and rates the same."""
    want = {record["step"]: record for record in metrics(alone)}
    for run in runs:
        got = metrics(run)
        assert [record["step"] for record in got] == list(range(SAVED + 1, LONG + 1)), run.path.name
        for record in got:
            where, reference = f"{run.path.name}, step {record['step']}", want[record["step"]]
            assert record["loss"] == pytest.approx(reference["loss"], rel=1e-5), where
            for same in ("tokens", "supervised_tokens", "lr", "epoch"):
                assert record[same] == reference[same], where


@pytest.mark.matrix
def test_what_stages_save_again_without_a_step_is_exported_bit_for_bit(folder: Path, runs: Runs) -> None:
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    exported = []
    for run, _ in runs.bits:
        target = run.path / "exported"
        export(
            complete_checkpoints(run.checkpoints)[-1],
            target,
            ExportForm(AutoConfig.from_pretrained(folder / "llama"), folder / "tokenizer", [256], torch.float32),
            StartedFrom(folder / "llama"),
        )
        exported.append((target / "model.safetensors").read_bytes())
    assert all(one == exported[0] for one in exported)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["interleaved", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("1f1b", "gpipe"))]
)
def test_inputs_of_blocks_rest_on_the_host_in_every_schedule(folder: Path, schedule: str) -> None:
    """Of several micro-batches at a time, each of which finds its own again."""
    here, _ = written(folder, "llama", schedule, f"here {schedule}", memory=ON_HOST | {"activation_tier": "device"})
    there, _ = written(folder, "llama", schedule, f"there {schedule}", memory=ON_HOST)
    work("train_runs", (2, [str(here.path), str(there.path)]))
    wanted, found = metrics(here), metrics(there)
    assert [(one["loss"], one["grad_norm"]) for one in found] == [(one["loss"], one["grad_norm"]) for one in wanted]
    assert len(wanted) == LONG
    assert "blocks in host memory, of" in there.log.read_text()
