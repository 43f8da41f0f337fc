"""What rounding to 4 bits costs a tuned model, with fake quantisation in its tuning and without.

    python -m benchmarks.quantize_aware --model DIR --data ROWS [--schemes int4 int8-int4] [--group-size 64]
                                        [--steps 60] [--lr 1e-4] [--directory DIR] [--output FILE]

For each scheme two runs of ``tonnage train`` that differ in nothing but when fake quantisation begins: with the first
step, or after the last. Both evaluate the held-out rows before the first step and after the last, as the model will be
served (rounded) and as it is in bf16. What a run without loses by rounding is the first run's rounded loss less its
exact one; what a run with loses is its rounded loss less that same exact one. Results go to the file as they come, and
what is done already is not done again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.contest import machine


def run(folder: Path, options: argparse.Namespace, scheme: str, begins: bool) -> dict[str, Any]:
    """One whole run; its evaluation losses and the mean time of its steps."""
    directory = folder / f"{scheme}-{'with' if begins else 'without'}"
    aware: dict[str, Any] = {"scheme": scheme, "after_steps": 0 if begins else options.steps}
    if scheme in ("int4", "int8-int4"):
        aware["group_size"] = options.group_size
    config = {
        "model": str(options.model.resolve()),
        "data": {
            "train": [{"path": str(options.data.resolve()), "first": options.rows}],
            "validation": options.validation,
            "max_length": 512,
        },
        "batch": {"tokens": 2048},
        "steps": options.steps,
        "optimizer": {"lr": options.lr},
        "quantize_aware": aware,
        "memory": {"micro_batch": 4, "recompute": "none"},
        "launch": {"workers": 1, "timeout": 100000},
        "track": [],
        "output": str(directory),
    }
    path = folder / f"{directory.name}.yaml"
    path.write_text(json.dumps(config))
    subprocess.run([str(Path(sys.executable).with_name("tonnage")), "train", str(path)], check=True)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if "unquantized_loss" in record]
    seconds = [record["step_seconds"] for record in records if "step_seconds" in record]
    first, last = evaluations[0], evaluations[-1]
    return {
        "scheme": scheme,
        "group_size": aware.get("group_size"),
        "fake_quantized": begins,
        "steps": options.steps,
        "rounded_before": first["eval_loss"],
        "exact_before": first["unquantized_loss"],
        "rounded": last["eval_loss"],
        "exact": last["unquantized_loss"],
        "median_step_seconds": sorted(seconds)[len(seconds) // 2],
    }


def compared(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each scheme that was run both ways, what rounding costs, in nats a token, and which part of it is left."""
    found = []
    for scheme in dict.fromkeys(row["scheme"] for row in runs):
        both = {row["fake_quantized"]: row for row in runs if row["scheme"] == scheme}
        if len(both) == 2:
            without, aware = both[False], both[True]
            loses, left = without["rounded"] - without["exact"], aware["rounded"] - without["exact"]
            found.append({"scheme": scheme, "without": loses, "with": left, "part_left": left / loses})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--schemes", nargs="+", default=["int4"])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--validation", type=float, default=0.04)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "quantize_aware.json")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = json.loads(options.output.read_text())["runs"] if options.output.exists() else []
    for scheme in options.schemes:
        for begins in (False, True):
            if any(
                (row["scheme"], row["fake_quantized"], row["steps"]) == (scheme, begins, options.steps) for row in runs
            ):
                continue
            with tempfile.TemporaryDirectory(dir=options.directory) as made:
                runs.append(run(Path(made), options, scheme, begins))
            result = {"benchmark": "quantize_aware", "machine": machine(), "torchao": version("torchao")}
            settings = {name: getattr(options, name) for name in ("lr", "rows", "validation")}
            model = {"model": options.model.name, "data": options.data.name}
            written = result | model | settings | {"compared": compared(runs), "runs": runs}
            options.output.write_text(json.dumps(written, indent=2) + "\n")
            print(json.dumps(runs[-1]), flush=True)
    print(json.dumps(compared(runs), indent=2))


if __name__ == "__main__":
    main()
