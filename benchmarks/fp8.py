"""What products in fp8 cost a tuned model, with the numbers of fp8 computed on a CPU.

    python -m benchmarks.fp8 --model DIR --data ROWS [--steps 100] [--lr 1e-4] [--directory DIR] [--output FILE]

Two runs of ``tonnage train`` that differ in nothing but ``precision``: ``bf16``, and ``fp8-emulated``. Both evaluate
held-out rows before the first step and after the last; what counts is how far apart they are then. Seconds are no
measure of fp8: a CPU has none, and computes its products in fp32. A run that is in the file already is not done again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.peers.contest import machine

PRECISIONS = ("bf16", "fp8-emulated")
LAST = 10
"""Steps at the end whose training loss is averaged."""


def run(folder: Path, options: argparse.Namespace, precision: str) -> dict[str, Any]:
    """One whole run: its losses on held-out rows and of its last steps."""
    directory = folder / precision
    config = {
        "model": str(options.model.resolve()),
        "data": {
            "train": [{"path": str(options.data.resolve()), "first": options.rows}],
            "validation": options.validation,
            "max_length": options.length,
        },
        "batch": {"tokens": options.tokens},
        "steps": options.steps,
        "optimizer": {"lr": options.lr},
        "precision": precision,
        "memory": {"micro_batch": options.tokens // options.length, "recompute": "none"},
        "launch": {"workers": 1, "timeout": 100000},
        "checkpoint": {"every": 0},
        "track": [],
        "output": str(directory),
    }
    path = folder / f"{precision}.yaml"
    path.write_text(json.dumps(config))
    subprocess.run([str(Path(sys.executable).with_name("tonnage")), "train", str(path)], check=True)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record["eval_loss"] for record in records if "eval_loss" in record]
    losses = [record["loss"] for record in records if "loss" in record]
    seconds = sorted(record["step_seconds"] for record in records if "step_seconds" in record)
    return {
        "precision": precision,
        "steps": len(losses),
        "held_out_before": evaluations[0],
        "held_out": evaluations[-1],
        "train_of_last_steps": fmean(losses[-LAST:]),
        "median_step_seconds": seconds[len(seconds) // 2],
        "losses": losses,
    }


def compared(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Losses with fp8 to those without, where both are there."""
    by_precision = {row["precision"]: row for row in runs}
    if by_precision.keys() != set(PRECISIONS):
        return {}
    exact, rounded = (by_precision[name] for name in PRECISIONS)
    keys = ("held_out_before", "held_out", "train_of_last_steps")
    apart = (abs(a / b - 1) for a, b in zip(rounded["losses"], exact["losses"], strict=True))
    return {key: rounded[key] / exact[key] for key in keys} | {"furthest_step": max(apart)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512, help="of a step")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--validation", type=float, default=0.03)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "fp8.json")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("steps", "lr", "length", "tokens", "rows", "validation")}
    runs: list[dict[str, Any]] = []
    if options.output.exists():
        before = json.loads(options.output.read_text())
        runs = before["runs"] if before["settings"] == settings else []
    for precision in PRECISIONS:
        if any(row["precision"] == precision for row in runs):
            continue
        with tempfile.TemporaryDirectory(dir=options.directory) as made:
            runs.append(run(Path(made), options, precision))
        result = {"benchmark": "fp8", "machine": machine(), "torchao": version("torchao")}
        model = {"model": options.model.name, "data": options.data.name, "settings": settings}
        options.output.write_text(
            json.dumps(result | model | {"compared": compared(runs), "runs": runs}, indent=2) + "\n"
        )
        print(json.dumps({key: value for key, value in runs[-1].items() if key != "losses"}), flush=True)
    print(json.dumps(compared(runs), indent=2))


if __name__ == "__main__":
    main()
