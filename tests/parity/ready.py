"""Runs that are ready for their workers: a config decided on and written, of tiny models on the same rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from tiny import alpaca_rows, write_rows
from tonnage.checkpoint.save import checkpoint_path
from tonnage.config import Config
from tonnage.decide.decision import Decision, decide
from tonnage.decide.written import write_run
from tonnage.files.reading import read_json
from tonnage.files.writing import write_json
from tonnage.rundir.directory import RunDirectory

Start = tuple[RunDirectory, int]
"""A run, and the step from whose checkpoint another goes on."""


def ready(folder: Path, text: dict[str, Any], start: Start | None = None) -> Decision:
    """What was decided for the run of a config, whose directory is written.

    A checkpoint to ``start`` from that is not there yet must be when the workers come to it.
    """
    path = folder / "config.yaml"
    path.write_text(json.dumps(text))
    decision = decide(str(path), [])
    run = run_of(decision)
    write_run(run, decision)
    if start is not None:
        earlier, step = start
        checkpoint = checkpoint_path(run.checkpoints, step)
        checkpoint.parent.mkdir()
        checkpoint.symlink_to(checkpoint_path(earlier.checkpoints, step))
        write_json(run.resume, {"checkpoint": checkpoint.name})
    return decision


def run_of(decision: Decision) -> RunDirectory:
    return RunDirectory(decision.config.output)


def updated_by_host(run: RunDirectory, **layout: str) -> RunDirectory:
    """A run whose plan was made for a CPU, which updates all by itself, as it would be beside a GPU whose host does."""
    plan = read_json(run.plan)
    plan["choice"]["layout"] |= {"update_tier": "host", **layout}
    write_json(run.plan, plan)
    return run


def of_families(
    folder: Path, write_model: Callable[[str, Path], object], *, sequences: int, **settings: Any
) -> Callable[..., Decision]:
    """A function that makes a run ``ready`` in ``folder``: of a family, whose model ``write_model`` writes, on so many
    workers.

    Its named arguments are keys of the config, besides ``settings``, or else of ``memory``.
    """
    write_rows(folder / "rows.jsonl", alpaca_rows(60))
    number = count()

    def written(family: str, workers: int = 1, start: Start | None = None, **named: Any) -> Decision:
        model = folder / family
        if not model.exists():
            write_model(family, model)
        keys = {key: value for key, value in named.items() if key in Config.model_fields}
        memory = {key: value for key, value in named.items() if key not in keys}
        text = {
            "model": str(model),
            "data": {
                "train": str(folder / "rows.jsonl"),
                "max_length": 96,
                "template": "plain",
                "over_length": "drop",
                "max_loss": 1.0,
                "cache": str(folder / "cache"),
            },
            "batch": {"sequences": sequences},
            "precision": "fp32",
            "router_loss": 0,
            "compile": "off",
            "memory": {"micro_batch": sequences // workers, **memory},
            "launch": {"workers": workers, "threads": 1},
            "checkpoint": {"every": 1, "keep": 99},
            "track": [],
            "output": str(folder / f"run-{next(number)}"),
            "seed": 5,
        }
        return ready(folder, text | settings | keys, start)

    return written
