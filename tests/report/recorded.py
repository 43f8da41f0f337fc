"""Directories of runs that were decided but never trained: what their steps measured is made up."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from tonnage.files.writing import write_json
from tonnage.rundir.directory import RunDirectory


def decided(folder: Path, model: str = "model", **keys: Any) -> RunDirectory:
    """A run of a tiny model in a folder, as it is before its workers start."""
    from tiny import alpaca_rows, llama_config, write_model, write_rows
    from tonnage.decide.decision import decide
    from tonnage.decide.written import write_run

    if not (folder / model).exists():
        write_model(folder / model, llama_config(num_hidden_layers=1, initializer_range=0.3))
        write_rows(folder / "rows.jsonl", alpaca_rows(60))
    data = {"train": str(folder / "rows.jsonl"), "validation": 0.2, "max_length": 128, "template": "plain"}
    config = {
        "model": str(folder / model),
        "data": {**data, "cache": str(folder / "cache")},
        "batch": {"sequences": 4},
        "steps": 40,
        "output": str(folder / "run"),
    } | keys
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    decision = decide(str(path), [])
    run = RunDirectory(decision.config.output)
    write_run(run, decision)
    return run


def record(run: RunDirectory, number: int, **changes: Any) -> None:
    """Steps as a run would write them: a loss that falls, and an evaluation after every tenth of them."""
    chance = random.Random(0)
    with run.metrics.open("w") as file:
        for step in range(1, number + 1):
            loss = 2 + 3 * math.exp(-4 * step / number) + chance.gauss(0, 0.1)
            seconds = 0.4 + 0.05 * chance.random()
            found = {
                "step": step,
                "epoch": step / number,
                "loss": loss,
                "grad_norm": 1 + chance.random(),
                "lr": 1e-3 * (1 - step / (number + 1)),
                "tokens": 4000,
                "computed_tokens": 4000,
                "supervised_tokens": 2000,
                "tokens_per_second": 4000 / seconds,
                "step_seconds": seconds,
                "memory": {"device_peak": 0, "host_peak": 700_000_000 + min(step, 1000) * 1000},
                "skipped": False,
            }
            file.write(json.dumps(found | changes.get(f"at{step}", {})) + "\n")
            if step % max(1, number // 10) == 0:
                file.write(json.dumps({"step": step, "eval_loss": loss + 0.1, "eval_seconds": 0.5}) + "\n")
        phases = [{"phase": name, "host": [bytes], "device": [0]} for name, bytes in PHASES.items()]
        file.write(json.dumps({"step": number, "memory_phases": phases}) + "\n")
    with run.samples.open("w") as file:
        for step in range(0, number + 1, max(1, number // 20)):
            for place, asked in enumerate(ASKED, start=1):
                answer = asked.upper() if step == number else asked[: step % 5]
                sample = {"step": step, "number": place, "prompt": asked, "answer": answer, "expected": asked.upper()}
                file.write(json.dumps(sample) + "\n")
    planned = {"memory_bytes": 650_000_000, "step_seconds": 0.5}
    write_json(run.outcome, {"planned": planned, "measured": {"memory_bytes": 700_000_000, "step_seconds": 0.42}})
    run.log.write_text(
        f"2026-01-01 10:00:00 training steps 1 to {number}\n"
        f"2026-01-01 11:00:00 training steps {number // 2} to {number}\n"
    )


ASKED = ("say ab", "say <b>c</b>")
PHASES = {"load": 520_000_000, "forward": 640_000_000, "backward": 700_000_000, "update": 690_000_000}
