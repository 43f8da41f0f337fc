"""Room on a device for blocks whose bytes rest on a shelf (``shelves``), and come in turns.

There is room for two: the block that runs, and the next one, forward or backward, which comes in a lane of its own
meanwhile. Nothing goes back.

    forward    block 0   block 1   block 2        backward   block 2   block 1   block 0
    lane       1         2                        lane                 0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tonnage.kernels.lanes import Lane
from tonnage.offload.residency import BLOCKS
from tonnage.parallel.shelves import InMemory, OnDisk


@dataclass(eq=False)
class Room:
    """Memory of the device, and the block that is there, or comes."""

    memory: Tensor
    number: int = -1
    update: int = 0
    """After how many updates of the optimizer it came."""
    coming: Any = None
    """Mark after which it is there, if nobody has waited for that yet."""


class Rooms:
    """Blocks that come in turns. Calls of ``have`` and ``call`` are for what the calling thread does next, in the
    queue of the device in which it does that."""

    def __init__(self, shelf: InMemory | OnDisk, num_blocks: int, device: torch.device, lane: Lane) -> None:
        """There are no rooms before they are ``opened``."""
        self.shelf, self._num_blocks, self._device, self._inward = shelf, num_blocks, device, lane
        self.updates: Callable[[], int] = int
        """How many times what is trained was changed: what came before is old."""
        self.await_block: Callable[[int], None] = lambda number: None
        """Waits until the last change of a block is made."""
        self.left: Callable[[int], None] = lambda number: None
        """Is told of a block that is on the device no more."""
        self.came: Callable[[int, Room], None] = lambda number, room: None
        """Is told of a block that comes, and where to."""
        self._rooms: list[Room] = []
        self.copied_bytes = 0
        """To the device, so far."""

    def open(self, num_bytes: int) -> None:
        """Take memory of the device for the largest block's ``num_bytes``, twice, unless there is one block alone."""
        number = min(BLOCKS.slots, self._num_blocks)
        memories = (torch.zeros(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(number))
        self._rooms = [Room(memory) for memory in memories]

    def of(self, number: int) -> Room | None:
        """Where a block is as it was changed last, if it is on the device or on its way."""
        updates = self.updates()
        return next((room for room in self._rooms if (room.number, room.update) == (number, updates)), None)

    def have(self, number: int) -> Room:
        """Let what is done from now on find the block on the device."""
        self.call(number, keeping=number)
        room = self.of(number)
        assert room is not None
        if room.coming is not None:
            self._inward.join(room.coming)
            room.coming = None
        return room

    @torch.inference_mode(mode=False)  # who asks for answers may be in it, and parameters are no tensors of its kind
    @torch.no_grad()
    def call(self, number: int, keeping: int) -> None:
        """Let a block begin to come, if it is none that is there; in the room where ``keeping`` is not."""
        if not 0 <= number < self._num_blocks or self.of(number) is not None:
            return
        self.await_block(number)
        updates = self.updates()
        room = next(room for room in self._rooms if (room.number, room.update) != (keeping, updates))
        if room.number >= 0 and self.of(room.number) in (None, room):  # it may have come anew, to the other
            self.left(room.number)
        if room.coming is not None:  # and was not asked for
            self._inward.join(room.coming)
        content = self.shelf.whole(number)
        self.shelf.prefetch(2 * number - keeping)
        self._inward.follow()  # what is done with the block that was there comes first
        with self._inward:
            self._copy_in(content, room.memory)
        room.number, room.update, room.coming = number, updates, self._inward.mark()
        self.shelf.sent(room.coming)
        self.came(number, room)

    def _copy_in(self, content: Tensor, memory: Tensor) -> None:
        self.copied_bytes += content.nbytes
        memory[: content.numel()].copy_(content, non_blocking=True)
