"""Tiles of weights (``tiled``) that rest in the host's memory or on disk, and come to the device one after another.

There is room for two on the device (``ring``): the one that is computed with, and the next one. What rests on disk is
copied into a locked buffer on its way. Nothing goes back: gradients leave tile by tile (``optim.gradients``), and a
weight is updated where it rests (``host_masters``).

    device    computes with tile 0      computes with tile 1
    stream    1 comes                   2 comes
    disk      2 is read                 3 is read
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tonnage.kernels.streams import Stream
from tonnage.offload.residency import TILES
from tonnage.parallel.homes import FileHome, Staging, aligned
from tonnage.parallel.ring import Ring
from tonnage.parallel.tiled import TiledWeight


class _Tile(NamedTuple):
    """A tile of a weight, in one of the times that it comes."""

    weight: TiledWeight
    number: int
    time: int


class HostTiles:
    """Tiles of some weights, of which one is computed with at a time, in turns on ``device``; their home."""

    def __init__(
        self,
        weights: Sequence[TiledWeight],
        device: torch.device,
        files: FileHome | None,
        *,
        stream: Callable[[torch.device], Stream] = Stream,
    ) -> None:
        """Take room on the device and, where weights rest in ``files``, the buffers.

        Raises:
            UserError: so much of the host's memory cannot be locked.
        """
        largest = max(weight.part_numel * weight.parameter.itemsize for weight in weights)
        self._ring = Ring(self, device, stream(device))
        self._ring.open(TILES.slots, aligned(largest))
        self._files, self._times = files, 0
        self._staging = None if files is None else Staging(largest, device, "memory.parameter_tier=host")
        self.num_bytes = 0 if self._staging is None else self._staging.num_bytes
        """Of the host's memory, for buffers."""
        for weight in weights:
            weight.come_by(self.bring, device)

    @property
    def copied_bytes(self) -> int:
        """To the device, so far."""
        return self._ring.copied_bytes

    def bring(self, weight: TiledWeight, order: Sequence[int]) -> Iterator[Tensor]:
        """The rows of one tile after another, for what the calling thread does next: each until the next is asked
        for."""
        self._times += 1
        tiles: list[_Tile | None] = [_Tile(weight, number, self._times) for number in order]
        for tile, following, later in zip(tiles, [*tiles[1:], None], [*tiles[2:], None, None], strict=False):
            assert tile is not None
            slot = self._ring.have(tile, following)
            if following is not None:
                self._ring.call(following, keeping=tile, following=later)
            rows = weight.own(tile.number)
            yield slot.memory[: rows.nbytes].view(rows.dtype).view(rows.shape)

    def whole(self, unit: _Tile) -> Tensor:
        """See ``Home``. The memory of its files is given back."""
        content = unit.weight.own(unit.number).reshape(-1).view(torch.uint8)
        if self._staging is None or self._files is None:
            return content
        buffer, parts = self._staging.take(), unit.weight.parts([unit.number])
        self._files.waited_seconds += self._files.pages.bring(parts)
        buffer[: content.numel()].copy_(content)
        self._files.pages.rest(parts)
        return buffer[: content.numel()]

    def prefetch(self, unit: _Tile) -> None:
        """See ``Home``."""
        if self._files is not None:
            self._files.pages.prefetch(unit.weight.parts([unit.number]))

    def sent(self, mark: Any) -> None:
        """See ``Home``."""
        if self._staging is not None:
            self._staging.sent(mark)
