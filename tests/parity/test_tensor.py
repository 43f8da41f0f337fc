"""Blocks computed by several ranks together (``parallel.tensor``): the same numbers as one rank, in every layout.

Losses, gradient norms and final weights are held against the plain loop, for a family with grouped queries and tied
embeddings and one with fused queries, keys and values, biases and an own head.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from plain import final_weights, metrics, plain_loop
from rich.console import Console
from torch import Tensor

from tiny import alpaca_rows, llama_config, neox_config, write_model, write_rows
from tonnage.cli.decide import Decision, decide
from tonnage.cli.train import write_run
from tonnage.launch.local import run_workers
from tonnage.rundir import RunDirectory

STEPS, PACKS_PER_STEP = 8, 8
FAMILIES = {"llama": llama_config(num_hidden_layers=2), "neox": neox_config(num_hidden_layers=2, hidden_size=96)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    write_rows(folder / "rows.jsonl", alpaca_rows(200))
    for family, config in FAMILIES.items():
        write_model(folder / family, config)
    return folder


def decided(folder: Path, family: str, workers: int, tensor: int = 1, name: str = "", **keys: Any) -> Decision:
    text: dict[str, Any] = {
        "model": str(folder / family),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": 96,
            "template": "plain",
            "over_length": "drop",
            "max_loss": 1.0,
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": PACKS_PER_STEP},
        "steps": STEPS,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 2},
        "precision": "fp32",
        "memory": {"micro_batch": 2, "zero": 3, "recompute": "none"},
        "parallel": {"tensor": tensor},
        "launch": {"workers": workers, "threads": 1},
        "track": [],
        "output": str(folder / f"{family}-{workers}-{tensor}-{name}"),
        "seed": 3,
    }
    for key, value in keys.items():
        text[key] = text[key] | value if isinstance(value, dict) else value
    path = folder / "config.yaml"
    path.write_text(json.dumps(text))
    decision = decide(str(path), [], Console(quiet=True))
    write_run(RunDirectory(decision.config.output), decision)
    return decision


Reference = tuple[list[dict[str, float]], dict[str, Tensor]]


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, Reference]:
    return {family: plain_loop(decided(folder, family, 1)) for family in FAMILIES}


def train(decisions: list[Decision]) -> list[RunDirectory]:
    runs = [RunDirectory(decision.config.output) for decision in decisions]
    command = [sys.executable, str(Path(__file__).with_name("train_runs.py")), *(str(run.path) for run in runs)]
    run_workers(runs[0], decisions[0].plan.workers, 1, command=command)
    return runs


def assert_same_numbers(run: RunDirectory, reference: Reference) -> None:
    steps, weights = reference
    got = metrics(run)
    assert len(got) == len(steps)
    for ours, plain in zip(got, steps, strict=True):
        where = f"{run.path.name}, step {ours['step']}"
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5), where
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), where
    found = final_weights(run)
    for name, weight in weights.items():
        if name in found:  # a tied head is there once
            difference = float((found[name] - weight).norm() / weight.norm())
            assert difference < 1e-5, f"{run.path.name}, {name}"


def test_two_ranks_compute_what_one_does(folder: Path, references: dict[str, Reference]) -> None:
    decisions = [
        decided(folder, family, 2, 2, recompute, memory={"recompute": recompute})
        for family, recompute in (("llama", "none"), ("neox", "selective"), ("llama", "full"))
    ]
    for run, decision in zip(train(decisions), decisions, strict=True):
        assert_same_numbers(run, references[Path(decision.config.model).name])
