"""Runs that nobody trains, for trackers: a directory with a config, and what rank 0 writes as it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tonnage.rundir.directory import RunDirectory

PRIVATE = "somebody"
"""Part of every path in the config."""


def fake_run(folder: Path, **keys: Any) -> RunDirectory:
    run = RunDirectory(folder / "runs" / "sums")
    run.workers.mkdir(parents=True)
    config = {
        "model": f"/home/{PRIVATE}/models/tiny",
        "data": {"train": f"/home/{PRIVATE}/rows.jsonl"},
        "evaluate": {"prompts": f"/home/{PRIVATE}/asked.jsonl"},
        "output": str(run.path),
        **keys,
    }
    run.config.write_text(yaml.safe_dump(config))
    return run


def take_steps(run: RunDirectory, first: int, last: int) -> None:
    """Steps of which the last is followed by an evaluation with two answers."""
    with run.metrics.open("a") as file:
        for step in range(first, last + 1):
            record = {"step": step, "loss": 8 / step, "lr": None, "skipped": False, "memory": {"host_peak": 2.0**30}}
            file.write(json.dumps({**record, "expert_shares": [[0.5, 0.5]]}) + "\n")
        file.write(json.dumps({"step": last, "eval_loss": 0.5}) + "\n")
    with run.samples.open("a") as file:
        for number in (1, 2):
            sample = {
                "step": last,
                "number": number,
                "prompt": "What is 2 + 2?",
                "answer": f"{number}",
                "expected": "4",
            }
            file.write(json.dumps(sample) + "\n")


def go_on_from(run: RunDirectory, step: int) -> None:
    """What a launcher does before a run goes on from a checkpoint."""
    run.rewind_metrics(step)
    run.resume.write_text(json.dumps({"checkpoint": f"step-{step:08}"}))


def said(run: RunDirectory) -> str:
    return run.log.read_text() if run.log.exists() else ""
