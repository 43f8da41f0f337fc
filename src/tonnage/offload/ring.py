"""Units of state that rest elsewhere than on a device, at home, and visit it in turns: blocks, tiles, gradients.

They come and go beside the device's other work, each way in a stream of its own. Those that come take turns in a few
slots: in two of them, say, the unit that is computed with and the next one, forward or backward.

    forward    block 0   block 1   block 2        backward   block 2   block 1   block 0
    stream     1         2                        stream               0

A ring without slots is for what the device makes. What leaves keeps its memory until it has left, which is true of the
last few at any time, and what comes back gets memory anew.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tonnage.kernels.streams import Stream

Unit = TypeVar("Unit", bound=Hashable)
Of = TypeVar("Of", bound=Hashable, contravariant=True)
Pairs = Iterable[tuple[Tensor, Tensor]]
"""Parts of a unit in the host's memory, each with its place on the device."""


class Home(Protocol[Of]):
    """Where units rest."""

    copied_bytes: int = 0
    """To the device and back, so far."""

    def pairs(self, unit: Of, memory: Tensor) -> Pairs:
        """What is copied, one way or the other, where a unit has this memory of the device. What lies in the host's
        stays there until two more units are asked for."""
        ...

    def new(self, unit: Of) -> Tensor:
        """Memory of the device for a unit, if there are no slots."""
        raise TypeError(f"{type(self).__name__} has no memory for units without slots")

    def prefetch(self, unit: Of) -> None:
        """Begin to bring a unit into the host's memory, if it is not there; returns at once."""
        return

    def sent(self, mark: Any) -> None:
        """The unit that was asked for last is on its way, and has left when ``mark`` is passed."""
        return


class Tensors(Home[Unit]):
    """Tensors that are at home what they are on the device."""

    def __init__(self, rest: Callable[[Unit], Tensor], device: torch.device) -> None:
        """``rest`` says where a unit rests, in locked memory of its type and shape."""
        self._rest, self._device = rest, device

    def pairs(self, unit: Unit, memory: Tensor) -> Pairs:
        self.copied_bytes += memory.nbytes
        return [(self._rest(unit), memory)]

    def new(self, unit: Unit) -> Tensor:
        rest = self._rest(unit)
        return torch.empty(rest.shape, dtype=rest.dtype, device=self._device)


@dataclass(eq=False)
class Slot:
    """Memory of the device for a unit."""

    memory: Tensor
    mark: Any = None
    """Mark after which the unit is there, if nobody has waited for that yet, or after which it has left."""


class Ring(Generic[Unit]):
    """Units that come and go. Calls are for what the calling thread does next, in the queue of the device in which it
    does that."""

    def __init__(self, home: Home[Unit], inward: Stream, outward: Stream | None = None, num_leaving: int = 0) -> None:
        """Without slots (``open``), ``num_leaving`` are on their way home at a time. Without ``outward`` none goes."""
        self.home, self.inward, self.outward, self._num_leaving = home, inward, outward or inward, num_leaving
        self.left: Callable[[Unit], None] = lambda unit: None
        """Called with a unit that has given its slot to another."""
        self.came: Callable[[Unit, Tensor], None] = lambda unit, memory: None
        """Called with a unit that begins to come, and its memory."""
        self.here: dict[Unit, Slot] = {}
        """Units that are on the device, or on their way there."""
        self.leaving: dict[Unit, Slot] = {}
        """Units without a slot whose memory may still be read."""
        self._free: deque[Slot] | None = None

    def open(self, memories: Iterable[Tensor], mark: Any = None) -> None:
        """Have slots in some memory of the device, which others have left when ``mark`` is passed."""
        self._free = deque(Slot(memory, mark) for memory in memories)

    def __del__(self) -> None:
        """Let whoever takes the memory next wait for units that came and that nobody asked for."""
        if not sys.is_finalizing():
            for slot in self.here.values():
                self._join(slot)

    def have(self, unit: Unit, following: Unit | None = None) -> Tensor:
        """The memory of a unit, which is there for what is done from now on: as it left, if that is still there and it
        was not called. If it only comes now, ``following`` is brought into the host's memory meanwhile."""
        if unit in self.leaving and unit not in self.here:
            self.here[unit] = self._let_go(unit)
        self.call(unit, following=following)
        return self._join(self.here[unit])

    def take(self, unit: Unit) -> Tensor:
        """The memory of a unit without a slot, which is there; it is the caller's."""
        memory = self.have(unit)
        del self.here[unit]
        return memory

    @torch.inference_mode(mode=False)  # who asks for answers may be in it, and parameters are no tensors of its kind
    @torch.no_grad()
    def call(self, unit: Unit, keeping: Unit | None = None, following: Unit | None = None) -> None:
        """Let a unit begin to come, unless it is there: into a free slot, or one that does not have ``keeping``."""
        if unit in self.here:
            return
        if unit in self.leaving:
            self.inward.wait(self.leaving[unit].mark)
        slot = self._slot(unit, keeping)
        pairs = self.home.pairs(unit, slot.memory)
        if following is not None:
            self.home.prefetch(following)
        if slot.mark is None:
            self.inward.follow()  # what was done with this memory comes first
        else:
            self.inward.wait(slot.mark)
        with self.inward:
            self.copy_in(pairs)
        self.here[unit] = Slot(slot.memory, self.inward.mark())
        self.home.sent(self.here[unit].mark)
        self.came(unit, slot.memory)

    def give(self, unit: Unit, content: Tensor) -> None:
        """Let a unit go home, as it is in this memory: that of its slot or, without slots, any to which nobody else
        may write."""
        if unit in self.here:
            self._join(self.here.pop(unit))
        self.outward.follow()
        with self.outward:
            self.copy_out(self.home.pairs(unit, content))
        slot = Slot(content, self.outward.mark())
        if self._free is None:
            self.leaving[unit] = slot
            self.settle(self._num_leaving)
        else:
            self._free.append(slot)

    def drop(self, unit: Unit) -> None:
        """Have no use for a unit any more that is as it came."""
        slot = self.here.pop(unit)
        if self._free is None:
            self._join(slot)
        else:
            self._free.append(slot)

    def settle(self, number: int = 0) -> None:
        """Keep the memory of at most so many units that are leaving."""
        for unit in list(self.leaving)[: max(0, len(self.leaving) - number)]:
            self._let_go(unit)

    def forget(self) -> None:
        """Have no use for any unit that is on its way."""
        self.settle()
        for unit in list(self.here):
            self.drop(unit)

    def copy_in(self, pairs: Pairs) -> None:
        """Copy units to the device, in the stream that is entered."""
        for at_home, memory in pairs:
            memory.copy_(at_home, non_blocking=True)

    def copy_out(self, pairs: Pairs) -> None:
        for at_home, memory in pairs:
            at_home.copy_(memory, non_blocking=True)

    def _slot(self, unit: Unit, keeping: Unit | None) -> Slot:
        """Memory for a unit, and the mark after which it may come; None: after all that the caller has done."""
        if self._free is None:
            return Slot(self.home.new(unit))
        if self._free:
            return self._free.popleft()
        other = next(other for other in self.here if other != keeping)
        slot = self.here.pop(other)
        self.left(other)
        self._join(slot)
        return slot

    def _join(self, slot: Slot) -> Tensor:
        """Let what is done next wait for a unit that comes."""
        if slot.mark is not None:
            self.inward.join(slot.mark)
            slot.mark = None
        return slot.memory

    def _let_go(self, unit: Unit) -> Slot:
        """It has left when anything else is done with its memory."""
        slot = self.leaving.pop(unit)
        self.outward.join(slot.mark)
        return Slot(slot.memory)
