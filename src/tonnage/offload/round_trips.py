"""Tensors that a device makes, and that rest in the host's memory until it wants them back.

They go and come beside the device's other work, each way in a stream of its own. What leaves keeps its memory on the
device until it has left, which is true of the last few at any time; what comes gets memory anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tonnage.kernels.streams import Stream

Unit = TypeVar("Unit", bound=Hashable)


class RoundTrips(Generic[Unit]):
    """Units that leave a device and come back. Calls are for what the calling thread does next, in the queue of the
    device in which it does that."""

    def __init__(
        self, home: Callable[[Unit], Tensor], device: torch.device, slots: int, stream: Callable[[torch.device], Stream]
    ) -> None:
        """``home`` says where a unit rests, in locked memory of its type and shape, and ``slots`` how many are on their
        way there at a time."""
        self._home, self._device, self._slots = home, device, slots
        self.outward, self.inward = stream(device), stream(device)
        self.leaving: dict[Unit, tuple[Tensor, Any]] = {}
        """Units whose memory on the device may still be read, and the marks after which they have left."""
        self.coming: dict[Unit, tuple[Tensor, Any]] = {}
        self.copied_bytes = 0
        """To the host and back, so far."""

    def give(self, unit: Unit, content: Tensor) -> None:
        """Let a unit leave. Nobody else may write to ``content``."""
        if unit in self.coming:  # called, but never used
            self.have(unit)
        self.outward.follow()
        with self.outward:
            self._copy_out(unit, content)
        self.leaving[unit] = content, self.outward.mark()
        self.settle(self._slots)

    def call(self, unit: Unit) -> None:
        """Begin to bring a unit, if it is not on its way."""
        if unit in self.coming:
            return
        if unit in self.leaving:
            self.inward.wait(self.leaving[unit][1])
        home = self._home(unit)
        content = torch.empty(home.shape, dtype=home.dtype, device=self._device)
        self.inward.follow()  # others have left, and this memory may have been another tensor's until now
        with self.inward:
            self._copy_in(unit, content)
        self.coming[unit] = content, self.inward.mark()

    def have(self, unit: Unit) -> Tensor:
        """A unit: as it was given, while that memory is kept and it was not called; else in new memory, into which it
        comes."""
        if unit in self.leaving and unit not in self.coming:
            return self._let_go(unit)
        self.call(unit)
        content, mark = self.coming.pop(unit)
        self.inward.join(mark)
        return content

    def settle(self, slots: int = 0) -> None:
        """Keep the memory of at most so many units that are leaving."""
        for unit in list(self.leaving)[: max(0, len(self.leaving) - slots)]:
            self._let_go(unit)

    def forget(self) -> None:
        """Forget all units: none that is on its way is needed any more."""
        self.settle()
        for unit in list(self.coming):
            self.have(unit)

    def _let_go(self, unit: Unit) -> Tensor:
        """It has left when anything else is done with its memory."""
        content, mark = self.leaving.pop(unit)
        self.outward.join(mark)
        return content

    def _copy_out(self, unit: Unit, content: Tensor) -> None:
        self.copied_bytes += content.nbytes
        self._home(unit).copy_(content, non_blocking=True)

    def _copy_in(self, unit: Unit, content: Tensor) -> None:
        self.copied_bytes += content.nbytes
        content.copy_(self._home(unit), non_blocking=True)
