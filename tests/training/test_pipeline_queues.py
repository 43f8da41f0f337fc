"""The mail of a pipeline where each process group is one queue, as NCCL has them: nobody waits for ever.

The real ``Mail`` of every worker notes what it puts into which queue and what it waits for; then all queues run beside
one another. A send and its receive meet: neither ends before both are at the head of their queues, and each has been
put there, which the device does when it has come so far. gloo needs none of that, and hides what would be stuck.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tonnage.parallel.world import World
from tonnage.planning.schedule import Schedule, Task, source_of, tasks
from tonnage.training.pipeline import Mail


@dataclass
class Operation:
    """A send or a receive, in the queue of a group."""

    kind: str
    group: int
    peer: int
    is_put: bool = False
    is_done: bool = False


@dataclass
class Note:
    """What ``isend`` and ``irecv`` give."""

    log: list[Any]
    operation: Operation

    def wait(self) -> None:
        self.log.append(("wait", self.operation))


class Mesh:
    """Of a pipeline and nothing else."""

    def __init__(self, worker: int, size: int) -> None:
        self._worker, self._size = worker, size
        self.mesh = torch.arange(size).view(size, 1, 1, 1)

    def get_local_rank(self, name: str) -> int:
        return self._worker

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(size=lambda: self._size)


def log_of(
    worker: int, orders: list[list[Task]], stages: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, Operation]]:
    """What a worker puts into queues and waits for, in its order."""
    log: list[Any] = []
    groups = iter(range(2))

    def noted(kind: str, group: int, peer: int) -> Note:
        operation = Operation(kind, group, peer)
        log.append(("put", operation))
        return Note(log, operation)

    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", lambda ranks: (next(groups), []))
    monkeypatch.setattr(dist, "isend", lambda tensor, group, group_dst: noted("send", group, group_dst))
    monkeypatch.setattr(dist, "irecv", lambda tensor, group, group_src: noted("receive", group, group_src))
    device = torch.device("cpu")
    world = SimpleNamespace(mesh=Mesh(worker, len(orders)), device=device, backend=backend)
    mail = Mail(cast(World, world), stages, 1, torch.float32)
    mail.begin(orders, [(1, 1)] * 16)
    for task in orders[worker]:
        if (source := source_of(task, stages)) is not None:
            mail.receive(source)
        down, up = task.kind == "forward" and task.stage < stages - 1, task.kind == "backward" and task.stage > 0
        if down or up:
            mail.send(task, torch.zeros(1))
    mail.end()
    return log


def is_stuck(logs: list[list[tuple[str, Operation]]]) -> bool:
    """Whether some of what all workers do never happens."""
    streams = [deque(log) for log in logs]
    queues = [
        [deque(one for what, one in log if what == "put" and one.group == group) for group in (0, 1)] for log in logs
    ]
    moves = True
    while moves:
        moves = False
        for worker, stream in enumerate(streams):
            while stream and (stream[0][0] == "put" or stream[0][1].is_done):
                what, operation = stream.popleft()
                operation.is_put |= what == "put"
                moves = True
            for group, queue in enumerate(queues[worker]):
                while queue and queue[0].is_put:
                    mine, theirs = queue[0], queues[queue[0].peer][group]
                    meet = theirs and theirs[0].is_put and theirs[0].peer == worker and theirs[0].kind != mine.kind
                    if not meet:
                        break
                    mine.is_done = theirs[0].is_done = moves = True
                    queue.popleft()
                    theirs.popleft()
    return any(streams)


def stuck(schedule: Schedule, per_worker: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Numbers of workers and of micro-batches with which it would be."""
    found = []
    for size in (2, 3, 4, 8):
        for number in range(1, 17):
            orders = [tasks(schedule, worker, size, per_worker, number) for worker in range(size)]
            stages = size * per_worker
            if is_stuck([log_of(worker, orders, stages, backend, monkeypatch) for worker in range(size)]):
                found.append((size, number))
    return found


@pytest.mark.parametrize(
    ("schedule", "per_worker"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)]
)
def test_nobody_waits_for_ever(schedule: Schedule, per_worker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stuck(schedule, per_worker, "nccl", monkeypatch) == []


@pytest.mark.parametrize(("schedule", "per_worker"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)])
def test_receives_that_are_posted_ahead_would_be_stuck(
    schedule: Schedule, per_worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are on gloo, where they cost nothing: so the test before can fail."""
    assert stuck(schedule, per_worker, "gloo", monkeypatch) != []
