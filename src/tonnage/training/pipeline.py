"""The passes of a step: micro-batches through the stages of the model that this rank holds, in a schedule's order.

    worker 0   F0 F1 . . B0 F2 B1 F3 B2 . B3        F forward, hidden states go to the next stage
    worker 1   .  F0 B0 F1 B1 F2 B2 F3 B3           B backward, their gradient goes to the stage before

A model in one piece is a pipeline of one stage: forward, backward, forward, backward, and nothing is sent.

All workers of a pipeline have the same packs, so each knows the shape of everything that comes, and no shape is sent:
micro-batches are as long as their documents. Between two workers there are two lanes, one for each direction, with a
process group of its own, so that neither waits for the other; what goes through a lane comes out in the order in which
the sender's schedule puts it in. The next receive is posted before it is needed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tonnage.errors import user_error
from tonnage.optim.gradients import Gradients
from tonnage.parallel.deferred import WeightGradients
from tonnage.parallel.parallelize import before_micro_batch
from tonnage.parallel.world import World
from tonnage.planning.schedule import Kind, Schedule, Task, source_of, tasks
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel


@dataclass(frozen=True)
class Pass:
    """One pass of one micro-batch through one stage, to be ``run`` before the next is asked for."""

    task: Task
    batch: MicroBatch
    stage: LossModel
    last: bool
    """Whether it is the last backward pass through the stage in this step."""
    turn: int
    """Place in the way of a micro-batch, forward and back: of two passes, the one whose numbers come first."""
    run: Callable[[], list[Tensor]] = field(repr=False)
    """Runs it; the loss, where a forward pass ends in one."""

    @property
    def kind(self) -> Kind:
        return self.task.kind

    @property
    def number(self) -> int:
        """Of the micro-batch, from 1."""
        return self.task.micro_batch + 1


class Pipeline:
    """The stages of a model that this rank holds, and what is between them and the others.

    ``stages`` by their number among all; several under ``interleaved``. ``shared`` are names of trained parameters that
    are in another worker's stage as well (a tied embedding): their ``gradients`` are summed. ``dtype`` is that of
    hidden states.
    """

    def __init__(
        self,
        stages: Mapping[int, LossModel],
        world: World,
        dtype: torch.dtype,
        *,
        schedule: Schedule = "1f1b",
        zero: int = 3,
        shared: Sequence[str] = (),
        gradients: Gradients | None = None,
        later: WeightGradients | None = None,
    ) -> None:
        self._size = world.mesh["pipeline"].size()
        self._worker = world.mesh.get_local_rank("pipeline")
        self._stages, self._schedule, self._zero = stages, schedule, zero
        self._num_stages = self._size * len(stages)
        self._shared, self._gradients, self._later = shared, gradients, later
        self._held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._mail = Mail(world, self._num_stages, next(iter(stages.values())).doors.hidden_size, dtype)

    @property
    def stages(self) -> list[LossModel]:
        """Of this rank, in their order."""
        return list(self._stages.values())

    @property
    def waited_seconds(self) -> float:
        """Time spent waiting for other stages (on a CPU; a CUDA device waits by itself)."""
        return self._mail.waited_seconds

    def passes(
        self, batches: Sequence[MicroBatch], denominator: float, tokens: float = 0.0, *, backward: bool = True
    ) -> Iterator[Pass]:
        """The passes of a step on this rank, in order; without ``backward``, the forward passes alone.

        Losses are divided by ``denominator``, those of routers by ``tokens`` (0 leaves them out). After the last pass,
        gradients of shared parameters are summed.
        """
        orders = [
            tasks(self._schedule, worker, self._size, len(self._stages), len(batches)) for worker in range(self._size)
        ]
        if not backward:
            orders = [[task for task in order if task.kind == "forward"] for order in orders]
        mine = orders[self._worker]
        last = {task.stage: task for task in mine if task.kind == "backward"}
        self._mail.begin(orders, [self.stages[0].shape_of(batch) for batch in batches])
        for task in mine:
            stage, batch = self._stages[task.stage], batches[task.micro_batch]
            is_last = last.get(task.stage) == task
            match task.kind:
                case "forward":
                    run = partial(self._forward, task, stage, batch, denominator, tokens)
                case "backward":
                    run = partial(self._backward, task, stage, batch, is_last)
                case "weights":
                    run = partial(self._weights, task)
            turn = task.stage if task.kind == "forward" else 2 * self._num_stages - task.stage
            yield Pass(task, batch, stage, is_last, turn, run)
        self._mail.end()
        if backward and self._gradients is not None:
            names = self._gradients.names() if self._shared else ()
            for name in (name for name in self._shared if name in names):
                self._gradients.change(name, self._mail.sum_with_other_end)

    def _forward(
        self, task: Task, stage: LossModel, batch: MicroBatch, denominator: float, tokens: float
    ) -> list[Tensor]:
        received = None
        if (source := source_of(task, self._num_stages)) is not None:
            received = self._mail.receive(source).requires_grad_(torch.is_grad_enabled())
        output = stage(batch, denominator, received, tokens)
        if torch.is_grad_enabled():
            self._held[task.stage, task.micro_batch] = received, output
        if stage.doors.last:
            return [output.detach()]
        self._mail.send(task, output.detach())
        return []

    def _backward(self, task: Task, stage: LossModel, batch: MicroBatch, is_last: bool) -> list[Tensor]:
        received, output = self._held.pop((task.stage, task.micro_batch))
        source = source_of(task, self._num_stages)
        gradient = None if source is None else self._mail.receive(source)
        before_micro_batch(stage, zero=self._zero, last=is_last)
        if output.requires_grad:  # which that of a first stage in which all is frozen does not
            later = nullcontext() if self._later is None else self._later.put_off(task.stage, task.micro_batch)
            with later, stage.drawing(batch):
                output.backward(gradient)
        if received is not None:
            assert received.grad is not None
            self._mail.send(task, received.grad)
        return []

    def _weights(self, task: Task) -> list[Tensor]:
        assert self._later is not None
        self._later.compute(task.stage, task.micro_batch)
        return []


class Mail:
    """Hidden states and their gradients on their way between the workers of a pipeline."""

    def __init__(self, world: World, num_stages: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._worker, self._size = world.mesh.get_local_rank("pipeline"), world.mesh["pipeline"].size()
        self._num_stages, self._hidden_size, self._dtype = num_stages, hidden_size, dtype
        self._device = world.device
        self._posts_ahead = world.backend == "gloo"
        """NCCL carries out what is put into a group in that order: there, a receive that is not needed yet would keep
        back a send for which the others wait."""
        self._positions: list[dict[Task, int]] = []
        self._shapes: list[tuple[int, ...]] = []
        self._coming: list[deque[Task]] = []
        """By worker: what it will send to this one, in order, as far as no receive is posted."""
        self._posted: dict[Task, tuple[dist.Work, Tensor]] = {}
        self._sent: list[list[tuple[int, dist.Work, Tensor]]] = []
        """By worker: where in its order it needs what was sent, and that."""
        self._lanes: tuple[dist.ProcessGroup, ...] = ()
        """Process groups of the workers, for what goes down and for what goes up."""
        self.waited_seconds = 0.0
        if self._size > 1:
            columns = world.mesh.mesh.reshape(self._size, -1).t().tolist()
            self._lanes = tuple(dist.new_subgroups_by_enumeration(columns)[0] for _ in range(2))

    def begin(self, orders: Sequence[Sequence[Task]], shapes: Sequence[tuple[int, ...]]) -> None:
        """A step in which workers work in ``orders`` on micro-batches of some ``shapes``, each (rows, tokens)."""
        self._shapes = list(shapes)
        self._positions = [{task: place for place, task in enumerate(order)} for order in orders]
        self._sent = [[] for _ in orders]
        self._coming = [
            deque(task for task in order if (to := self._for(task)) is not None and self._worker_of(to) == self._worker)
            for order in orders
        ]

    def send(self, task: Task, result: Tensor) -> None:
        """Send what a task of this worker gave to the stage that needs it."""
        needed_by = self._for(task)
        assert needed_by is not None
        if result.dtype != self._dtype:
            observed = f"hidden states in {result.dtype} behind stage {task.stage}"
            needed, change = f"{self._dtype}, the type of the run", "parallel.pipeline=1"
            raise user_error(observed, needed, change, "parallel.pipeline")
        worker, result = self._worker_of(needed_by), result.contiguous()
        work = dist.isend(result, group=self._lane(self._worker, worker), group_dst=worker)
        assert work is not None
        self._sent[worker].append((self._positions[worker][needed_by], work, result))

    def receive(self, source: Task) -> Tensor:
        """What a task of another worker gave."""
        worker = self._worker_of(source)
        while source not in self._posted:
            self._post(worker)
        if self._coming[worker] and self._posts_ahead:
            self._post(worker)
        work, result = self._posted.pop(source)
        began = time.perf_counter()
        work.wait()
        self.waited_seconds += time.perf_counter() - began
        # The sender had what its tasks up to this one needed: all of that has left.
        place, sent = self._positions[worker][source], self._sent[worker]
        for _, work, _ in (one for one in sent if one[0] <= place):
            work.wait()
        self._sent[worker] = [one for one in sent if one[0] > place]
        return result

    def end(self) -> None:
        """Wait until everything has left."""
        for sent in self._sent:
            for _, work, _ in sent:
                work.wait()
        self._sent = []

    def sum_with_other_end(self, value: Tensor) -> Tensor:
        """On the workers of the first and the last stage: the sum of ``value`` and what the other one has. It goes
        from device to device, wherever it rests."""
        other_end = 0 if self._worker else (self._num_stages - 1) % self._size
        mine = value.to(self._device).contiguous()
        other = torch.empty_like(mine)
        sending = dist.isend(mine, group=self._lane(self._worker, other_end), group_dst=other_end)
        receiving = dist.irecv(other, group=self._lane(other_end, self._worker), group_src=other_end)
        for work in (sending, receiving):
            assert work is not None
            work.wait()
        return other.add_(mine).to(value.device)

    def _post(self, worker: int) -> None:
        source = self._coming[worker].popleft()
        shape = (*self._shapes[source.micro_batch], self._hidden_size)
        result = torch.empty(shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(result, group=self._lane(worker, self._worker), group_src=worker)
        assert work is not None
        self._posted[source] = work, result

    def _for(self, task: Task) -> Task | None:
        """The task that needs the result of another."""
        if task.kind == "forward" and task.stage < self._num_stages - 1:
            return Task("forward", task.stage + 1, task.micro_batch)
        if task.kind == "backward" and task.stage > 0:
            return Task("backward", task.stage - 1, task.micro_batch)
        return None

    def _worker_of(self, task: Task) -> int:
        return task.stage % self._size

    def _lane(self, source: int, destination: int) -> dist.ProcessGroup:
        return self._lanes[source < destination]
