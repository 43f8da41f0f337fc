"""How long the workers of a pipeline stand idle, by schedule, against the formula.

    python benchmarks/pipeline_bubble.py [--micro-batches 2 4] [--steps 16] [--output FILE]

Two workers of one thread each train a random Llama shape of 8 equal blocks with a head of no weight in fp32, all
micro-batches 512 tokens of one document: nothing but what the schedule leaves is idle. A worker is busy while a pass
runs and does not wait for the other one; a step lasts until both are done. For ``zero_bubble`` the formula has the
measured share of weight gradients. Steps of the schedules alternate; figures are medians. The formulas know no
deviation of one pass from the next: each is a wait of the other worker, which the fewest micro-batches show least.

Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from tonnage.host.allocators import choose_allocators
from tonnage.kernels.threads import use_threads
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.parallel.deferred import WeightGradients
from tonnage.parallel.stages import keep_stage
from tonnage.parallel.world import join_world
from tonnage.planning.schedule import Schedule, cut, idle_share
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel
from tonnage.training.memory import set_up_heap
from tonnage.training.pipeline import Pipeline

WORKERS, BLOCKS, TOKENS, VOCABULARY = 2, 8, 512, 256
SCHEDULES: dict[Schedule, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
"""With stages of each worker."""
Result = dict[str, list[dict[str, float]]]


def work(rank: int, port: int, micro_batches: int, steps: int, told: multiprocessing.Queue[Result]) -> None:
    """One worker: seconds of every kind of pass and of the whole, step by step, for every schedule."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORKERS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    use_threads(1)
    set_up_heap(returns=False)
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    batch = MicroBatch(ids, (TOKENS,), torch.arange(8), ids[0, 1:9], torch.ones(8))
    with join_world(pipeline=WORKERS) as world:
        pipelines: dict[Schedule, Pipeline] = {}
        for schedule, per_worker in SCHEDULES.items():
            stages = {}
            for number in range(rank, WORKERS * per_worker, WORKERS):
                shape = LlamaConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=512,
                    intermediate_size=1408,
                    num_hidden_layers=BLOCKS,
                    num_attention_heads=8,
                )
                model = build_on_meta(shape, torch.float32)
                stage = keep_stage(model, dissect(model), number, cut(BLOCKS, WORKERS * per_worker, 1.0, 0.0, 0.0))
                allocate(model, world.device)
                initialise_randomly(model, seed=0)
                stages[number] = LossModel(model, stage.anatomy, stage.doors)
            blocks = [block for stage in stages.values() for block in stage.anatomy.blocks]
            later = WeightGradients(blocks, lambda weight: None) if schedule == "zero_bubble" else None
            pipelines[schedule] = Pipeline(stages, world, torch.float32, schedule=schedule, later=later)
        found: Result = {schedule: [] for schedule in SCHEDULES}
        for _ in range(steps + 1):
            for schedule, pipeline in pipelines.items():
                world.barrier()
                seconds = {"forward": 0.0, "backward": 0.0, "weights": 0.0}
                began = time.perf_counter()
                for one in pipeline.passes([batch] * micro_batches, 1.0):
                    waited, started = pipeline.waited_seconds, time.perf_counter()
                    one.run()
                    seconds[one.kind] += time.perf_counter() - started - (pipeline.waited_seconds - waited)
                world.barrier()
                found[schedule].append(seconds | {"step": time.perf_counter() - began})
    told.put(found)


def measure(micro_batches: int, steps: int) -> dict[str, dict[str, Any]]:
    """Idle share and seconds of every schedule, printed and returned."""
    context = multiprocessing.get_context("spawn")
    told: multiprocessing.Queue[Result] = context.Queue()
    arguments = (29500 + os.getpid() % 1000, micro_batches, steps, told)
    workers = [context.Process(target=work, args=(rank, *arguments)) for rank in range(WORKERS)]
    for worker in workers:
        worker.start()
    both = [told.get() for _ in workers]
    for worker in workers:
        worker.join()
    figures: dict[str, dict[str, Any]] = {}
    print(f"{micro_batches} micro-batches {'step':>8} {'idle':>7} {'formula':>8} {'ratio':>6}")
    for schedule, per_worker in SCHEDULES.items():
        rows = [[worker[schedule][number] for worker in both] for number in range(1, steps + 1)]
        busy = {
            kind: statistics.median(sum(one[kind] for one in row) for row in rows)
            for kind in ("forward", "backward", "weights")
        }
        idles = sorted(
            1 - sum(one[kind] for one in row for kind in busy) / WORKERS / max(one["step"] for one in row)
            for row in rows
        )
        idle = statistics.median(idles)
        formula = idle_share(schedule, WORKERS, per_worker, micro_batches, busy["weights"] / sum(busy.values()))
        seconds = statistics.median(max(one["step"] for one in row) for row in rows)
        each = [statistics.median(sum(row[at][kind] for kind in busy) for row in rows) for at in range(WORKERS)]
        figures[schedule] = {
            "step_seconds": seconds,
            "busy_seconds_of_workers": each,
            "idle": idle,
            "formula": formula,
            "ratio": idle / formula,
            "idle_of_steps": idles,
            **{f"{kind}_seconds": value for kind, value in busy.items()},
        }
        print(
            f"{schedule:<15} {seconds:>7.2f}s {idle:>7.2%} {formula:>8.2%} {idle / formula:>6.2f}   "
            f"{idles[0]:.1%} to {idles[-1]:.1%}, busy {'  '.join(f'{one:.2f}s' for one in each)}",
            flush=True,
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/pipeline_bubble.json"))
    options = parser.parse_args()
    choose_allocators()  # as in a worker
    figures = {f"{number} micro-batches": measure(number, options.steps) for number in options.micro_batches}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
    shape = {"date": time.strftime("%Y-%m-%d"), "workers": WORKERS, "blocks": BLOCKS, "tokens": TOKENS}
    options.output.write_text(json.dumps({"machine": machine, **shape, "schedules": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
