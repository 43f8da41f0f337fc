"""A few slots of a device, in which units that rest elsewhere (``homes``) come in turns: blocks, or tiles.

There are two: for the unit that is computed with, and for the next one, forward or backward, which comes in a stream of
its own meanwhile. Nothing goes back.

    forward    block 0   block 1   block 2        backward   block 2   block 1   block 0
    stream     1         2                        stream               0
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tonnage.kernels.streams import Stream

Unit = TypeVar("Unit", bound=Hashable)
Of = TypeVar("Of", bound=Hashable, contravariant=True)


class Home(Protocol[Of]):
    """Where units rest."""

    def whole(self, unit: Of) -> Tensor:
        """The bytes of a unit in memory that a device can copy from. They stay until two more are asked for."""
        ...

    def prefetch(self, unit: Of) -> None:
        """Begin to bring a unit into memory; returns at once."""
        ...

    def sent(self, mark: Any) -> None:
        """The unit that was asked for last is on its way, and has left when ``mark`` is passed."""
        ...


@dataclass(eq=False)
class Slot(Generic[Unit]):
    """Memory of the device, and the unit that is there, or comes."""

    memory: Tensor
    unit: Unit | None = None
    update: int = 0
    """After how many updates of the optimizer it came."""
    coming: Any = None
    """Mark after which it is there, if nobody has waited for that yet."""


class Ring(Generic[Unit]):
    """Units that come in turns. Calls of ``have`` and ``call`` are for what the calling thread does next, in the queue
    of the device in which it does that."""

    def __init__(self, home: Home[Unit], device: torch.device, stream: Stream) -> None:
        """There are no slots before ``open``."""
        self._home, self._device, self._inward = home, device, stream
        self.updates: Callable[[], int] = int
        """Returns the number of updates so far: units that came before the last one are old."""
        self.await_unit: Callable[[Unit], None] = lambda unit: None
        """Waits until the last update of a unit is made."""
        self.left: Callable[[Unit], None] = lambda unit: None
        """Called with a unit that has left the device."""
        self.came: Callable[[Unit, Slot[Unit]], None] = lambda unit, slot: None
        """Called with a unit that begins to come, and its slot."""
        self._slots: list[Slot[Unit]] = []
        self.copied_bytes = 0
        """To the device, so far."""

    def open(self, number: int, num_bytes: int) -> None:
        """Take memory of the device for a number of slots, of so many bytes each."""
        memories = (torch.zeros(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(number))
        self._slots = [Slot(memory) for memory in memories]

    def __del__(self) -> None:
        """Let whoever takes the memory of the slots next wait for units that came and that nobody asked for."""
        if not sys.is_finalizing():
            for slot in self._slots:
                if slot.coming is not None:
                    self._inward.join(slot.coming)

    def of(self, unit: Unit) -> Slot[Unit] | None:
        """The slot of a unit as last updated, if it is on the device or on its way."""
        updates = self.updates()
        return next((slot for slot in self._slots if (slot.unit, slot.update) == (unit, updates)), None)

    def have(self, unit: Unit, following: Unit | None = None) -> Slot[Unit]:
        """Have the unit on the device for what is done from now on. If it only comes now, ``following`` is brought into
        memory meanwhile."""
        self.call(unit, keeping=unit, following=following)
        slot = self.of(unit)
        assert slot is not None
        if slot.coming is not None:
            self._inward.join(slot.coming)
            slot.coming = None
        return slot

    @torch.inference_mode(mode=False)  # who asks for answers may be in it, and parameters are no tensors of its kind
    @torch.no_grad()
    def call(self, unit: Unit, keeping: Unit, following: Unit | None = None) -> None:
        """Let a unit begin to come, unless it is there, into a slot that does not have ``keeping``."""
        if self.of(unit) is not None:
            return
        self.await_unit(unit)
        updates = self.updates()
        slot = next(slot for slot in self._slots if (slot.unit, slot.update) != (keeping, updates))
        if slot.unit is not None and self.of(slot.unit) in (None, slot):  # else the other slot has a newer one
            self.left(slot.unit)
        if slot.coming is not None:  # and was not asked for
            self._inward.join(slot.coming)
        content = self._home.whole(unit)
        if following is not None:
            self._home.prefetch(following)
        self._inward.follow()  # what is done with the unit that was there comes first
        with self._inward:
            self.copied_bytes += content.nbytes
            slot.memory[: content.numel()].copy_(content, non_blocking=True)
        slot.unit, slot.update, slot.coming = unit, updates, self._inward.mark()
        self._home.sent(slot.coming)
        self.came(unit, slot)
