"""Tiles of weights (``tiled``) that rest in the host's memory or on disk, and come to the device one after another.

There is room for two on the device: the one that is computed with, and the next one, which comes in a lane of its own
meanwhile. What rests on disk is copied into one of two locked buffers on its way. Nothing goes back: gradients leave
tile by tile (``optim.gradients``), and a weight is updated where it rests (``host_masters``).

    device    computes with tile 0      computes with tile 1
    lane      1 comes                   2 comes
    disk      2 is read                 3 is read
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from tonnage.host.locked import locked_for
from tonnage.kernels.lanes import Lane
from tonnage.offload.residency import TILES
from tonnage.parallel.shelves import OnDisk, aligned
from tonnage.parallel.tiled import TiledWeight


class HostTiles:
    """Tiles of some weights, of which one is computed with at a time, in turns on ``device``."""

    def __init__(
        self,
        weights: Sequence[TiledWeight],
        device: torch.device,
        shelf: OnDisk | None,
        *,
        lane: Callable[[torch.device], Lane] = Lane,
    ) -> None:
        """Take room on the device and, where weights rest in files of a ``shelf``, the buffers.

        Raises:
            UserError: so much of the host's memory cannot be locked.
        """
        largest = aligned(max(one.part_numel * one.parameter.itemsize for one in weights))
        self._rooms = cycle(torch.zeros(TILES.slots * largest, dtype=torch.uint8, device=device).split(largest))
        self._shelf, self._inward = shelf, lane(device)
        self.num_bytes = 0 if shelf is None else TILES.slots * largest
        """Of the host's memory, for buffers."""
        memory = locked_for("memory.parameter_tier", self.num_bytes, device, "memory.parameter_tier=host")
        self._buffers = cycle(map(_Buffer, memory.split(largest))) if self.num_bytes else None
        self.copied_bytes = 0
        """To the device, so far."""
        for weight in weights:
            weight.come_by(self.bring, device)

    def bring(self, weight: TiledWeight, order: Sequence[int]) -> Iterator[Tensor]:
        """The rows of one tile after another, for what the calling thread does next: each until the next is asked
        for."""
        coming = deque[tuple[Tensor, Any]]()
        for place in range(len(order)):
            for ahead in range(place + len(coming), min(place + TILES.slots, len(order))):
                coming.append(self._call(weight, order[ahead : ahead + 2]))
            matrix, there = coming.popleft()
            self._inward.join(there)
            yield matrix

    @torch.no_grad()
    def _call(self, weight: TiledWeight, numbers: Sequence[int]) -> tuple[Tensor, Any]:
        """Let the first of some tiles begin to come, and the one after it be read; where it comes to, and when it is
        there."""
        rows = weight.own(numbers[0])
        room = next(self._rooms)[: rows.nbytes].view(rows.dtype).view(rows.shape)
        buffer = None if self._buffers is None else next(self._buffers)
        if buffer is not None:
            rows = self._read(buffer, weight, numbers, rows)
        self._inward.follow()  # what is done with the tile that was there comes first
        with self._inward:
            room.copy_(rows, non_blocking=True)
        self.copied_bytes += rows.nbytes
        there = self._inward.mark()
        if buffer is not None:
            buffer.left = there
        return room, there

    def _read(self, buffer: _Buffer, weight: TiledWeight, numbers: Sequence[int], rows: Tensor) -> Tensor:
        """Rows of a file, in locked memory."""
        assert self._shelf is not None
        if buffer.left is not None:
            buffer.left.synchronize()
        own = weight.parts(numbers[:1])
        began = time.perf_counter()
        self._shelf.pages.bring(own)
        self._shelf.waited_seconds += time.perf_counter() - began
        found = buffer.memory[: rows.nbytes].view(rows.dtype).view(rows.shape).copy_(rows)
        self._shelf.pages.rest(own)
        self._shelf.pages.prefetch(weight.parts(numbers[1:]))
        return found


class _Buffer:
    """Locked memory, and the mark after which what was put there last has left."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.left: Any = None
