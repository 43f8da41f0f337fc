"""Where the parameters of blocks lie that come to a device block by block: in locked memory of its host, or on disk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tonnage.host.locked import locked_for
from tonnage.offload.pages import Pages, Place

ALIGNMENT = 256
"""Bytes of which the start of every parameter is a multiple, as of memory that an allocator gives."""
Places = Mapping[str, tuple[int, int]]
"""Where in the bytes of its block each parameter begins and ends, by the names that parameters have in the model."""


class InMemory:
    """Every block in one locked piece of memory, which is taken when the block is first asked for."""

    pages = None

    def __init__(self, blocks: Sequence[Places], device: torch.device, otherwise: str) -> None:
        """Taking the memory raises ``UserError`` where so much of it cannot be locked; ``otherwise`` is what to change
        then."""
        self._ends, self._device, self._otherwise = [_end(block) for block in blocks], device, otherwise
        self._blocks = dict[int, Tensor]()
        self.num_bytes = sum(map(aligned, self._ends))
        """Of locked memory."""
        self._places = {name: (number, *place) for number, block in enumerate(blocks) for name, place in block.items()}

    def bytes_of(self, name: str) -> Tensor:
        """Those of a parameter, as they lie."""
        number, start, stop = self._places[name]
        return self.whole(number)[start:stop]

    def whole(self, number: int) -> Tensor:
        """The bytes of a block."""
        if number not in self._blocks:
            size = self._ends[number]
            memory = locked_for("parameters in host memory", aligned(size), self._device, self._otherwise)
            self._blocks[number] = memory[:size]
        return self._blocks[number]

    def prefetch(self, number: int) -> None:
        """All are there."""

    def sent(self, mark: Any) -> None:
        """All stay."""


class OnDisk:
    """Each parameter in a file, of the run's own or, if it is ``stored`` somewhere as it is, in that, which is only
    read. A block is put together in one of two locked pieces of memory on its way."""

    def __init__(
        self,
        blocks: Sequence[Places],
        device: torch.device,
        directories: Sequence[Path],
        stored: Mapping[str, Place] = MappingProxyType({}),
        beside: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Reserve the space, and take the memory. There are files as well for what rests ``beside`` the blocks, of so
        many bytes each, which somebody else brings from there (``pages``).

        Raises:
            UserError: not enough space, or so much of the host's memory cannot be locked.
        """
        sizes = {name: stop - start for block in blocks for name, (start, stop) in block.items()}
        self._blocks, lying = blocks, {name: stored[name] for name in sizes if name in stored}
        own = {name: size for name, size in sizes.items() if name not in lying} | dict(beside)
        what = "the parameters of the blocks"
        self.pages = Pages(own, directories, f"{what} and what comes in tiles" if beside else what, lying)
        largest = aligned(max(map(_end, blocks), default=0))
        memory = locked_for("memory.parameter_tier", 2 * largest, device, "memory.parameter_tier=device")
        self.num_bytes = memory.nbytes
        """Of locked memory."""
        self._ways = cycle([_Way(memory[:largest]), _Way(memory[largest:])])
        self._way = next(self._ways)
        self.waited_seconds = 0.0
        """Time in which blocks were waited for."""

    def bytes_of(self, name: str) -> Tensor:
        """Those of a parameter, as they lie: mapped."""
        return torch.frombuffer(self.pages.memory(name), dtype=torch.uint8)

    def whole(self, number: int) -> Tensor:
        """The bytes of a block in locked memory, which stay until two more are asked for. The memory of its files is
        given back."""
        self._way = next(self._ways)
        if self._way.left is not None:
            self._way.left.synchronize()
        block = self._blocks[number]
        began = time.perf_counter()
        self.pages.bring(block)
        self.waited_seconds += time.perf_counter() - began
        for name, (start, stop) in block.items():
            self._way.memory[start:stop].copy_(self.bytes_of(name))
        self.pages.rest(block)
        return self._way.memory[: _end(block)]

    def prefetch(self, number: int) -> None:
        """Begin to read a block, if there is one of that number; returns at once."""
        if 0 <= number < len(self._blocks):
            self.pages.prefetch(self._blocks[number])

    def sent(self, mark: Any) -> None:
        """The block that was asked for last is on its way, and has left when ``mark`` is passed."""
        self._way.left = mark


def aligned(num_bytes: int) -> int:
    """Where the next parameter may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Way:
    """Locked memory, and the mark after which what was put there last has left."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.left: Any = None


def _end(block: Places) -> int:
    return max((stop for _, stop in block.values()), default=0)
