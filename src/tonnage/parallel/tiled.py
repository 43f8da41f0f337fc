"""Weights of which only some rows are in memory, or gathered, at a time: tiles (memory-centric tiling of ZeRO-Infinity,
Rajbhandari et al. 2021, section 5.1.3).

A tiled weight stays one parameter under the model's own name. A rank has the rows that FSDP2 would give it, in memory
or on disk, and a tile is the same few of these on every rank: some of its own or, where several ranks share a weight,
what an all-gather makes of them. Its gradient leaves tile by tile in the same way. So whoever loads, saves or updates
the weight sees it whole, or a shard as ever, and how many tiles there are is nobody else's affair.

    rank 0   0 1 2 │ 3 4 5      tile 0 has rows 0 1 2 6 7 8, tile 1 has rows 3 4 5 9 10 11
    rank 1   6 7 8 │ 9 10 11

Every rank goes through all tiles, whatever it needs of them: the others wait for its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tonnage.kernels.regions import local_part, part_of
from tonnage.offload.pages import Pages
from tonnage.parallel.tensor import Ranks, all_reduce

Holder = tuple[nn.Module, str]
"""A module that has a weight, and the weight's name there."""
Taker = Callable[[nn.Parameter, int, Tensor], None]
"""Takes up a part of a gradient (``optim.gradients.Gradients.add_part``)."""
Bringer = Callable[["TiledWeight", Sequence[int]], Iterator[Tensor]]
"""Brings the rows of tiles to a device where they do not rest (``host_masters.HostTiles``)."""


class TiledWeight:
    """A weight, (rows, ...), that comes and goes in ``number`` tiles of rows, in ``dtype``.

    ``holders`` are all modules that have it: several, where an embedding is a head as well. Where ``mesh``, of the axes
    replicate and shard, has several ranks it is divided among them, on the meta device.
    """

    def __init__(self, holders: Sequence[Holder], number: int, dtype: torch.dtype, mesh: DeviceMesh) -> None:
        self._holders, self.dtype, self._mesh = holders, dtype, mesh
        self.shards, self._rank = mesh["shard"].size(), mesh["shard"].get_local_rank()
        self.shape = self.parameter.shape
        self.rows, self.columns = self.shape[0], math.prod(self.shape[1:])
        self._each = -(-self.rows // self.shards)
        self._step = -(-self._each // number)
        self.number = -(-self._each // self._step)
        """Of tiles: no more than there are rows of a shard."""
        if mesh.size() > 1:
            self._divide()
        self._pages: Pages | None = None
        self._bring: Bringer | None = None
        self._device: torch.device | None = None
        self._group: str = mesh["shard"].get_group().group_name
        self._name = ""
        self._take: Taker | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The weight, or this rank's shard of it."""
        owner, name = self._holders[0]
        parameter: nn.Parameter = getattr(owner, name)
        return parameter

    @property
    def part_numel(self) -> int:
        """Elements of a tile that this rank has, at most."""
        return self._step * self.columns

    def put(self, parameter: nn.Parameter) -> None:
        """Replace the parameter in all of its holders."""
        for owner, name in self._holders:
            setattr(owner, name, parameter)

    def rest_in(self, pages: Pages, name: str) -> None:
        """From now on its memory is the array ``name`` of ``pages``."""
        self._pages, self._name = pages, name
        pages.divide(name, self.part_numel * self.parameter.itemsize)

    def come_by(self, bring: Bringer, device: torch.device) -> None:
        """From now on ``bring`` brings its tiles to ``device``, on which it does not rest. No other rank shares it."""
        assert self.shards == 1
        self._bring, self._device = bring, device

    @property
    def device(self) -> torch.device:
        """Where it is computed with."""
        return self._device or self.parameter.device

    def begin(self, take: Taker) -> None:
        """From now on ``take`` receives its gradients."""
        self._take = take

    @torch.no_grad()
    def tiles(self, *, backwards: bool = False) -> Iterator[Tile]:
        """One tile after another, each with its rows until the next is asked for; the last one first, if
        ``backwards``."""
        order = range(self.number)[::-1] if backwards else range(self.number)
        if self._bring is not None:
            for number, rows in zip(order, self._bring(self, order), strict=True):
                tile = Tile(self, number, rows.to(self.dtype))
                yield tile
                del tile.matrix
            return
        in_memory = list[str]()
        for place, number in enumerate(order):
            if self._pages is not None:
                in_memory = self._pages.turn(in_memory, self.parts(order[place : place + 2]))
            tile = Tile(self, number, self._gathered(number))
            yield tile
            del tile.matrix
        if self._pages is not None:
            self._pages.rest(in_memory)

    def places(self) -> Iterator[Tile]:
        """One tile after another without its rows, for the gradients of what was looked up."""
        return (Tile(self, number, None) for number in range(self.number))

    def length(self, number: int) -> int:
        """Rows that a full shard has of a tile."""
        return min(self._step, self._each - number * self._step)

    def first(self, number: int) -> int:
        """The first row in a shard that is a tile's."""
        return number * self._step

    def place_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rank whose shard has each of some rows, and the row's place in that shard."""
        return rows // self._each, rows % self._each

    def rows_of(self, number: int, rank: int) -> slice:
        """The rows of a tile that a rank has."""
        shard = part_of(slice(0, self.rows), self.shards, rank)
        start = min(shard.start + self.first(number), shard.stop)
        return slice(start, min(start + self.length(number), shard.stop))

    def add(self, number: int, gradient: Tensor) -> None:
        """Sum a micro-batch's gradient of a tile over ranks, and hand this rank's part of it on."""
        if self._mesh.size() > 1:
            summed = torch.ops._c10d_functional.reduce_scatter_tensor(gradient, "sum", self.shards, self._group)
            gradient = torch.ops._c10d_functional.wait_tensor(summed)
            if (replicate := self._mesh["replicate"]).size() > 1:
                gradient = all_reduce(gradient, Ranks.along(replicate))
        if num_rows := _length(self.rows_of(number, self._rank)):
            assert self._take is not None, "gradients have nowhere to go"
            self._take(self.parameter, self.first(number) * self.columns, gradient[:num_rows])

    def own(self, number: int) -> Tensor:
        """The rows of a tile that this rank has, as they rest."""
        parameter, first = self.parameter, self.first(number)
        return local_part(parameter).detach()[first : first + self.length(number)]

    def parts(self, numbers: Sequence[int]) -> list[str]:
        """This rank's parts of some tiles, by their names among the pages."""
        assert self._pages is not None
        row = self.columns * self.parameter.itemsize
        starts = [self.first(number) * row for number in numbers if _length(self.rows_of(number, self._rank))]
        return [self._pages.ahead([self._name], first)[0] for first in starts]

    def _gathered(self, number: int) -> Tensor:
        own = self.own(number).to(self.dtype)
        if self.shards == 1:
            return own
        if missing := self.length(number) - len(own):  # all ranks send as much
            own = torch.cat([own, own.new_zeros(missing, *self.shape[1:])])
        coming = torch.ops._c10d_functional.all_gather_into_tensor(own, self.shards, self._group)
        gathered: Tensor = torch.ops._c10d_functional.wait_tensor(coming)
        num_rows = sum(_length(self.rows_of(number, rank)) for rank in range(self.shards))
        return gathered[:num_rows]  # all that is missing is at the end: the first shards are full

    def _divide(self) -> None:
        """Keep this rank's shard, divided as FSDP2 would."""
        whole, several = self.parameter, self._mesh["replicate"].size() > 1
        own = part_of(slice(0, self.rows), self.shards, self._rank)
        shard = DTensor.from_local(
            torch.empty(_length(own), *self.shape[1:], dtype=whole.dtype, device="meta"),
            self._mesh if several else self._mesh["shard"],
            [Replicate(), Shard(0)] if several else [Shard(0)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        self.put(nn.Parameter(shard, requires_grad=whole.requires_grad))


class Tile:
    """Some rows of a weight, until the next ones are asked for."""

    def __init__(self, whole: TiledWeight, number: int, matrix: Tensor | None) -> None:
        self._whole, self._number = whole, number
        if matrix is not None:
            self.matrix = matrix
        """The rows, (rows, ...)."""

    @property
    def rows(self) -> list[slice]:
        """Which rows of the weight they are, in their order here."""
        return [self._whole.rows_of(self._number, rank) for rank in range(self._whole.shards)]

    def places_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Whether rows of the weight, int64 of any shape, are among them, and where (0 if not)."""
        shard, place = self._whole.place_of(rows)
        length = self._whole.length(self._number)
        place = place - self._whole.first(self._number)
        is_inside = (place >= 0) & (place < length)
        return is_inside, torch.where(is_inside, shard * length + place, 0)

    def room(self) -> Tensor:
        """Zeros for the gradient of its rows, fp32, (rows, ...); where shards are not full it has more rows at the
        end."""
        rows = self._whole.shards * self._whole.length(self._number)
        return torch.zeros(rows, *self._whole.shape[1:], device=self._whole.device)

    def add(self, gradient: Tensor) -> None:
        """Hand on a micro-batch's gradient, which was written into ``room``."""
        self._whole.add(self._number, gradient)


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)
