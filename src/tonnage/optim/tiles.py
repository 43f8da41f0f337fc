"""Tiles: the optimizer's state of a number of parameters, or pieces of them, as one run of bytes.

State that does not rest beside its parameters moves in tiles of one size. In a tile each piece of a parameter has its
streams one after another (``m``, ``v``, scales, ``low``), each from a border of ``ALIGNMENT`` bytes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tonnage.host.locked import locked_for
from tonnage.kernels.adamw import LOW
from tonnage.kernels.moments import BLOCK, Codec, blocks_in, border, moments_of, row_length, streams
from tonnage.kernels.regions import local_part
from tonnage.optim.tiers import StatePiece, TrainedParameter, Visit, visits

ALIGNMENT = 64
"""Bytes: every stream begins on a cache line."""


@dataclass(frozen=True)
class PieceInTile:
    """Where a piece lies in its tile."""

    trained: TrainedParameter
    start: int
    stop: int
    row: int
    """Elements of a row in the piece: of the parameter, or all if it is a part of one row."""
    streams: Mapping[str, tuple[torch.dtype, int, int]]
    """Type, first byte and end of each stream."""

    @staticmethod
    def of(names: Iterable[str], tiles: Sequence[Sequence[PieceInTile]]) -> dict[int, list[PieceInTile]]:
        """The pieces of some parameters in each tile that has any, by its number."""
        chosen = set(names)
        by_tile = ([place for place in tile if place.trained.name in chosen] for tile in tiles)
        return {number: places for number, places in enumerate(by_tile) if places}

    def over(self, tile: Tensor) -> StatePiece:
        """The piece in a tile's bytes."""
        views = {name: tile[first:end].view(dtype) for name, (dtype, first, end) in self.streams.items()}
        moments = moments_of(views, self.row) if "m" in views else None
        return StatePiece(self.trained, self.start, self.stop, views.get("low"), moments)

    def parts(self, tile: Tensor) -> Iterator[tuple[str, slice, Tensor]]:
        """Each stream in a tile: name, which elements of the whole stream it is, and its values."""
        row = self.trained.row
        first_block = self.start // row * blocks_in(row) + self.start % row // BLOCK
        for name, (dtype, first, end) in self.streams.items():
            values = tile[first:end].view(dtype)
            begin = first_block if name.endswith("scale") else self.start
            yield f"{self.trained.name}.{name}", slice(begin, begin + values.numel()), values


def whole_streams(trained: Sequence[TrainedParameter], codec: Codec) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of every tensor of the state, by name."""
    forms: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for trained_parameter in trained:
        shape = tuple(local_part(trained_parameter.parameter).shape)
        for name, (dtype, _) in streams_of(trained_parameter, codec, math.prod(shape)).items():
            stream_shape = (shape[0], blocks_in(row_length(shape))) if name.endswith("scale") else shape
            forms[f"{trained_parameter.name}.{name}"] = dtype, stream_shape
    return forms


def locked_tensors(
    key: str, forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device, otherwise: str
) -> dict[str, Tensor]:
    """Tensors of the host of these types and shapes, one after another in one piece of memory (``locked_for``). It
    raises ``UserError`` where so much cannot be locked."""
    memory = locked_for(key, sum(aligned(num_bytes(form)) for form in forms.values()), device, otherwise)
    tensors, end = {}, 0
    for name, (dtype, shape) in forms.items():
        size = num_bytes((dtype, shape))
        tensors[name] = memory[end : end + size].view(dtype).view(shape)
        end += aligned(size)
    return tensors


def num_bytes(form: tuple[torch.dtype, tuple[int, ...]]) -> int:
    """Bytes of a tensor of a type and shape."""
    return math.prod(form[1]) * form[0].itemsize


def streams_of(
    trained_parameter: TrainedParameter, codec: Codec, num_elements: int
) -> dict[str, tuple[torch.dtype, int]]:
    """Type and size of each stream of a run of a parameter's elements."""
    dtype = LOW.get(trained_parameter.parameter.dtype)
    low = {"low": (dtype, num_elements)} if dtype is not None else {}
    moments = streams(codec, num_elements, trained_parameter.row)
    if trained_parameter.muon is not None:  # its state is momentum alone
        moments = {name: form for name, form in moments.items() if not name.startswith("v")}
    return moments | low


def streams_of_visit(visit: Visit, codec: Codec, num_elements: int) -> dict[str, tuple[torch.dtype, int]]:
    """Those of them that are handed out in a visit."""
    forms = streams_of(visit.trained, codec, num_elements)
    if visit.part == "all":
        return forms
    return {name: form for name, form in forms.items() if (name == "low") == (visit.part == "weights")}


def lay_out(trained: Sequence[TrainedParameter], codec: Codec, tile_bytes: int) -> list[list[PieceInTile]]:
    """The pieces of every tile: parameters as they are visited, each tile as full as rows and blocks allow."""
    tiles: list[list[PieceInTile]] = []
    for visit in visits(trained):
        row, num_elements = visit.trained.row, local_part(visit.trained.parameter).numel()
        start = 0
        while start < num_elements:
            end = aligned(end_of(tiles[-1])) if tiles else 0
            stop = border(start, _fitting(visit, codec, tile_bytes - end), row, num_elements)
            if stop > start:
                tiles[-1:] = [[*(tiles[-1] if tiles else []), _place(visit, codec, start, stop, end)]]
                start = stop
            elif tiles and not tiles[-1]:
                raise ValueError(f"a tile of {tile_bytes} bytes does not hold a piece of {visit.trained.name}")
            else:
                tiles.append([])
    return tiles


def staying(num_tiles: int, room_bytes: int, tile_bytes: int) -> list[int]:
    """Numbers of the tiles that need not move, as many as there is room for, in even distances."""
    stay = min(num_tiles, room_bytes // tile_bytes)
    return [number for number in range(num_tiles) if (number + 1) * stay // num_tiles > number * stay // num_tiles]


def cut_up(memory: Tensor, tile_bytes: int) -> list[Tensor]:
    """Room for tiles in one piece of memory of a multiple of ``aligned(tile_bytes)`` bytes."""
    return [room[:tile_bytes] for room in memory.split(aligned(tile_bytes))] if memory.numel() else []


def _fitting(visit: Visit, codec: Codec, room: int) -> int:
    """How many elements fit into ``room`` bytes, whatever the alignment of their streams costs."""
    row = visit.trained.row
    streams_of_row = streams_of_visit(visit, codec, row)
    row_bytes = sum(dtype.itemsize * size for dtype, size in streams_of_row.values())
    if not row_bytes:
        return local_part(visit.trained.parameter).numel()
    return max(0, (room - 2 * ALIGNMENT * len(streams_of_row)) * row // row_bytes)


def _place(visit: Visit, codec: Codec, start: int, stop: int, position: int) -> PieceInTile:
    placed = {}
    for name, (dtype, size) in streams_of_visit(visit, codec, stop - start).items():
        placed[name] = dtype, position, position + size * dtype.itemsize
        position = aligned(placed[name][2])
    return PieceInTile(visit.trained, start, stop, min(visit.trained.row, stop - start), placed)


def end_of(places: Sequence[PieceInTile]) -> int:
    """Bytes of a tile that its pieces take."""
    return max((end for place in places for _, _, end in place.streams.values()), default=0)


def aligned(position: int) -> int:
    """The next border from ``position`` on."""
    return -(-position // ALIGNMENT) * ALIGNMENT
