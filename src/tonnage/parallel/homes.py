"""Where parameters rest that come to a device block by block: in locked memory of its host, or on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tonnage.host.locked import locked_for
from tonnage.offload.pages import FileRange, Pages
from tonnage.offload.ring import Home, Pairs

ALIGNMENT = 256
"""Every parameter starts at a multiple of so many bytes, as an allocator's memory does."""
Places = Mapping[str, tuple[int, int]]
"""Where in the bytes of its block each parameter begins and ends, by the names that parameters have in the model."""
Block = tuple[int, int]
"""The number of a block, and after how many updates of the optimizer it comes."""


class HostHome(Home[Block]):
    """Every block in one locked piece of memory, which is taken when the block is first asked for."""

    def __init__(self, blocks: Sequence[Places], device: torch.device, otherwise: str) -> None:
        """Taking the memory raises ``UserError`` where so much of it cannot be locked; ``otherwise`` is what to change
        then."""
        self._ends, self._device, self._otherwise = [_end(block) for block in blocks], device, otherwise
        self._blocks = dict[int, Tensor]()
        self.num_bytes = sum(map(aligned, self._ends))
        """Of locked memory."""
        self._places = {name: (number, *place) for number, block in enumerate(blocks) for name, place in block.items()}

    def bytes_of(self, name: str) -> Tensor:
        number, start, stop = self._places[name]
        return self._whole(number)[start:stop]

    def pairs(self, unit: Block, memory: Tensor) -> Pairs:
        whole = self._whole(unit[0])
        self.copied_bytes += whole.nbytes
        return [(whole, memory[: whole.numel()])]

    def _whole(self, number: int) -> Tensor:
        if number not in self._blocks:
            size = self._ends[number]
            memory = locked_for("parameters in host memory", aligned(size), self._device, self._otherwise)
            self._blocks[number] = memory[:size]
        return self._blocks[number]


class FileHome(Home[Block]):
    """Each parameter in a file: one of the run's own or, if the parameter is ``stored`` somewhere unchanged, that one,
    which is only read. A block is assembled in a buffer (``Staging``) on its way."""

    def __init__(
        self,
        blocks: Sequence[Places],
        device: torch.device,
        directories: Sequence[Path],
        stored: Mapping[str, FileRange] = MappingProxyType({}),
        beside: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Reserve the space, and take the memory. The files have room, too, for what rests ``beside`` the blocks (bytes
        of each, by name), which others bring from there (``pages``).

        Raises:
            UserError: not enough space, or so much of the host's memory cannot be locked.
        """
        sizes = {name: stop - start for block in blocks for name, (start, stop) in block.items()}
        self._blocks, lying = blocks, {name: stored[name] for name in sizes if name in stored}
        own = {name: size for name, size in sizes.items() if name not in lying} | dict(beside)
        contents = "the parameters of the blocks"
        self.pages = Pages(own, directories, f"{contents} and what comes in tiles" if beside else contents, lying)
        self._staging = Staging(max(map(_end, blocks), default=0), device, "memory.parameter_tier=device")
        self.num_bytes = self._staging.num_bytes
        """Of locked memory."""
        self.waited_seconds = 0.0
        """Time in which blocks were waited for."""

    def bytes_of(self, name: str) -> Tensor:
        """The bytes of a parameter, mapped."""
        return torch.frombuffer(self.pages.memory(name), dtype=torch.uint8)

    def pairs(self, unit: Block, memory: Tensor) -> Pairs:
        """See ``Home``. The memory of its files is given back."""
        buffer, block = self._staging.take(), self._blocks[unit[0]]
        self.waited_seconds += self.pages.bring(block)
        for name, (start, stop) in block.items():
            buffer[start:stop].copy_(self.bytes_of(name))
        self.pages.rest(block)
        end = _end(block)
        self.copied_bytes += end
        return [(buffer[:end], memory[:end])]

    def prefetch(self, unit: Block) -> None:
        """See ``Home``. There may be no block of that number."""
        if 0 <= unit[0] < len(self._blocks):
            self.pages.prefetch(self._blocks[unit[0]])

    def sent(self, mark: Any) -> None:
        self._staging.sent(mark)


class Staging:
    """Two buffers of locked memory, through which what rests on disk goes to a device in turns."""

    def __init__(self, num_bytes: int, device: torch.device, otherwise: str) -> None:
        """Take two buffers of ``num_bytes`` each. Raises ``UserError`` where so much cannot be locked, which suggests
        ``otherwise``."""
        size = aligned(num_bytes)
        memory = locked_for("memory.parameter_tier", 2 * size, device, otherwise)
        self.num_bytes = memory.nbytes
        self._buffers = cycle(enumerate((memory[:size], memory[size:])))
        self._left: dict[int, Any] = {}
        """Marks after which what was put into each buffer last has left."""
        self._last = 0

    def take(self) -> Tensor:
        """The buffer whose content leaves first; waits until it has left."""
        self._last, buffer = next(self._buffers)
        if (left := self._left.get(self._last)) is not None:
            left.synchronize()
        return buffer

    def sent(self, mark: Any) -> None:
        """The content of the buffer that was taken last has left once ``mark`` is passed."""
        self._left[self._last] = mark


def aligned(num_bytes: int) -> int:
    """Where the next parameter may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _end(block: Places) -> int:
    return max((stop for _, stop in block.values()), default=0)
