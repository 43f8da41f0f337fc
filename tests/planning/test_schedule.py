"""Orders of pipeline passes: as torch has them, without deadlock for any size, as idle as the papers say."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from tonnage.planning.schedule import Kind, Schedule, Task, cut, idle_share, passes_held, rows_held, source_of, tasks

KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
SCHEDULES: list[tuple[Schedule, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero_bubble", 1),
]
TORCHS = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble"}


def orders(schedule: Schedule, pipeline: int, per_worker: int, micro_batches: int) -> list[list[Task]]:
    return [tasks(schedule, worker, pipeline, per_worker, micro_batches) for worker in range(pipeline)]


def played(rows: list[list[Task]], seconds: dict[tuple[Kind, int], float]) -> tuple[float, float]:
    """Seconds that a step takes when every pass waits for what it needs, and those that all workers work."""
    num_stages = 1 + max(task.stage for row in rows for task in row)
    ends: dict[Task, float] = {}
    clocks = [0.0] * len(rows)
    waiting = [list(row) for row in rows]
    while any(waiting):
        before = len(ends)
        for worker, row in enumerate(waiting):
            while row and ((source := source_of(row[0], num_stages)) is None or source in ends):
                task = row.pop(0)
                begins = max(clocks[worker], ends[source] if source else 0.0)
                clocks[worker] = ends[task] = begins + seconds.get((task.kind, task.stage), 0.0)
        assert len(ends) > before, "workers wait for one another"
    return max(clocks), sum(seconds.get((task.kind, task.stage), 0.0) for task in ends)


def torchs_orders(schedule: Schedule, pipeline: int, per_worker: int, micro_batches: int) -> list[list[Task]]:
    """What torch's own schedule has each worker compute."""
    kind: Any = schedules.get_schedule_class(TORCHS[schedule])
    stages = [
        SimpleNamespace(
            num_stages=pipeline * per_worker,
            group_size=pipeline,
            group_rank=0,
            stage_index=chunk * pipeline,
            submod=torch.nn.Module(),
        )
        for chunk in range(per_worker)
    ]
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    order = kind(stages[0] if single else stages, micro_batches).pipeline_order
    found = [[re.fullmatch(r"(\d+)([FBIW])(\d+)", str(action)) for action in order[w]] for w in range(pipeline)]
    return [[Task(KINDS[one[2]], int(one[1]), int(one[3])) for one in row if one] for row in found]


@pytest.mark.parametrize(("schedule", "per_worker"), SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_orders_are_those_of_torch(schedule: Schedule, per_worker: int, pipeline: int) -> None:
    for micro_batches in (pipeline, 2 * pipeline, 3 * pipeline):
        ours = orders(schedule, pipeline, per_worker, micro_batches)
        theirs = torchs_orders(schedule, pipeline, per_worker, micro_batches)
        if schedule == "1f1b":  # torch 2.13 writes down micro-batches 1 to M for its last worker, and runs 0 to M - 1
            assert {task.micro_batch for task in theirs.pop() if task.kind == "forward"} != set(range(micro_batches))
            ours.pop()
        assert ours == theirs


@pytest.mark.parametrize(("schedule", "per_worker"), SCHEDULES)
def test_every_size_comes_to_its_end_with_each_pass_once(schedule: Schedule, per_worker: int) -> None:
    for pipeline, micro_batches in product((1, 2, 3, 5), (1, 2, 3, 4, 7, 12)):
        if pipeline == 1 and per_worker > 1:
            continue
        rows = orders(schedule, pipeline, per_worker, micro_batches)
        kinds: tuple[Kind, ...] = ("forward", "backward")
        if schedule == "zero_bubble":
            kinds += ("weights",)
        done = [task for row in rows for task in row]
        assert sorted(done) == sorted(
            Task(*one) for one in product(kinds, range(pipeline * per_worker), range(micro_batches))
        )
        played(rows, {})


@pytest.mark.parametrize(("schedule", "per_worker"), SCHEDULES)
def test_idle_time_is_that_of_the_formula(schedule: Schedule, per_worker: int) -> None:
    backward = 1.0 if schedule == "zero_bubble" else 2.0
    for pipeline, rounds in product((2, 4, 8), (1, 2, 4)):
        micro_batches = rounds * pipeline
        took: dict[tuple[Kind, int], float] = {}
        for stage in range(pipeline * per_worker):
            took |= {("forward", stage): 1.0, ("backward", stage): backward, ("weights", stage): 1.0}
        span, busy = played(orders(schedule, pipeline, per_worker, micro_batches), took)
        assert 1 - busy / pipeline / span == pytest.approx(
            idle_share(schedule, pipeline, per_worker, micro_batches), abs=1e-12
        )


def test_activations_held_at_a_time() -> None:
    held = {schedule: [rows_held(schedule, n, 4, v, 12) for n in range(4)] for schedule, v in SCHEDULES[::2]}
    held["1f1b"] = [rows_held("1f1b", n, 4, 1, 12) for n in range(4)]
    assert held["gpipe"] == [12, 12, 12, 12]
    assert held["1f1b"] == [4, 3, 2, 1]
    assert held["zero_bubble"] == [4, 4, 4, 4]


@pytest.mark.parametrize(("schedule", "per_worker"), SCHEDULES)
def test_micro_batches_under_way_end_in_the_order_in_which_they_began(schedule: Schedule, per_worker: int) -> None:
    """In every stage, no more at a time than are counted: their inputs of blocks take turns in so many places."""
    for worker in range(4):
        most = passes_held(schedule, worker, 4, per_worker, 12)
        under_way: dict[int, list[int]] = {}
        reached = 0
        for task in tasks(schedule, worker, 4, per_worker, 12):
            numbers = under_way.setdefault(task.stage, [])
            if task.kind == "forward":
                numbers.append(task.micro_batch)
                reached = max(reached, len(numbers))
            if task.kind == "backward":
                assert numbers.pop(0) == task.micro_batch
        assert reached == most <= passes_held(schedule, 0, 4, per_worker, 12)


@pytest.mark.parametrize(
    ("blocks", "stages", "head", "want"),
    [
        (8, 2, 0.0, (4, 4)),
        (9, 2, 0.0, (4, 5)),
        (8, 2, 2.0, (5, 3)),
        (6, 2, 30.0, (5, 1)),
        (12, 4, 1.0, (3, 3, 3, 3)),
        (12, 4, 2.0, (3, 3, 4, 2)),
    ],
)
def test_stages_are_cut_by_what_they_cost(blocks: int, stages: int, head: float, want: tuple[int, ...]) -> None:
    assert cut(blocks, stages, 1.0, last=head) == want
