"""A run saved in one layout goes on in another: the same packs, the same losses within rounding.

The reference is one uninterrupted run on 4 workers with ZeRO 3. It goes on from its first checkpoint in every other
layout, and each of those goes on from a checkpoint of its own on 4 workers again.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from plain import metrics
from ready import Start, ready, run_of

from forked import train
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint.save import checkpoint_path
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory

STEPS, SAVED, SAVED_AGAIN = 10, 2, 4
Layout = tuple[int, int, int]
"""Workers, ZeRO stage, groups that replicate."""
REFERENCE: Layout = (4, 3, 1)
LAYOUTS: list[Layout] = [(1, 3, 1), *((workers, zero, 1) for workers, zero in product((2, 3), (0, 1, 2, 3)))]
HYBRID: list[Layout] = [(4, 3, 2), (4, 0, 1)]


def written(
    folder: Path,
    name: str,
    layout: Layout,
    start: Start | None = None,
    precision: str = "fp32",
    **memory: Any,
) -> RunDirectory:
    """A run directory that is ready for its workers; ``start`` is the run and step that it goes on from.

    A checkpoint that is not there yet must be when the workers come to it.
    """
    workers, zero, replicate = layout
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
        "batch": {"sequences": 12},
        "steps": STEPS,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 2, "loss_scale_growth": 3},
        "precision": precision,
        "memory": {"zero": zero, "micro_batch": 12 // workers, **memory},
        "parallel": {"replicate": replicate},
        "launch": {"workers": workers, "threads": 1},
        "checkpoint": {"every": SAVED, "keep": 99},
        "track": [],
        "output": str(folder / name),
    }
    return run_of(ready(folder, text, start))


def steps(run: RunDirectory) -> dict[int, dict[str, float]]:
    return {record["step"]: record for record in metrics(run) if "loss" in record}


def assert_goes_on(run: RunDirectory, after: int, reference: dict[int, dict[str, float]]) -> None:
    got = steps(run)
    assert list(got) == list(range(after + 1, STEPS + 1)), run.path.name
    for number, record in got.items():
        where, want = f"{run.path.name}, step {number}", reference[number]
        assert record["loss"] == pytest.approx(want["loss"], rel=1e-5), where
        for same in ("tokens", "supervised_tokens", "lr", "epoch"):
            assert record[same] == want[same], where


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_rows(folder / "rows.jsonl", alpaca_rows(300))
    write_model(folder / "model", llama_config(num_hidden_layers=1))
    return folder


@pytest.mark.slow
def test_every_layout_goes_on_from_every_other(folder: Path) -> None:
    whole, hybrid = written(folder, "whole", REFERENCE), written(folder, "hybrid", (4, 3, 2))
    again = written(folder, "again", REFERENCE, (whole, SAVED))
    scaled = written(folder, "scaled", (2, 3, 1), precision="fp16")
    scaled_again = written(folder, "scaled-again", (2, 3, 1), (scaled, SAVED), precision="fp16")
    runs = {layout: written(folder, "on-{}-zero{}-{}x".format(*layout), layout, (whole, SAVED)) for layout in LAYOUTS}
    alone = written(folder, "from-hybrid", (1, 0, 1), (hybrid, SAVED))
    other = [written(folder, "on-{}-zero{}-{}x".format(*layout), layout, (whole, SAVED)) for layout in HYBRID]
    back = [written(folder, "back-{}-zero{}-{}x".format(*at), REFERENCE, (runs[at], SAVED_AGAIN)) for at in LAYOUTS]
    on = {workers: [run for layout, run in runs.items() if layout[0] == workers] for workers in (1, 2, 3)}
    on_disk = written(folder, "on-disk", REFERENCE, (whole, SAVED), optimizer_tier="disk")
    coarse = written(folder, "coarse", (2, 2, 1), (whole, SAVED), moments="int8", optimizer_tier="disk")
    groups = [(4, [whole, hybrid, again]), (1, [*on[1], alone]), (2, [*on[2], scaled, scaled_again, coarse])]
    train(*groups, (3, on[3]), (4, [*other, *back, on_disk]))

    reference = steps(whole)
    assert reference[STEPS]["loss"] < reference[SAVED]["loss"] - 0.5
    for run in (alone, *runs.values(), *other):
        assert_goes_on(run, SAVED, reference)
    for run in back:
        assert_goes_on(run, SAVED_AGAIN, reference)
    assert_same_bits(again, reference)
    assert_same_bits(on_disk, reference)
    assert "moments: float32 as int8" in coarse.log.read_text()
    for number, record in steps(coarse).items():
        assert record["loss"] == pytest.approx(reference[number]["loss"], rel=0.02)
    assert_same_bits(scaled_again, steps(scaled))
    assert steps(scaled)[SAVED + 1]["loss_scale"] != steps(scaled)[STEPS]["loss_scale"]
    assert_saved_once(hybrid, alone)


ALL_ON_DISK = dict.fromkeys(("optimizer_tier", "parameter_tier", "gradient_tier"), "disk")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "memory"),
    [
        ((1, 3, 1), ALL_ON_DISK),
        ((1, 3, 1), {}),
        ((2, 2, 1), {}),
    ],
    ids=["disk", "memory", "divided"],
)
def test_a_run_that_waits_for_its_saves_saves_the_same(
    folder: Path, layout: Layout, memory: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Where memory has no room for a copy to save from; and it goes on from there."""
    name = request.node.callspec.id
    saved, waited = (written(folder, f"{way}-{name}", layout, **memory) for way in ("beside", "between"))
    plan = Plan.read(waited.plan)
    assert plan.layout.saves_beside
    between = replace(plan.choice, layout=replace(plan.layout, saves_beside=False))
    replace(plan, choice=between).write(waited.plan)
    went_on = written(folder, f"went-on-{name}", layout, (waited, SAVED), **memory)
    train((layout[0], [saved, waited, went_on]))
    assert steps(waited).keys() == steps(saved).keys()
    for step in (SAVED, SAVED_AGAIN, STEPS):
        files = [sorted(checkpoint_path(run.checkpoints, step).glob("shard*")) for run in (saved, waited)]
        assert [one.read_bytes() for one in files[0]] == [one.read_bytes() for one in files[1]]
    assert_same_bits(went_on, steps(saved))
    told = [record for record in metrics(waited) if "blocked_seconds" in record]
    assert all(record["blocked_seconds"] > 0.5 * record["save_seconds"] for record in told)


def assert_same_bits(run: RunDirectory, reference: dict[int, dict[str, float]]) -> None:
    got = steps(run)
    assert list(got) == list(range(SAVED + 1, STEPS + 1))
    for number, record in got.items():
        for key in ("loss", "grad_norm"):
            assert record[key] == reference[number][key], (run.path.name, number)


def assert_saved_once(hybrid: RunDirectory, alone: RunDirectory) -> None:
    """What replicas hold twice is on disk once, and they share the work."""
    shards = [path.stat().st_size for path in checkpoint_path(hybrid.checkpoints, STEPS).glob("shard*")]
    (whole,) = (path.stat().st_size for path in checkpoint_path(alone.checkpoints, STEPS).glob("shard*"))
    assert sum(shards) == pytest.approx(whole, rel=0.05)  # headers differ
    assert max(shards) < 1.2 * min(shards)
