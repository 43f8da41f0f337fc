"""Lanes that do things as late, or as early, as they may: what waits for what, tested without a device that has any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tonnage.kernels.streams import Stream
from tonnage.offload.ring import Pairs, Ring

_of_thread = threading.local()


class Tape(Stream):
    """A stream of a device that does nothing until it must: what is put into it is on a tape, which runs to where
    somebody waits. ``prompt`` ones run as soon as what they wait for allows it. What is not in a tape is done at
    once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.prompt = False
        self.tape: list[Callable[[], Any]] = []
        self.done = 0

    def __enter__(self) -> None:
        super().__enter__()
        _of_thread.entered = [*entered(), self]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _of_thread.entered.pop()

    def put(self, work: Callable[[], Any]) -> None:
        self.tape.append(work)
        if self.prompt:
            self.run(len(self.tape))

    def run(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self.tape[self.done - 1]()

    def mark(self) -> Any:
        return partial(self.run, len(self.tape))

    def wait(self, mark: Any) -> None:
        self.put(mark)

    def join(self, mark: Any) -> None:
        if tapes := entered():
            tapes[-1].wait(mark)
        else:
            mark()

    def follow(self) -> None:
        if tapes := entered():
            self.wait(tapes[-1].mark())

    def finish(self) -> None:
        self.run(len(self.tape))


def entered() -> list[Tape]:
    """Those that this thread has entered, the last one last."""
    tapes: list[Tape] = getattr(_of_thread, "entered", [])
    return tapes


def put_on_tapes(ring: Ring[Any], prompt: tuple[bool, bool]) -> None:
    """Let copies that leave, and those that come, be made on the tapes that are entered; ``prompt`` says which of these
    are, out and in. Without slots, what has left, or will come, is nothing that one could compute with."""
    outward: Any = ring.outward
    inward: Any = ring.inward
    outward.prompt, inward.prompt = prompt
    copy_out, copy_in, settle = ring.copy_out, ring.copy_in, ring.settle

    def later_in(pairs: Pairs) -> None:
        listed = list(pairs)
        for _, memory in listed if ring._free is None else ():
            memory.fill_(torch.nan)
        entered()[-1].put(partial(copy_in, listed))

    def then_spoilt(number: int = 0) -> None:
        leaving = dict(ring.leaving)
        settle(number)
        for unit in leaving.keys() - ring.leaving.keys():
            leaving[unit].memory.fill_(torch.nan)

    vars(ring).update(
        copy_out=lambda pairs: entered()[-1].put(partial(copy_out, list(pairs))),
        copy_in=later_in,
        settle=then_spoilt,
    )
