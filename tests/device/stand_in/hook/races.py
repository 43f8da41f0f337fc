"""Looks on: whether work in one lane meets work in another without waiting for it, in memory of the device or the host.

Every operation that torch dispatches is an act of the current lane, or of the thread where no tensor is on the device;
marks and waits, as torch tells of them, are what lanes and threads learn from each other (``order``). Memory that was
freed is not forgotten: what another lane still does with it when it is given out anew is a race. But torch's own pinned
memory is: it is given out once the copies that were asked for are over. Reports go to the worker's output, and a line
at its end.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.cuda._gpu_trace as gpu_trace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop

from device.stand_in.hook.order import Access, Agent, Order
from tonnage.optim.background import Background

NO_ACCESS = (
    "aten.empty",
    "aten.new_empty",
    "aten.detach",
    "aten._unsafe_view",
    "aten.is_pinned",
    "aten.record_stream",
    "prim.device",
    "profiler",
)
"""Operations that touch no content."""
LINES = 5

order, lock = Order(), threading.RLock()
_marks: dict[int, dict[Agent, int]] = {}
_allocator: dict[Agent, int] = {}
"""What was known when memory was last freed: what is given out anew is given out after it."""
_operations = 0
_whole_recomputation = set_checkpoint_early_stop(False)
"""Held as long as the process lives: a context that nobody holds any more ends.

torch ends a recomputation early by raising an exception. Memory that is freed meanwhile is told to us, and Python
forgets the exception over that.
"""


def this_thread() -> str:
    """The name of the thread as an agent."""
    name = threading.current_thread().name
    return "host:" + (name if name.startswith(("update", "save")) else "main")


def where() -> str:
    """Lines of tonnage that led here, the innermost first."""
    places, frame = list[str](), sys._getframe(1)
    while frame is not None and len(places) < LINES:
        _, found, inside = frame.f_code.co_filename.rpartition("/tonnage/")
        if found:
            places.append(f"{inside}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(places)


def on_mark(event: int, stream: int) -> None:
    """A mark was put into a lane."""
    with lock:
        order.learn(stream, order.knowledge(this_thread()))
        order.act(stream)
        _marks[event] = order.knowledge(stream)


def on_wait(event: int, stream: int) -> None:
    """A lane waits for a mark."""
    with lock:
        order.learn(stream, order.knowledge(this_thread()))
        order.learn(stream, _marks.get(event, {}))


def on_mark_reached(event: int) -> None:
    """The thread has waited for a mark."""
    with lock:
        order.learn(this_thread(), _marks.get(event, {}))


def on_lane_reached(stream: int) -> None:
    """The thread has waited for a lane."""
    with lock:
        order.learn(this_thread(), order.knowledge(stream))


def on_device_reached(*_: object) -> None:
    """The thread has waited for all lanes."""
    with lock:
        for agent in order.agents():
            if isinstance(agent, int):
                order.learn(this_thread(), order.knowledge(agent))


def on_free(_: int) -> None:
    """Memory of the device was freed."""
    with lock:
        order.act(this_thread())
        for agent, number in order.knowledge(this_thread()).items():
            _allocator[agent] = max(number, _allocator.get(agent, -1))


def on_allocation(_: int) -> None:
    """Memory of the device was given out."""
    with lock:
        order.learn(this_thread(), _allocator)


class Watching(TorchDispatchMode):
    """Notes what every operation reads and writes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        global _operations
        kwargs = kwargs or {}
        result, name, schema = func(*args, **kwargs), str(func), func._schema
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        if is_view or name.startswith(NO_ACCESS):
            return result
        given = list(zip(schema.arguments, args, strict=False))
        given += [(one, kwargs[one.name]) for one in schema.arguments[len(args) :] if one.name in kwargs]
        read, written = list[Tensor](), list[Tensor]()
        for argument, value in given:
            changes = argument.alias_info is not None and argument.alias_info.is_write
            (written if changes else read).extend(one for one in tree_leaves(value) if isinstance(one, Tensor))
        outputs = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        written += [one for one in outputs if not any(one is other for other in read)]
        on_device = any(one.is_cuda for one in (*read, *written))
        with lock:
            _operations += 1
            agent: Agent = torch.cuda.current_stream().cuda_stream if on_device else this_thread()
            if on_device:
                order.learn(agent, order.knowledge(this_thread()))
            number, place = order.act(agent), where()
            if name.startswith("aten._pin_memory"):
                for one in outputs:
                    order.forget(one.data_ptr(), one.data_ptr() + max(1, one.numel() * one.element_size()))
            for tensors, writes in ((read, False), (written, True)):
                for one in tensors:
                    _note(one, agent, number, writes, name, place)
            if on_device and _waits(name, args, kwargs, (*read, *written)):
                order.learn(this_thread(), order.knowledge(agent))
        return result


def _note(tensor: Tensor, agent: Agent, number: int, writes: bool, what: str, place: str) -> None:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device.type == "meta" or not tensor.numel():
        return
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    end = start + (last + 1) * tensor.element_size()
    for race in order.access(Access(start, end, agent, number, writes, what, place)):
        print(race, file=sys.stderr, flush=True)


def _waits(name: str, args: Sequence[Any], kwargs: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether an operation is a copy between host and device that the thread waits for."""
    if not any(one.device.type == "cpu" for one in tensors) or not name.startswith(("aten._to_copy", "aten.copy_")):
        return False
    return not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)


def _threads() -> None:
    """What a new thread knows, what a turn that is waited for tells, and what a thread that is joined tells."""
    begin, run, reach, wait = Background.__init__, Background._run, Background._reach, Background.wait

    def began(self: Any, work: Any) -> None:
        with lock:
            order.act(this_thread())
            self._at_first, self._told = order.knowledge(this_thread()), {}
        begin(self, work)

    def ran(self: Any) -> None:
        with lock:
            order.learn(this_thread(), self._at_first)
        with Watching():  # type: ignore[no-untyped-call]
            run(self)

    def reached(self: Any, turn: float) -> None:
        with lock:
            order.act(this_thread())
            self._told[turn] = order.knowledge(this_thread())
        reach(self, turn)

    def waited(self: Any, turn: int | None = None) -> float:
        seconds = wait(self, turn)
        with lock:
            next_one = min((one for one in self._told if turn is not None and one > turn), default=None)
            for one, told in self._told.items():
                if turn is None or one <= turn or one == next_one:
                    order.learn(this_thread(), told)
        return seconds

    for name, instead in (("__init__", began), ("_run", ran), ("_reach", reached), ("wait", waited)):
        setattr(Background, name, instead)


def _at_the_end(leave: Callable[[int], Any]) -> Callable[[int], Any]:
    def said(status: int) -> Any:
        if _operations:
            print(f"race check: {_operations} operations, {len(order.races)} kinds of races", file=sys.stderr)
            sys.stderr.flush()
        return leave(status)

    return said


def watch() -> None:
    """Begin to look on."""
    torch._C._activate_gpu_trace()
    heard: Sequence[tuple[Callable[[Any], None], Any]] = (
        (gpu_trace.register_callback_for_memory_allocation, on_allocation),
        (gpu_trace.register_callback_for_memory_deallocation, on_free),
        (gpu_trace.register_callback_for_event_record, on_mark),
        (gpu_trace.register_callback_for_event_wait, on_wait),
        (gpu_trace.register_callback_for_stream_synchronization, on_lane_reached),
        (gpu_trace.register_callback_for_event_synchronization, on_mark_reached),
        (gpu_trace.register_callback_for_device_synchronization, on_device_reached),
    )
    for register, call in heard:
        register(call)
    Watching().__enter__()  # type: ignore[no-untyped-call]
    _whole_recomputation.__enter__()
    _threads()
    setattr(os, "_exit", _at_the_end(os._exit))  # noqa: B010


watch()
