"""ZeRO stages, hybrid sharding, recompute and accumulation: settings that change no number.

Every combination trains ten steps in fp32 and is held against the plain loop: losses, gradient norms, final weights.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import pytest
from plain import final_weights, metrics, plain_loop
from rich.console import Console
from torch import Tensor

from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.cli.decide import Decision, decide
from tonnage.cli.train import write_run
from tonnage.launch.local import run_workers
from tonnage.rundir import RunDirectory

STEPS, PACKS_PER_STEP = 10, 16
ACCUMULATIONS, RECOMPUTES = (1, 4), ("none", "selective", "full")
STAGES: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((3, 1),),
    2: ((0, 1), (1, 1), (2, 1), (3, 1)),
    4: ((0, 1), (1, 1), (2, 1), (3, 1), (3, 2)),
}
"""Workers -> (ZeRO stage, groups that replicate)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    write_rows(folder / "rows.jsonl", alpaca_rows(300))
    write_model(folder / "model", llama_config(num_hidden_layers=3))
    return folder


def decided(folder: Path, workers: int, zero: int, replicate: int, accumulation: int, recompute: str) -> Decision:
    name = f"{workers}-zero{zero}-{replicate}x-{accumulation}-{recompute}"
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
        "batch": {"sequences": PACKS_PER_STEP},
        "steps": STEPS,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 2},
        "precision": "fp32",
        "memory": {"zero": zero, "recompute": recompute, "micro_batch": PACKS_PER_STEP // workers // accumulation},
        "parallel": {"replicate": replicate},
        "launch": {"workers": workers, "threads": 1},
        "track": [],
        "output": str(folder / name),
        "seed": 3,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(text))
    decision = decide(str(path), [], Console(quiet=True))
    assert decision.plan.micro_batches_per_step == accumulation
    write_run(RunDirectory(decision.config.output), decision)
    return decision


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return plain_loop(decided(folder, 1, 0, 1, 1, "none"))


@pytest.mark.parametrize("workers", STAGES)
def test_every_setting_equals_the_plain_loop(
    workers: int, folder: Path, reference: tuple[list[dict[str, float]], dict[str, Tensor]]
) -> None:
    settings = [
        (zero, replicate, accumulation, recompute)
        for (zero, replicate), accumulation, recompute in product(STAGES[workers], ACCUMULATIONS, RECOMPUTES)
    ]
    runs = {setting: RunDirectory(decided(folder, workers, *setting).config.output) for setting in settings}
    worker = Path(__file__).with_name("train_runs.py")
    command = [sys.executable, str(worker), *(str(run.path) for run in runs.values())]
    run_workers(runs[settings[0]], workers, 1, command=command)
    steps, weights = reference
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    for setting, run in runs.items():
        got = metrics(run)
        assert len(got) == STEPS
        for ours, plain in zip(got, steps, strict=True):
            where = f"{workers} workers, {setting}, step {ours['step']}"
            assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5), where
            assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), where
        for name, weight in final_weights(run).items():
            difference = float((weight - weights[name]).norm() / weights[name].norm())
            assert difference < 1e-5, f"{workers} workers, {setting}, {name}"
