"""Is the plan's choice the fastest? Every candidate that fits is run, and the chosen one is compared with the best.

    python -m benchmarks.choice [--problems 10] [--seed 0] [--steps 3] [--tokens 2048] [--sizes small medium]
                                [--output benchmarks/results/choice.json]

A problem is a model, a sequence length, a number of packs and of workers, and a budget of memory, all drawn by
``--seed``; what the planner decides (ZeRO stage, recompute, micro-batch) is left to it. The candidates are all of its
ways that fit the budget, with exact moments and nothing on disk if any of them fits so; the heap of each keeps freed
memory where the budget has room for that. Each is trained for some steps; then the chosen one and the three fastest
again, in turn, and the medians of all their steps count. Planned seconds are held beside measured ones, too: the mean
of their relative errors, over all ways of all problems. ``tonnage doctor`` should have measured the machine.

A problem whose output is there already is not solved again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import plan_truth

from tonnage.config import Config
from tonnage.data import PackedDataset
from tonnage.decide.decision import decide
from tonnage.decide.rows import rows_of
from tonnage.decide.written import write_run
from tonnage.doctor.cache import describe_here, load_machine
from tonnage.launch.local import run_workers
from tonnage.planning.layout import Layout
from tonnage.planning.plan import SAFETY, Choice, Plan
from tonnage.planning.scales import Scales
from tonnage.planning.search import Search, candidates
from tonnage.rundir.directory import RunDirectory

AGAIN = 3
"""Of the fastest, those that are run a second time beside the chosen one."""
KEYS = ("zero", "recompute", "micro_batch", "moments", "optimizer_tier", "gradient_tier", "parameter_tier")


def draw(seed: int, number: int, sizes: Sequence[str], tokens: int) -> Iterator[dict[str, Any]]:
    """Random problems; ``room`` is where the budget lies between the smallest and the largest way."""
    at_random = random.Random(seed)
    for _ in range(number):
        workers = at_random.choice([1, 2])
        length = at_random.choice([256, 512, 1024, 2048])
        yield {
            "family": at_random.choice(["gpt_neox", "llama"]),
            "size": at_random.choice(sizes),
            "vocabulary": at_random.choice(plan_truth.VOCABULARIES),
            "max_length": length,
            "workers": workers,
            "micro_batches": 1,
            "packs": workers * max(1, tokens // length // workers),
            "room": round(at_random.uniform(0.2, 1.1), 2),
        }


def described(layout: Layout) -> dict[str, Any]:
    return {key: getattr(layout, key) for key in KEYS}


def timed(folder: Path, name: str, config: str, layout: Layout) -> list[float]:
    """Seconds of the steps after the first, with everything decided as in ``layout``."""
    words = [f"memory.{key}={value}" for key, value in described(layout).items()]
    words += [f"output={folder / name}", "checkpoint.every=0"]
    decision = decide(config, words)
    run, kept = RunDirectory(folder / name), replace(decision.plan.layout, returns_memory=layout.returns_memory)
    plan = replace(decision.plan, choice=replace(decision.plan.choice, layout=kept))
    write_run(run, replace(decision, plan=plan))
    run_workers(run, decision.plan.workers, decision.plan.threads_per_worker)
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [record["step_seconds"] for record in records if "loss" in record][1:]


def ways_that_fit(plan: Plan, config: Config) -> list[Choice]:
    """What the planner had to choose from."""
    machine = load_machine(config.output) or describe_here(config.output)
    rows = rows_of(PackedDataset.open(Path(plan.data.train_path)), [], config.seed)
    ways = candidates(Search(config, Scales(plan.model, plan.data, machine, rows=rows)))
    fitting = [way for way in ways if way.peak_bytes <= plan.budget.usable]
    exact = [way for way in fitting if way.layout.moments == "fp32" and not way.layout.tiers_on_disk]
    quickest = sorted(exact or fitting, key=lambda way: -way.seconds.total)
    return list({tuple(described(way.layout).values()): way for way in quickest}.values())


def solve(setting: dict[str, Any], steps: int) -> dict[str, Any]:
    """Run all ways of a problem that fit."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        memory = {"optimizer_resident": 0}  # or what is on disk would differ with the budget
        config = str(plan_truth.write_inputs(folder, setting | {"memory": memory}, steps))
        free = decide(config, [])
        peaks = [way.peak_bytes for way in ways_that_fit(free.plan, free.config)]
        each = min(peaks) + setting["room"] * (max(peaks) - min(peaks))
        words = [f"memory.budget.device={int(each / SAFETY * setting['workers'])}"]
        decision = decide(config, words)
        plan, ways = decision.plan, ways_that_fit(decision.plan, decision.config)
        seconds = {n: timed(folder, f"way-{n}", config, way.layout) for n, way in enumerate(ways)}
        chosen = next(n for n, way in enumerate(ways) if described(way.layout) == described(plan.layout))
        first = sorted(seconds, key=lambda n: statistics.median(seconds[n]))
        for n in dict.fromkeys([chosen, *first[:AGAIN]]):
            seconds[n] += timed(folder, f"again-{n}", config, ways[n].layout)
    medians = {n: statistics.median(found) for n, found in seconds.items()}
    fastest = min(dict.fromkeys([chosen, *first[:AGAIN]]), key=lambda n: medians[n])
    return {
        **setting,
        "budget": plan.budget.usable,
        "chosen": described(ways[chosen].layout),
        "fastest": described(ways[fastest].layout),
        "ratio": medians[chosen] / medians[fastest],
        "ways": [
            described(way.layout)
            | {"returns_memory": way.layout.returns_memory, "planned_seconds": way.seconds.total, "seconds": seconds[n]}
            for n, way in enumerate(ways)
        ],
    }


def errors(row: dict[str, Any]) -> list[float]:
    """How far the planned seconds of a problem's ways are off, relative to the measured ones."""
    return [abs(way["planned_seconds"] / statistics.median(way["seconds"]) - 1) for way in row["ways"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step, about")
    parser.add_argument("--sizes", nargs="+", default=["small", "medium"], choices=list(plan_truth.SIZES)[1:])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    before = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    rows: list[dict[str, Any]] = []
    for setting in draw(options.seed, options.problems, options.sizes, options.tokens):
        known = (row for row in before.get("problems", []) if setting.items() <= row.items())
        rows.append(row := next(known, None) or solve(setting, options.steps))
        told = " ".join(f"{setting[key]}" for key in ("family", "size", "max_length", "packs", "workers"))
        off = statistics.mean(errors(row))
        print(f"{row['ratio']:.3f} of the fastest of {len(row['ways'])}, {off:.0%} off: {told}", flush=True)
        for which in ("chosen", "fastest") if row["chosen"] != row["fastest"] else ("chosen",):
            print(f"    {which} {row[which]}", flush=True)
        result = {
            "benchmark": "choice",
            "date": time.strftime("%Y-%m-%d"),
            "seed": options.seed,
            "worst": max(row["ratio"] for row in rows),
            "within_10_percent": sum(row["ratio"] <= 1.1 for row in rows),
            "seconds_error": statistics.mean(error for row in rows for error in errors(row)),
            "problems": rows,
        }
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
