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

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tonnage.kernels.moments import Codec
from tonnage.kernels.streams import Stream
from tonnage.offload.residency import OPTIMIZER
from tonnage.optim.tiers import Piece, Trained
from tonnage.optim.tiles import aligned, cut_up, end_of, lay_out, locked_tensors, staying, whole_streams


@dataclass
class _Buffer:
    """Room for a tile on the device."""

    memory: Tensor
    ready: Any
    """Mark after which the tile is there or, once it was copied back, another may come."""


class OnHost:
    """The host tier (``tiers.Tier``)."""

    hands_out_copies = False
    waited_seconds = 0.0

    def __init__(
        self,
        trained: Sequence[Trained],
        codec: Codec,
        *,
        device: torch.device,
        log: Callable[[str], None] = lambda message: None,
        tile_bytes: int | None = None,
        num_buffers: int | None = None,
        resident_bytes: int = 0,
        stream: Callable[[torch.device], Stream] = Stream,
    ) -> None:
        """Take the memory and begin with zeros. At most ``resident_bytes`` of the tiles stay on the device.

        Raises:
            UserError: so much of the host's memory cannot be locked.
        """
        otherwise = "memory.moments=int8, which takes less than half of it, or memory.optimizer_tier=device"
        self._whole = locked_tensors("memory.optimizer_tier", whole_streams(trained, codec), device, otherwise)
        self._tiles = lay_out(trained, codec, tile_bytes or OPTIMIZER["host"].unit_bytes)
        largest = max(map(end_of, self._tiles), default=1)
        stay = staying(len(self._tiles), resident_bytes, largest)
        moving = min(num_buffers or OPTIMIZER["host"].slots, len(self._tiles) - len(stay))
        memory = torch.zeros((len(stay) + moving) * aligned(largest), dtype=torch.uint8, device=device)
        rooms = cut_up(memory, largest)
        self._resident = dict(zip(stay, rooms, strict=False))
        self._inward, self._work, self._outward = stream(device), stream(device), stream(device)
        self._work.follow()  # the memory may have been another tensor's until now
        self._work.finish()
        self._free = deque(_Buffer(room, self._work.mark()) for room in rooms[len(stay) :])
        self._there: dict[int, _Buffer] = {}
        self.copied_bytes = 0
        """To the device and back, so far."""
        log(
            f"optimizer state in host memory: {self.state_bytes / 1e9:.2f} GB in {len(self._tiles)} tiles, "
            f"{len(self._resident)} of them on the device as well, where all take {memory.nbytes / 1e6:.0f} MB"
        )

    def pieces(self, names: Sequence[str]) -> Iterator[Piece]:
        """See ``Tier``. What is done with a piece is put into a stream of its own, for which ``settle`` waits."""
        selected_names = set(names)
        chosen = [
            n for n, places in enumerate(self._tiles) if any(place.trained.name in selected_names for place in places)
        ]
        moving = [number for number in chosen if number not in self._resident]
        self._let_go(set(self._there).difference(moving))
        self._inward.wait(self._outward.mark())
        self._work.follow()
        with self._work:
            for number in chosen:
                places = [place for place in self._tiles[number] if place.trained.name in selected_names]
                if number in self._resident:
                    yield from (place.over(self._resident[number]) for place in places)
                    continue
                self._bring(moving)
                buffer = self._there.pop(moving.pop(0))
                self._work.wait(buffer.ready)
                yield from (place.over(buffer.memory) for place in places)
                self._outward.wait(self._work.mark())
                with self._outward:
                    self._copy_back(number, buffer.memory)
                buffer.ready = self._outward.mark()
                self._free.append(buffer)

    def prefetch(self) -> None:
        """See ``Tier``."""
        self._inward.wait(self._outward.mark())
        self._bring([number for number in range(len(self._tiles)) if number not in self._resident])

    def settle(self) -> None:
        """See ``Tier``."""
        self._work.finish()

    def tensors(self) -> dict[str, Tensor]:
        """See ``Tier``; not copies."""
        for number, memory in self._resident.items():
            with self._outward:
                self._copy_back(number, memory)
        self._outward.finish()
        return dict(self._whole)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """See ``Tier``."""
        self._outward.finish()
        self._let_go(self._there)
        for name, own in self._whole.items():
            if tensors[name].data_ptr() != own.data_ptr():
                own.copy_(tensors[name])
        with self._work:
            for number, memory in self._resident.items():
                self._copy_in(number, memory)
        self._work.finish()

    @property
    def state_bytes(self) -> int:
        """See ``Tier``."""
        return sum(tensor.nbytes for tensor in self._whole.values())

    def _bring(self, coming: Sequence[int]) -> None:
        """Begin to copy the first of ``coming`` to the device, as many as there are buffers for."""
        for number in coming:
            if number in self._there:
                continue
            if not self._free:
                break
            buffer = self._free.popleft()
            self._inward.wait(buffer.ready)
            with self._inward:
                self._copy_in(number, buffer.memory)
            buffer.ready = self._inward.mark()
            self._there[number] = buffer

    def _let_go(self, numbers: Iterable[int]) -> None:
        """Free the buffers of tiles that came and are not needed; they are unchanged."""
        for number in list(numbers):
            self._free.append(self._there.pop(number))

    def _copy_in(self, number: int, memory: Tensor) -> None:
        self.copied_bytes += end_of(self._tiles[number])
        for place in self._tiles[number]:
            for name, part, values in place.parts(memory):
                values.copy_(self._whole[name].view(-1)[part], non_blocking=True)

    def _copy_back(self, number: int, memory: Tensor) -> None:
        self.copied_bytes += end_of(self._tiles[number])
        for place in self._tiles[number]:
            for name, part, values in place.parts(memory):
                self._whole[name].view(-1)[part].copy_(values, non_blocking=True)
