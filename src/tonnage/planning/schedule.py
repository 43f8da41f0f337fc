"""Pipeline schedules: which worker runs which stage on which micro-batch, in what order, and how long it stands idle.

Stages are dealt in turn: worker ``w`` of ``P`` has stages ``w``, ``w + P``, ``w + 2P`` ... Forward passes run ahead of
backward passes by as many as a schedule says; from then on they alternate:

    gpipe        all forward passes first (Huang et al. 2018)
    1f1b         as many as stages follow: the least activations with the same idle time (Narayanan et al. 2019)
    interleaved  several stages a worker, so that filling the pipeline takes shorter passes (Narayanan et al. 2021)
    zero_bubble  1f1b whose backward passes are cut in two: gradients that the stage before waits for, and those of
                 weights, for which nobody waits and which fill the gaps (Qi et al. 2023, ZB-H1)

Torch has these orders inside its runtimes (``torch.distributed.pipelining.schedules``), where every micro-batch has
the same shape and parameters are gathered for the whole step. Packs differ in length and ZeRO stages are settings here,
so the orders are written out, and held against torch's in a test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Kind = Literal["forward", "backward", "weights"]
"""A pass. Under ``zero_bubble`` a backward pass leaves the gradients of weights to one of its own."""


class Task(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int
    """From 0."""


def tasks(schedule: Schedule, worker: int, pipeline: int, stages_per_worker: int, micro_batches: int) -> list[Task]:
    """What a worker of a pipeline does in a step, in order. Without a pipeline: forward, backward, forward, backward.

    The stages of a worker take micro-batches in rounds of ``pipeline``. The last round need not be full: a schedule
    stays one when some of its micro-batches are left out.
    """
    numbers = -(-micro_batches // pipeline) * pipeline

    def passes(kind: Kind, chunks: Sequence[int]) -> list[Task]:
        return [
            Task(kind, chunk * pipeline + worker, number)
            for start in range(0, numbers, pipeline)
            for chunk in chunks
            for number in range(start, start + pipeline)
        ]

    forward = passes("forward", range(stages_per_worker))
    backward = passes("backward", range(stages_per_worker)[::-1])
    ahead = pipeline - 1 - worker
    if schedule == "gpipe":
        ahead = len(forward)
    elif schedule == "interleaved":
        ahead = min(len(forward), (stages_per_worker - 1) * pipeline + 2 * ahead)
    together = len(forward) - ahead
    order = forward[:ahead]
    for pair in zip(forward[ahead:], backward[:together], strict=True):
        order += pair
    order = [task for task in order + backward[together:] if task.micro_batch < micro_batches]
    return list(_split(order, worker)) if schedule == "zero_bubble" else order


def _split(order: Sequence[Task], worker: int) -> Iterator[Task]:
    """The same with gradients of weights in passes of their own, ``worker`` micro-batches later.

    So late that every worker holds as many micro-batches as the first one does in 1f1b, and no later.
    """
    waiting: deque[Task] = deque()
    for task in order:
        yield task
        if task.kind == "backward":
            waiting.append(Task("weights", task.stage, task.micro_batch))
            if len(waiting) > worker:
                yield waiting.popleft()
    yield from waiting


@lru_cache(maxsize=4096)
def rows_held(schedule: Schedule, worker: int, pipeline: int, stages_per_worker: int, micro_batches: int) -> int:
    """Most forward passes whose activations a worker holds at a time, over all of its stages."""
    order = tasks(schedule, worker, pipeline, stages_per_worker, micro_batches)
    last = "weights" if any(task.kind == "weights" for task in order) else "backward"
    held = most = 0
    for task in order:
        held += (task.kind == "forward") - (task.kind == last)
        most = max(most, held)
    return most


@lru_cache(maxsize=4096)
def passes_held(schedule: Schedule, worker: int, pipeline: int, stages_per_worker: int, micro_batches: int) -> int:
    """Most micro-batches that have gone forward, and not backward, through any one stage of a worker."""
    held: dict[int, int] = {}
    most = 1
    for task in tasks(schedule, worker, pipeline, stages_per_worker, micro_batches):
        held[task.stage] = held.get(task.stage, 0) + (task.kind == "forward") - (task.kind == "backward")
        most = max(most, held[task.stage])
    return most


@lru_cache(maxsize=4096)
def cut(num_blocks: int, num_stages: int, block: float, last: float) -> tuple[int, ...]:
    """Blocks of each stage, so that the dearest stage costs the least.

    ``block`` is what a block costs, ``last`` what the last stage has besides (the head). Each stage has a block at
    least. Of stages that cost the same, an earlier one holds more micro-batches, so it is the later one that gets a
    block more.
    """
    stages = [1] * num_stages
    costs = [block] * num_stages
    costs[-1] += last
    for _ in range(num_blocks - num_stages):
        cheapest = min(reversed(range(num_stages)), key=lambda stage: costs[stage])
        stages[cheapest] += 1
        costs[cheapest] += block
    return tuple(stages)


def source_of(task: Task, num_stages: int) -> Task | None:
    """The task of a neighbouring stage whose result a task needs."""
    if task.kind == "forward" and task.stage > 0:
        return Task("forward", task.stage - 1, task.micro_batch)
    if task.kind == "backward" and task.stage < num_stages - 1:
        return Task("backward", task.stage + 1, task.micro_batch)
    return None


def idle_share(
    schedule: Schedule, pipeline: int, stages_per_worker: int, micro_batches: int, weights: float = 1 / 3
) -> float:
    """Part of a step in which a worker has nothing to do, where all stages cost the same and sending nothing.

    ``weights`` is what the gradients of weights take of a forward and backward pass.
    """
    fill = (pipeline - 1) / stages_per_worker
    if schedule == "zero_bubble":
        fill *= 1 - 2 * weights  # forward + inputs - weights, of forward + inputs + weights
    return fill / (micro_batches + fill)
