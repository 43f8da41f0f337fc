"""MLPs over tiles of the sequence beside whole rows: bytes of a block and of a step, seconds, losses.

    python -m benchmarks.sequence_tiles [--lengths 8192 32768] [--tiles 16] [--steps 3] [--rounds 3] [--recompute full]
                                        [--output benchmarks/results/sequence_tiles.json]

A Llama of 70 million parameters (hidden 512, intermediate 2,048, 8 heads, 6 blocks; random weights, fp32) is decided
and trained as ``tonnage train`` does, with one row of so many tokens in a step: whole rows and tiles in turns, round
by round. A block's bytes are those that were weighed (``training.weigh``); a step's are the kernel's high-water mark of
the worker, less that of a run of a model that weighs nothing, against the plan's largest instant. Ratios are those of
tiles to whole rows, seconds round by round, all steps but the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import plan_truth

from tonnage.decide.decision import decide
from tonnage.decide.written import write_run
from tonnage.files.reading import read_json
from tonnage.files.writing import write_json
from tonnage.launch.local import run_workers
from tonnage.rundir.directory import RunDirectory

SHAPE = {"intermediate_size": 2048, "num_key_value_heads": 8}
ON_DEVICE = {f"{state}_tier": "device" for state in ("optimizer", "gradient", "parameter", "activation")}
PEAKS = ("forward_peak", "backward_peak")


def measure(length: int, tiles: int, recompute: str, steps: int, nothing: int) -> dict[str, Any]:
    """Plan and train, with MLPs over rows in so many tiles."""
    memory = {"micro_batch": 1, "zero": 3, "recompute": recompute, "moments": "fp32", "sequence_tiles": tiles}
    setting = {
        "family": "llama",
        "size": "small",
        "vocabulary": 32000,
        "max_length": length,
        "workers": 1,
        "micro_batches": 1,
        "memory": memory | ON_DEVICE,
    }
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        written = plan_truth.write_inputs(folder, setting, steps)
        config = folder / "model" / "config.json"
        write_json(config, read_json(config) | SHAPE | {"max_position_embeddings": length})
        decision = decide(str(written), ["precision=fp32"])
        plan, run = plan_truth.given_back(decision), RunDirectory(folder / "run")
        write_run(run, replace(decision, plan=plan))
        run_workers(run, plan.workers, plan.threads_per_worker)
        records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    block = plan.model.blocks[recompute]
    planned = plan.choice.peak_bytes - nothing
    known = plan_truth.measured(records, nothing)
    return {
        "tiles": tiles,
        "block_peak_bytes": round(max(getattr(block, name)(plan.layout.row_tokens) for name in PEAKS)),
        "block_saved_bytes": round(block.saved(plan.layout.row_tokens)),
        "planned_bytes": round(planned),
        "measured_bytes": known["measured_bytes"],
        "error": planned / known["measured_bytes"] - 1,
        "instant": plan.choice.peak.name,
        "planned_seconds": plan.choice.seconds.total,
        "seconds": known["seconds"],
        "losses": [record["loss"] for record in records if "loss" in record],
    }


def compared(length: int, rounds: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Tiles beside whole rows, at one length."""
    whole, tiled = rounds[0]
    seconds = [there["seconds"] / here["seconds"] for here, there in rounds]
    pairs = zip(whole["losses"], tiled["losses"], strict=True)
    errors = [one["error"] for both in rounds for one in both]
    return {
        "length": length,
        "tiles": tiled["tiles"],
        "block_peak_ratio": tiled["block_peak_bytes"] / whole["block_peak_bytes"],
        "step_peak_ratio": statistics.median(
            there["measured_bytes"] / here["measured_bytes"] for here, there in rounds
        ),
        "seconds_ratio": statistics.median(seconds),
        "seconds_ratios": seconds,
        "losses_differ": max(abs(ours / theirs - 1) for theirs, ours in pairs),
        "worst_error_of_plan": max(errors, key=abs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--tiles", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recompute", default="full", choices=["none", "selective", "full"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    nothing = plan_truth.measure_nothing(1, options.steps)
    summary, rows = [], []
    for length in options.lengths:
        rounds = []
        for _ in range(options.rounds):
            how = options.recompute, options.steps, nothing
            rounds.append((measure(length, 1, *how), measure(length, options.tiles, *how)))
        summary.append(compared(length, rounds))
        rows += [{"length": length, **one} for both in rounds for one in both]
        print(json.dumps(summary[-1]), flush=True)
    if options.output:
        result = {"recompute": options.recompute, "nothing_bytes": nothing, "summary": summary, "runs": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
