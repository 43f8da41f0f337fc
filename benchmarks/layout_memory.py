"""Bytes of a worker in layouts with tensor and pipeline axes, planned and measured: pythia-410m's shape.

    python -m benchmarks.layout_memory [--steps 3] [--length 512] [--workers N] [--rounds 1]
                                       [--output benchmarks/results/layout_memory.json]

Each layout is decided and trained as ``tonnage train`` does, on random weights, as many gloo workers as it has
ranks; measured as in ``plan_truth.py``: the kernel's high-water mark of the worst worker while it trained, less that of
a model that weighs nothing on as many workers, against the plan's largest instant. With ``--workers`` only layouts of
so many take turns, ``--rounds`` times, and medians of their seconds are told.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import plan_truth

LAYOUTS: list[tuple[int, dict[str, Any], int]] = [
    (2, {}, 3),
    (2, {"tensor": 2}, 3),
    (2, {"pipeline": 2}, 3),
    (4, {"tensor": 2}, 3),
    (4, {"pipeline": 2}, 1),
    (4, {"tensor": 2, "pipeline": 2}, 1),
    (8, {"tensor": 2, "pipeline": 2}, 1),
]
"""Workers, axes (the rest are data shards), ZeRO stage."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    plan_truth.SIZES["410m"] = (1024, 16, 24)
    nothing: dict[int, int] = {}
    rows = []
    layouts = [layout for layout in LAYOUTS if options.workers in (None, layout[0])] * options.rounds
    for workers, parallel, zero in layouts:
        if workers not in nothing:
            nothing[workers] = plan_truth.measure_nothing(workers, options.steps)
        memory = {"micro_batch": 1, "zero": zero, "recompute": "none", "moments": "fp32"}
        memory |= {f"{state}_tier": "device" for state in ("optimizer", "gradient", "parameter")}
        setting = {
            "family": "gpt_neox",
            "size": "410m",
            "vocabulary": 50304,
            "max_length": options.length,
            "workers": workers,
            "micro_batches": 4 if "pipeline" in parallel else 1,
            "packs": workers // math.prod(parallel.values()) * (4 if "pipeline" in parallel else 1),
            "parallel": parallel,
            "memory": memory,
        }
        row = plan_truth.measure(setting, options.steps, nothing[workers])
        rows.append(row)
        axes = " x ".join(f"{name} {size}" for name, size in parallel.items()) or "shards"
        print(
            f"{row['planned_bytes'] / 1e6:>8.0f} {row['measured_bytes'] / 1e6:>8.0f} MB {row['error']:>+7.1%}  "
            f"{row['planned_seconds']:>7.2f} {row['seconds']:>7.2f} s  {workers} workers, {axes}, zero {zero}: "
            f"{row['instant']}",
            flush=True,
        )
    per_pack: dict[str, list[float]] = {}
    for row in rows:
        axes = " x ".join(f"{name} {size}" for name, size in row["parallel"].items()) or "shards"
        per_pack.setdefault(f"{row['workers']} workers, {axes}", []).append(row["seconds"] / row["packs"])
    errors = [abs(row["error"]) for row in rows]
    summary = {
        "median_absolute_error": statistics.median(errors),
        "worst": max(errors),
        "seconds_per_pack": {name: statistics.median(found) for name, found in per_pack.items()},
    }
    print(json.dumps(summary))
    if options.output:
        result = {"benchmark": "layout_memory", "date": time.strftime("%Y-%m-%d"), **summary}
        options.output.write_text(json.dumps(result | {"interpreter_bytes": nothing, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
