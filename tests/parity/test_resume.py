"""A run saved in one layout goes on in another: the same packs, the same losses within rounding.

The reference is one uninterrupted run on 4 workers with ZeRO 3. It goes on from its first checkpoint in every other
layout, and some of those go on from a checkpoint of theirs on 4 workers again.
"""

from __future__ import annotations

import json
import shutil
import sys
from itertools import product
from pathlib import Path

import pytest
from plain import metrics
from rich.console import Console

from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint.save import checkpoint_path
from tonnage.cli.decide import decide
from tonnage.cli.train import write_run
from tonnage.launch.local import run_workers
from tonnage.rundir import RunDirectory, write_json

STEPS, SAVED, SAVED_AGAIN = 28, 4, 8
Layout = tuple[int, int, int]
"""Workers, ZeRO stage, groups that replicate."""
REFERENCE: Layout = (4, 3, 1)
LAYOUTS: list[Layout] = [(workers, zero, 1) for workers, zero in product((1, 2, 3), (0, 1, 2, 3))]
HYBRID: list[Layout] = [(4, 3, 2), (4, 0, 1)]
BACK: list[Layout] = [(1, 0, 1), (2, 0, 1), (2, 2, 1), (3, 1, 1), (3, 3, 1)]


def written(folder: Path, name: str, layout: Layout, start: tuple[RunDirectory, int] | None = None) -> RunDirectory:
    """A run directory that is ready for its workers; ``start`` is the run and step that it goes on from."""
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
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 2},
        "precision": "fp32",
        "memory": {"zero": zero, "micro_batch": 12 // workers},
        "parallel": {"replicate": replicate},
        "launch": {"workers": workers, "threads": 1},
        "checkpoint": {"every": SAVED, "keep": 99},
        "track": [],
        "output": str(folder / name),
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(text))
    decision = decide(str(path), [], Console(quiet=True))
    run = RunDirectory(decision.config.output)
    write_run(run, decision)
    if start is not None:
        earlier, step = start
        checkpoint = checkpoint_path(run.checkpoints, step)
        shutil.copytree(checkpoint_path(earlier.checkpoints, step), checkpoint)
        write_json(run.resume, {"checkpoint": checkpoint.name})
    return run


def train(workers: int, runs: list[RunDirectory]) -> None:
    worker = Path(__file__).with_name("train_runs.py")
    command = [sys.executable, str(worker), *(str(run.path) for run in runs)]
    run_workers(runs[0], workers, 1, command=command)


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
    train(4, [whole, hybrid])
    reference = steps(whole)
    assert reference[STEPS]["loss"] < reference[SAVED]["loss"] - 0.5

    runs = {layout: written(folder, "on-{}-zero{}-{}x".format(*layout), layout, (whole, SAVED)) for layout in LAYOUTS}
    alone = written(folder, "from-hybrid", (1, 0, 1), (hybrid, SAVED))
    for workers in (1, 2, 3):
        train(workers, [run for layout, run in runs.items() if layout[0] == workers] + [alone] * (workers == 1))
    for run in (alone, *runs.values()):
        assert_goes_on(run, SAVED, reference)
    assert_saved_once(hybrid, alone)

    again = written(folder, "same", REFERENCE, (whole, SAVED))
    other = [written(folder, "on-{}-zero{}-{}x".format(*layout), layout, (whole, SAVED)) for layout in HYBRID]
    back = [written(folder, "back-{}-zero{}-{}x".format(*at), REFERENCE, (runs[at], SAVED_AGAIN)) for at in BACK]
    train(4, [again, *other, *back])
    for run in other:
        assert_goes_on(run, SAVED, reference)
    for run in back:
        assert_goes_on(run, SAVED_AGAIN, reference)
    for number, record in steps(again).items():  # the same layout: the same bits
        for key in ("loss", "grad_norm"):
            assert record[key] == reference[number][key]


def assert_saved_once(hybrid: RunDirectory, alone: RunDirectory) -> None:
    """What replicas hold twice is on disk once, and they share the work."""
    shards = [path.stat().st_size for path in checkpoint_path(hybrid.checkpoints, STEPS).glob("shard*")]
    (whole,) = (path.stat().st_size for path in checkpoint_path(alone.checkpoints, STEPS).glob("shard*"))
    assert sum(shards) == pytest.approx(whole, rel=0.05)  # headers differ
    assert max(shards) < 1.2 * min(shards)
