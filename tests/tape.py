"""Lanes that do things as late, or as early, as they may: what waits for what, tested without a device that has any."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tonnage.kernels.streams import Stream
from tonnage.offload.round_trips import RoundTrips


class Tape(Stream):
    """A stream of a device that does nothing until it must: what is put into it is on a tape, which runs to where
    somebody waits. ``prompt`` ones run as soon as what they wait for allows it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.prompt = False
        self.tape: list[Callable[[], Any]] = []
        self.done = 0

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
        mark()

    def follow(self) -> None:
        """All that is not in a tape is done at once."""

    def finish(self) -> None:
        self.run(len(self.tape))


def put_on_tapes(trips: RoundTrips[Any], prompt: tuple[bool, bool]) -> None:
    """Let copies that leave, and those that come, be made on tapes; what has left, or will come, is nothing that one
    could compute with."""
    outward: Any = trips.outward
    inward: Any = trips.inward
    outward.prompt, inward.prompt = prompt
    copy_out, copy_in, settle = trips._copy_out, trips._copy_in, trips.settle

    def later_in(unit: Any, content: Tensor) -> None:
        content.fill_(torch.nan)
        inward.put(partial(copy_in, unit, content))

    def then_spoilt(slots: int = 0) -> None:
        leaving = dict(trips.leaving)
        settle(slots)
        for unit in leaving.keys() - trips.leaving.keys():
            leaving[unit][0].fill_(torch.nan)

    vars(trips).update(
        _copy_out=lambda unit, content: outward.put(partial(copy_out, unit, content)),
        _copy_in=later_in,
        settle=then_spoilt,
    )
