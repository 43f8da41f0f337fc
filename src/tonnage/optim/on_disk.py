"""Optimizer state that rests on disk and streams through a small ring of buffers at every step.

The state of all parameters, in the order in which a forward pass needs them, is cut into tiles of one size. In a tile,
each piece of a parameter has its streams one after another (``m``, ``v``, scales, ``low``), so a tile is read and
written in large requests. A step reads tiles ahead, updates them with the same loops as state in memory (the same bits
come out), and writes them behind; what it holds in memory is the ring. Reading does not depend on the gradients, so it
may begin during the backward pass (``prefetch``). Where there is room for some of the state, some tiles stay in memory,
evenly spread, so that the disk is never without work for long.

The files have no name and vanish with the process: what a run goes on from is a checkpoint. For that, ``tensors``
streams the state into one more file of the same kind and hands it out mapped, so that a writer which goes from tensor
to tensor needs no memory for it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tonnage.errors import Problem, UserError
from tonnage.offload.arena import arena
from tonnage.offload.pages import Pages
from tonnage.offload.store import Counters, Shape, TileStore
from tonnage.optim.kernels import half_the_threads
from tonnage.optim.moments import BLOCK, Codec, Moments, blocks_in, border, row_length, streams
from tonnage.optim.tiers import Piece, Trained, local

TILE_BYTES = 16 << 20
NUM_BUFFERS = 12
ALIGNMENT = 64
"""Bytes: every stream begins on a cache line."""


@dataclass(frozen=True)
class _Place:
    """Where a piece lies in its tile."""

    trained: Trained
    start: int
    stop: int
    row: int
    """Elements of a row in the piece: of the parameter, or all if it is a part of one row."""
    streams: Mapping[str, tuple[torch.dtype, int, int]]
    """Type, first byte and end of each stream."""

    def over(self, tile: Tensor) -> Piece:
        """The piece in a tile's bytes."""
        views = {name: tile[first:end].view(dtype) for name, (dtype, first, end) in self.streams.items()}
        moments = Moments(views["m"], views["v"], views.get("m_scale"), views.get("v_scale"), self.row)
        return Piece(self.trained, self.start, self.stop, views.get("low"), moments)

    def parts(self, tile: Tensor) -> Iterator[tuple[str, slice, Tensor]]:
        """Each stream in a tile: name, which elements of the whole stream it is, and its values."""
        row = row_length(self.trained.parameter.shape)
        first_block = self.start // row * blocks_in(row) + self.start % row // BLOCK
        for name, (dtype, first, end) in self.streams.items():
            values = tile[first:end].view(dtype)
            begin = first_block if name.endswith("scale") else self.start
            yield f"{self.trained.name}.{name}", slice(begin, begin + values.numel()), values


class OnDisk:
    """The disk tier (``tiers.Tier``). Parameters must be on the CPU."""

    hands_out_copies = True

    def __init__(
        self,
        trained: Sequence[Trained],
        codec: Codec,
        *,
        directories: Sequence[Path],
        log: Callable[[str], None] = lambda message: None,
        tile_bytes: int | None = None,
        num_buffers: int = NUM_BUFFERS,
        resident_bytes: int = 0,
    ) -> None:
        """Reserve the space and begin with zeros. At most ``resident_bytes`` of the tiles stay in memory.

        Raises:
            UserError: not enough space for the state and one copy of it (``tensors``), or parameters elsewhere.
        """
        devices = {one.parameter.device.type for one in trained} - {"cpu"}
        if devices:
            problem = Problem(
                where="memory.optimizer_tier",
                found=f"disk, with parameters on {', '.join(sorted(devices))}",
                needed="parameters on the CPU, where the disk tier works so far",
                change="memory.optimizer_tier=device",
            )
            raise UserError(problem)
        self._trained, self._codec, self._directory = trained, codec, directories[0]
        self._tiles = _lay_out(sorted(trained, key=lambda one: one.turn), codec, tile_bytes or TILE_BYTES)
        largest = max((_end(places) for places in self._tiles), default=1)
        self._resident = _spread(len(self._tiles), resident_bytes, largest)
        self._streamed = [number for number in range(len(self._tiles)) if number not in self._resident]
        num_tiles = max(1, len(self._streamed))
        shape = Shape(largest, num_tiles, min(num_buffers, num_tiles), durable=False)
        self._ahead = max(1, shape.num_buffers - 2)
        self._store = TileStore.create(directories, shape, log, spare_bytes=self.state_bytes)
        log(
            f"optimizer state on disk: {self.state_bytes / 1e9:.2f} GB in {len(self._tiles)} tiles, "
            f"{len(self._resident)} of them in memory, which takes {self.host_bytes / 1e6:.0f} MB"
        )

    def pieces(self, names: Sequence[str]) -> Iterator[Piece]:
        """See ``Tier``. Tiles without any of ``names`` are not touched."""
        wanted = set(names)
        chosen = [n for n, places in enumerate(self._tiles) if any(place.trained.name in wanted for place in places)]
        with half_the_threads():
            for tile, places in self._visit(chosen, changes=True):
                for place in places:
                    if place.trained.name in wanted:
                        yield place.over(tile)

    def prefetch(self) -> None:
        """See ``Tier``."""
        for index in range(min(self._ahead, len(self._streamed))):
            self._store.prefetch(index)

    def tensors(self) -> dict[str, Tensor]:
        """See ``Tier``; a copy as of now, mapped from a file that vanishes with it.

        Raises:
            UserError: no space for the copy.
        """
        named = self._map_copy()
        for tile, places in self._visit(range(len(self._tiles)), changes=False):
            for place in places:
                for name, part, values in place.parts(tile):
                    named[name].view(-1)[part] = values
        return named

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """See ``Tier``."""
        for tile, places in self._visit(range(len(self._tiles)), changes=True):
            for place in places:
                for name, part, values in place.parts(tile):
                    values.copy_(tensors[name].reshape(-1)[part])

    @property
    def state_bytes(self) -> int:
        """See ``Tier``."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self._whole_streams().values())

    @property
    def host_bytes(self) -> int:
        """See ``Tier``: the ring of buffers, and what stays."""
        return self._store.shape.buffer_bytes + sum(tile.nbytes for tile in self._resident.values())

    @property
    def counters(self) -> Counters:
        """What was read and written, and what was waited for."""
        return self._store.counters

    @property
    def waited_seconds(self) -> float:
        """See ``Tier``."""
        return self._store.counters.waited_seconds

    def flush(self) -> None:
        """Wait until everything stored is written."""
        self._store.flush()

    def close(self) -> None:
        """Give the state up."""
        self._store.close()

    def _visit(self, numbers: Sequence[int], *, changes: bool) -> Iterator[tuple[Tensor, list[_Place]]]:
        """Tiles in ascending order, those on disk read ahead."""
        wanted = set(numbers)
        coming = [index for index, number in enumerate(self._streamed) if number in wanted]
        for number in numbers:
            index = bisect_left(self._streamed, number)
            start = bisect_left(coming, index)
            for later in coming[start : start + self._ahead]:
                self._store.prefetch(later)
            if number in self._resident:
                yield self._resident[number], self._tiles[number]
            else:
                yield torch.frombuffer(self._store.fetch(index), dtype=torch.uint8), self._tiles[number]
                self._store.store(index) if changes else self._store.drop(index)

    def _whole_streams(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of every tensor of the state, by name."""
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for one in self._trained:
            shape = tuple(local(one.parameter).shape)
            for name, (dtype, _) in _streams(one, self._codec, math.prod(shape)).items():
                scale = name.endswith("scale")
                found[f"{one.name}.{name}"] = dtype, (shape[0], blocks_in(row_length(shape))) if scale else shape
        return found

    def _map_copy(self) -> dict[str, Tensor]:
        """Room for a copy of all state, in a file without a name."""
        forms = self._whole_streams()
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in forms.items()}
        pages = Pages(
            {name: size for name, size in sizes.items() if size}, [self._directory], "a copy of the optimizer state"
        )
        return {
            name: torch.frombuffer(pages.memory(name), dtype=dtype).view(shape)
            if name in pages
            else torch.empty(shape, dtype=dtype)
            for name, (dtype, shape) in forms.items()
        }


def _spread(num_tiles: int, resident_bytes: int, tile_bytes: int) -> dict[int, Tensor]:
    """The tiles that stay in memory, as many as fit, in even distances."""
    stay = min(num_tiles, resident_bytes // tile_bytes)
    numbers = [number for number in range(num_tiles) if (number + 1) * stay // num_tiles > number * stay // num_tiles]
    room = -(-tile_bytes // ALIGNMENT) * ALIGNMENT
    whole = torch.frombuffer(arena(stay * room), dtype=torch.uint8) if stay else torch.empty(0, dtype=torch.uint8)
    return {number: whole[turn * room : turn * room + tile_bytes] for turn, number in enumerate(numbers)}


def _streams(one: Trained, codec: Codec, num_elements: int) -> dict[str, tuple[torch.dtype, int]]:
    """Type and size of each stream of a run of a parameter's elements."""
    low = {"low": (torch.int16, num_elements)} if one.parameter.dtype == torch.bfloat16 else {}
    return streams(codec, num_elements, row_length(one.parameter.shape)) | low


def _lay_out(trained: Sequence[Trained], codec: Codec, tile_bytes: int) -> list[list[_Place]]:
    """The pieces of every tile: parameters in order, each tile as full as rows and blocks allow."""
    tiles: list[list[_Place]] = []
    for one in trained:
        row, num_elements = row_length(one.parameter.shape), local(one.parameter).numel()
        start = 0
        while start < num_elements:
            end = _aligned(_end(tiles[-1])) if tiles else 0
            stop = border(start, _fitting(one, codec, tile_bytes - end), row, num_elements)
            if stop > start:
                tiles[-1:] = [[*(tiles[-1] if tiles else []), _place(one, codec, start, stop, end)]]
                start = stop
            elif tiles and not tiles[-1]:
                raise ValueError(f"a tile of {tile_bytes} bytes does not hold a piece of {one.name}")
            else:
                tiles.append([])
    return tiles


def _fitting(one: Trained, codec: Codec, room: int) -> int:
    """How many elements fit into ``room`` bytes, whatever the alignment of their streams costs."""
    row = row_length(one.parameter.shape)
    found = _streams(one, codec, row)
    row_bytes = sum(dtype.itemsize * size for dtype, size in found.values())
    return max(0, (room - 2 * ALIGNMENT * len(found)) * row // row_bytes)


def _place(one: Trained, codec: Codec, start: int, stop: int, position: int) -> _Place:
    placed = {}
    for name, (dtype, size) in _streams(one, codec, stop - start).items():
        placed[name] = dtype, position, position + size * dtype.itemsize
        position = _aligned(placed[name][2])
    return _Place(one, start, stop, min(row_length(one.parameter.shape), stop - start), placed)


def _end(places: Sequence[_Place]) -> int:
    """Bytes of a tile that its pieces take."""
    return max((end for place in places for _, _, end in place.streams.values()), default=0)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
