"""Optimizer state that rests in the host's memory and streams through a few buffers of the device at every step.

The state of all parameters, in the order in which a forward pass needs them, is cut into tiles (``tiles``). A step
copies tiles to the device ahead of their update, updates them there, by the rule that state on the device has (the same
bits come out), and copies them back behind it. Both directions and the update go on at once, in streams of their own
(``streams``). The first tiles come while gradients are still being computed (``prefetch``). Where the device has
room for some of the state, some tiles stay there, evenly spread.

In the host's memory every tensor of the state is whole, in one locked arena of exactly their size, so that a checkpoint
is written from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tonnage.kernels.moments import Codec
from tonnage.kernels.streams import Stream
from tonnage.offload.residency import OPTIMIZER
from tonnage.offload.ring import Home, Pairs, Ring
from tonnage.optim.tiers import StatePiece, StateTier, TrainedParameter
from tonnage.optim.tiles import PieceInTile, aligned, cut_up, end_of, lay_out, locked_tensors, staying, whole_streams


class _Tiles(Home[int]):
    """Tiles by their numbers, at home in tensors that are whole."""

    def __init__(self, whole: Mapping[str, Tensor], tiles: Sequence[Sequence[PieceInTile]]) -> None:
        self._whole, self._tiles = whole, tiles

    def pairs(self, unit: int, memory: Tensor) -> Pairs:
        self.copied_bytes += end_of(self._tiles[unit])
        for place in self._tiles[unit]:
            for name, part, values in place.parts(memory):
                yield self._whole[name].view(-1)[part], values


class StateOnHost(StateTier):
    """The host tier (``tiers.StateTier``)."""

    def __init__(
        self,
        trained: Sequence[TrainedParameter],
        codec: Codec,
        *,
        device: torch.device,
        log: Callable[[str], None] = lambda message: None,
        resident_bytes: int = 0,
    ) -> None:
        """Take the memory and begin with zeros. At most ``resident_bytes`` of the tiles stay on the device.

        Raises:
            UserError: so much of the host's memory cannot be locked.
        """
        otherwise = "memory.moments=int8, which takes less than half of it, or memory.optimizer_tier=device"
        self._whole = locked_tensors("memory.optimizer_tier", whole_streams(trained, codec), device, otherwise)
        self._tiles = lay_out(trained, codec, OPTIMIZER["host"].unit_bytes)
        largest = max(map(end_of, self._tiles), default=1)
        stay = staying(len(self._tiles), resident_bytes, largest)
        moving = min(OPTIMIZER["host"].slots, len(self._tiles) - len(stay))
        memory = torch.zeros((len(stay) + moving) * aligned(largest), dtype=torch.uint8, device=device)
        rooms = cut_up(memory, largest)
        self._resident = dict(zip(stay, rooms, strict=False))
        self._inward, self._work, self._outward = Stream(device), Stream(device), Stream(device)
        self._work.follow()  # the memory may have been another tensor's until now
        self._work.finish()
        self._ring = Ring(_Tiles(self._whole, self._tiles), self._inward, self._outward)
        self._ring.open(rooms[len(stay) :], self._work.mark())
        self._num_slots = moving
        log(
            f"optimizer state in host memory: {self.state_bytes / 1e9:.2f} GB in {len(self._tiles)} tiles, "
            f"{len(self._resident)} of them on the device as well, where all take {memory.nbytes / 1e6:.0f} MB"
        )

    def pieces(self, names: Sequence[str]) -> Iterator[StatePiece]:
        """See ``StateTier``. What is done with a piece is put into a stream of its own, for which ``settle`` waits."""
        chosen = PieceInTile.of(names, self._tiles)
        moving = [number for number in chosen if number not in self._resident]
        for number in self._ring.here.keys() - set(moving):
            self._ring.drop(number)
        self._inward.wait(self._outward.mark())
        self._work.follow()
        with self._work:
            for number, places in chosen.items():
                if number in self._resident:
                    yield from (place.over(self._resident[number]) for place in places)
                    continue
                self._bring(moving)
                memory = self._ring.have(moving.pop(0))
                yield from (place.over(memory) for place in places)
                self._ring.give(number, memory)

    def prefetch(self) -> None:
        self._inward.wait(self._outward.mark())
        self._bring([number for number in range(len(self._tiles)) if number not in self._resident])

    def settle(self) -> None:
        self._work.finish()

    def tensors(self) -> dict[str, Tensor]:
        """See ``StateTier``; not copies."""
        for number, memory in self._resident.items():
            with self._outward:
                self._ring.copy_out(self._ring.home.pairs(number, memory))
        self._outward.finish()
        return dict(self._whole)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        self._outward.finish()
        self._ring.forget()
        for name, own in self._whole.items():
            if tensors[name].data_ptr() != own.data_ptr():
                own.copy_(tensors[name])
        with self._work:
            for number, memory in self._resident.items():
                self._ring.copy_in(self._ring.home.pairs(number, memory))
        self._work.finish()

    @property
    def copied_bytes(self) -> int:
        """To the device and back, so far."""
        return self._ring.home.copied_bytes

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._whole.values())

    def _bring(self, coming: Sequence[int]) -> None:
        """Begin to copy the first of ``coming`` to the device, as many as there are slots for."""
        for number in coming[: self._num_slots]:
            self._ring.call(number)
