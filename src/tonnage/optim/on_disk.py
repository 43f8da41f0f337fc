"""Optimizer state that rests on disk and streams through a small ring of buffers at every step.

The state of all parameters, in the order in which a forward pass needs them, is cut into tiles (``tiles``), which are
read and written in large requests. A step reads tiles ahead, updates them with the same loops as state in memory (the
same bits come out), and writes them behind; what it holds in memory is the ring. Reading does not depend on the
gradients, so it may begin during the backward pass (``prefetch``). Where there is room for some of the state, some
tiles stay in memory, evenly spread, so that the disk is never without work for long.

The files have no name and vanish with the process: what a run goes on from is a checkpoint. For that, ``tensors``
streams the state into one more file of the same kind and hands it out mapped, so that a writer which goes from tensor
to tensor needs no memory for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tonnage.host.locked import host_memory
from tonnage.kernels.moments import Codec
from tonnage.kernels.threads import half_the_threads
from tonnage.offload.pages import Pages
from tonnage.offload.residency import OPTIMIZER
from tonnage.offload.store import StoreShape, TileStore
from tonnage.optim.tiers import StatePiece, StateTier, TrainedParameter
from tonnage.optim.tiles import PieceInTile, aligned, cut_up, end_of, lay_out, num_bytes, staying, whole_streams


class StateOnDisk(StateTier):
    """The disk tier (``tiers.StateTier``). Parameters must be on the CPU (``training.resting.check_tiers``)."""

    hands_out_copies = True

    def __init__(
        self,
        trained: Sequence[TrainedParameter],
        codec: Codec,
        *,
        directories: Sequence[Path],
        log: Callable[[str], None] = lambda message: None,
        resident_bytes: int = 0,
    ) -> None:
        """Reserve the space and begin with zeros. At most ``resident_bytes`` of the tiles stay in memory.

        Raises:
            UserError: not enough space for the state and one copy of it (``tensors``).
        """
        self._trained, self._codec, self._directory = trained, codec, directories[0]
        self._tiles = lay_out(trained, codec, OPTIMIZER["disk"].unit_bytes)
        largest = max((end_of(places) for places in self._tiles), default=1)
        stay = staying(len(self._tiles), resident_bytes, largest)
        self._resident = dict(zip(stay, cut_up(host_memory(len(stay) * aligned(largest)), largest), strict=True))
        self._streamed = [number for number in range(len(self._tiles)) if number not in self._resident]
        num_tiles = max(1, len(self._streamed))
        shape = StoreShape(largest, num_tiles, min(OPTIMIZER["disk"].slots, num_tiles))
        self._ahead = max(1, shape.num_buffers - 2)
        self.store = TileStore(directories, shape, log, spare_bytes=self.state_bytes)
        """The tiles that do not stay, on disk, and what was read and written of them."""
        log(
            f"optimizer state on disk: {self.state_bytes / 1e9:.2f} GB in {len(self._tiles)} tiles, "
            f"{len(self._resident)} of them in memory, which takes {self.host_bytes / 1e6:.0f} MB"
        )

    def pieces(self, names: Sequence[str]) -> Iterator[StatePiece]:
        """See ``StateTier``. Tiles without any of ``names`` are not touched."""
        with half_the_threads():
            for tile, places in self._visit(PieceInTile.of(names, self._tiles), changes=True):
                yield from (place.over(tile) for place in places)

    def prefetch(self) -> None:
        for index in range(min(self._ahead, len(self._streamed))):
            self.store.prefetch(index)

    def tensors(self) -> dict[str, Tensor]:
        """See ``StateTier``; a copy as of now, mapped from a file that vanishes with it.

        Raises:
            UserError: no space for the copy.
        """
        named = self._map_copy()
        for tile, places in self._visit(dict(enumerate(self._tiles)), changes=False):
            for place in places:
                for name, part, values in place.parts(tile):
                    named[name].view(-1)[part] = values
        return named

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        for tile, places in self._visit(dict(enumerate(self._tiles)), changes=True):
            for place in places:
                for name, part, values in place.parts(tile):
                    values.copy_(tensors[name].reshape(-1)[part])

    @property
    def state_bytes(self) -> int:
        return sum(map(num_bytes, whole_streams(self._trained, self._codec).values()))

    @property
    def host_bytes(self) -> int:
        """Memory that it takes: the ring of buffers, and what stays."""
        return self.store.shape.buffer_bytes + sum(tile.nbytes for tile in self._resident.values())

    @property
    def waited_seconds(self) -> float:
        return self.store.counters.waited_seconds

    def close(self) -> None:
        self.store.close()

    def _visit(
        self, chosen: Mapping[int, Sequence[PieceInTile]], *, changes: bool
    ) -> Iterator[tuple[Tensor, Sequence[PieceInTile]]]:
        """Tiles in ascending order, those on disk read ahead, each with the pieces that are ``chosen`` of it."""
        coming = [index for index, number in enumerate(self._streamed) if number in chosen]
        for number, places in chosen.items():
            index = bisect_left(self._streamed, number)
            start = bisect_left(coming, index)
            for later in coming[start : start + self._ahead]:
                self.store.prefetch(later)
            if number in self._resident:
                yield self._resident[number], places
            else:
                yield torch.frombuffer(self.store.fetch(index), dtype=torch.uint8), places
                self.store.store(index) if changes else self.store.drop(index)

    def _map_copy(self) -> dict[str, Tensor]:
        """Room for a copy of all state, in a file without a name."""
        forms = whole_streams(self._trained, self._codec)
        sizes = {name: size for name, form in forms.items() if (size := num_bytes(form))}
        pages = Pages(sizes, [self._directory], "a copy of the optimizer state")
        return {
            name: torch.frombuffer(pages.memory(name), dtype=dtype).view(shape)
            if name in pages
            else torch.empty(shape, dtype=dtype)
            for name, (dtype, shape) in forms.items()
        }
