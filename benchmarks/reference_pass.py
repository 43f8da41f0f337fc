"""The pass of the reference beside an evaluation of the same pairs, in turns, in one process.

    python -m benchmarks.reference_pass [--shape llama-135m] [--pairs 64] [--rounds 5] [--output FILE]

Both go forward over the same packs in the same micro-batches; the pass writes down what it finds as well. The ratio is
its tokens a second to the evaluation's.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.peers.contest import machine, write_result
from benchmarks.peers.inputs import SHAPES, write_model, write_our_run
from benchmarks.peers.preferences import write_pairs

from tonnage.kernels.threads import use_threads
from tonnage.parallel.world import join_world
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.training.assemble import assemble
from tonnage.training.evaluate import evaluate_pairs
from tonnage.training.memory import Phases
from tonnage.training.reference import reference_scores
from tonnage.training.setting import WorkerSetting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-135m")
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        seconds = _seconds(Path(made), arguments)
    medians = {name: statistics.median(of_rounds) for name, of_rounds in seconds.items()}
    result = {
        "benchmark": "reference_pass",
        "machine": machine(),
        "shape": arguments.shape,
        "pairs": arguments.pairs,
        "seconds": seconds,
        "median_seconds": medians,
        "ratio": medians["evaluation"] / medians["reference"],
    }
    write_result(arguments.output, result)


def _seconds(folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    model, rows = write_model(folder / "model", arguments.shape), folder / "rows.jsonl"
    write_pairs(rows, arguments.pairs)
    config = {
        "model": str(model),
        "data": {"train": str(rows), "max_length": 1024, "pack": False, "cache": str(folder / "cache")},
        "objective": "dpo",
        "batch": {"sequences": 8},
        "steps": arguments.pairs // 8,
    }
    decision = write_our_run(folder / "run", config)
    run, plan = RunDirectory(decision.config.output), decision.plan
    run.workers.mkdir(exist_ok=True)
    use_threads(plan.threads_per_worker)
    seconds: dict[str, list[float]] = {"reference": [], "evaluation": []}
    with join_world() as world:
        setting = WorkerSetting(
            decision.config, plan, world, lambda line: None, Phases(PositionFile(run.worker_position(0)))
        )
        job = assemble(setting)
        assert job.pair_loss is not None
        assert plan.data.reference_path is not None
        for _ in range(arguments.rounds):
            shutil.rmtree(plan.data.reference_path)
            began = time.perf_counter()
            reference_scores(setting, job.train_data, None, 0, job)
            middle = time.perf_counter()
            evaluate_pairs(job.pipeline, job.train_data, job.deal, world, job.pair_loss)
            seconds["reference"].append(middle - began)
            seconds["evaluation"].append(time.perf_counter() - middle)
    return seconds


if __name__ == "__main__":
    main()
