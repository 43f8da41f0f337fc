"""Shards of parameters that rest in the host's memory or on disk, and come to the device for FSDP2 to gather.

FSDP2 asks what it is to gather for what it sends (its extension ``fsdp_pre_all_gather``), in the queue of the device in
which it sends that, before a block runs, forward or backward. What is asked here is a shard without memory, which
fetches its bytes then; FSDP2 gathers them in its own types and its own order, and reduces gradients as of any other
shard. So each worker's link carries its own part alone, and what is whole is whole on devices only.

    host      shard of block 1     shard of block 2               (of this rank; each worker has its own)
    lane      ────copied────┐      ────copied────┐
    FSDP2     gathers 0     └─ cast, gathers 1   └─ cast, gathers 2
    device    block 0 runs         block 1 runs         block 2 runs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tonnage.kernels.lanes import Lane
from tonnage.kernels.regions import region_of
from tonnage.offload.pages import Place
from tonnage.parallel.host_blocks import ON_DEVICE, own_parameters
from tonnage.parallel.parts import is_gathered, padded_shape, turned, with_local
from tonnage.parallel.rooms import Rooms
from tonnage.parallel.shelves import InMemory, OnDisk, aligned


class Elsewhere(Tensor):
    """A shard that rests elsewhere, as FSDP2 has it: with the rows that make all shards equal, and without memory."""

    fetch: Callable[[], Tensor]
    """Its bytes on the device, for what the caller does next."""

    @staticmethod
    def __new__(
        cls, size: torch.Size, dtype: torch.dtype, device: torch.device, fetch: Callable[[], Tensor]
    ) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        made.fetch = fetch
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Of its content nobody is told; the same shard by another shape is what FSDP2 keeps of it."""
        one = args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(one.shape, one.dtype, one.device, one.fetch)
        if func is torch.ops.aten.view.default:
            return cls(torch.empty(one.shape, device="meta").view(args[1]).shape, one.dtype, one.device, one.fetch)
        raise NotImplementedError(f"{func} of a shard that is not on the device")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What is sent, in the type in which it is gathered: whole numbers as they are."""
        found = self.fetch()
        return (found.to(mp_policy.param_dtype) if found.is_floating_point() else found,), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """What was gathered is the parameter."""
        (gathered,) = all_gather_outputs
        return None if out is not None else (gathered, (gathered,))


@dataclass
class _Part:
    """The shard of a parameter of a block."""

    owner: nn.Module
    name: str
    whole_name: str
    """In the model."""
    start: int
    """Its first byte in the block."""
    parameter: DTensor
    """As FSDP2 has it."""
    shape: torch.Size
    """Of this rank's rows."""
    padded: torch.Size
    """With those that make all shards equal."""

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.parameter.itemsize

    @property
    def end(self) -> int:
        return self.start + self.padded.numel() * self.parameter.itemsize

    def put(self, parameter: nn.Parameter) -> nn.Parameter:
        self.owner._parameters[self.name] = parameter
        return parameter


class HostShards:
    """This rank's shards of ``blocks``, in turns on ``device``: of what is trained or, unless it ``trains``, is frozen.

    To be made while they are on the meta device. ``rest`` gives them their memory, for whoever fills it, once all else
    has its own; ``begin`` lets them come and go.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Sequence[nn.Module],
        device: torch.device,
        *,
        trains: bool = True,
        directories: Sequence[Path] = (),
        stored: Mapping[str, Place] = MappingProxyType({}),
        lane: Callable[[torch.device], Lane] = Lane,
    ) -> None:
        """Take the memory, or space in ``directories`` if there are some, but for what is ``stored`` in files as it is
        on this rank; parameters that several modules of ``root`` share are left alone.

        Raises:
            UserError: so much of the host's memory cannot be locked, or there is not enough space.
        """
        self._blocks, self._device = blocks, device
        self._parts = _laid_out(root, blocks, trains)
        places = [
            {one.whole_name: (one.start, one.start + one.num_bytes) for one in parts if one.num_bytes}
            for parts in self._parts
        ]
        self.shelf: InMemory | OnDisk = InMemory(places, device, ON_DEVICE)
        if directories:
            self.shelf = OnDisk(places, device, directories, stored)
        self.rooms = Rooms(self.shelf, len(blocks), device, lane(device))
        self.parameters: list[Tensor] = [part.parameter for parts in self._parts for part in parts]
        """As the model has them, until they begin to come and go."""
        self._entering: int | None = None

    @property
    def copied_bytes(self) -> int:
        """To the device, so far."""
        return self.rooms.copied_bytes

    def rest(self) -> None:
        """Put them on the shelf."""
        self.parameters = [self._rested(part) for parts in self._parts for part in parts]

    def begin(self) -> None:
        """From now on they come to the device when FSDP2 gathers their block."""
        self.parameters.clear()
        self.rooms.open(max((part.end for parts in self._parts for part in parts), default=0))
        for number, (block, parts) in enumerate(zip(self._blocks, self._parts, strict=True)):
            for part in parts:
                fetch = partial(self._fetch, number, part)
                part.put(turned(part.parameter, Elsewhere(part.padded, part.parameter.dtype, self._device, fetch)))
            block.register_forward_pre_hook(partial(self._enter, number), prepend=True)
            block.register_forward_hook(partial(self._enter, None), always_call=True)

    def _enter(self, number: int | None, *_: Any) -> None:
        """A block is about to run forward, or none."""
        self._entering = number

    def _rested(self, part: _Part) -> nn.Parameter:
        memory = self.shelf.bytes_of(part.whole_name) if part.num_bytes else torch.empty(0, dtype=torch.uint8)
        return part.put(with_local(part.parameter, memory.view(part.parameter.dtype).view(part.shape)))

    def _fetch(self, number: int, part: _Part) -> Tensor:
        """The shard of a parameter on the device; the block that is gathered next is called meanwhile."""
        room = self.rooms.have(number)
        self.rooms.call(number + 1 if self._entering == number else number - 1, keeping=number)
        return room.memory[part.start : part.end].view(part.parameter.dtype).view(part.padded)


class KeptShard:
    """A shard that rests in the host's memory, and the copy of it that stays on the device."""

    def __init__(self, shard: Tensor, of_all: DTensor, device: torch.device, updates: Callable[[], int]) -> None:
        """``updates`` says how many there were: after each it is copied anew, when it is asked for."""
        self._shard, self._updates, self._update = shard, updates, -1
        self._copy = torch.zeros(padded_shape(of_all), dtype=shard.dtype, device=device)
        self.copied_bytes = 0
        """To the device, so far."""

    @torch.no_grad()
    def fetch(self) -> Tensor:
        """Its copy, for what the caller does next."""
        if self._update != (now := self._updates()):
            self._copy[: len(self._shard)].copy_(self._shard, non_blocking=True)
            self.copied_bytes += self._shard.nbytes
            self._update = now
        return self._copy


def _laid_out(root: nn.Module, blocks: Sequence[nn.Module], trains: bool) -> list[list[_Part]]:
    """The shards of every block that are trained, or that are not, one after another in its bytes, with room for what
    makes all equal."""
    names = {id(one): name for name, one in root.named_parameters()}
    found = []
    for block in own_parameters(blocks):
        parts = list[_Part]()
        for module, name, one in block:
            if is_gathered(one) and one.requires_grad == trains:
                assert isinstance(one, DTensor)
                start = aligned(parts[-1].end) if parts else 0
                shape = region_of(one)[0].shape
                parts.append(_Part(module, name, names[id(one)], start, one, shape, padded_shape(one)))
        found.append(parts)
    return found
