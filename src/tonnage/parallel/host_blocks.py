"""Parameters of blocks that rest in the host's memory or on disk, and come to the device block by block.

Where they lie is a shelf (``shelves``), and the device has ``rooms`` for two. Nothing goes back: what is frozen does
not change, and what is trained is updated where it rests (``host_masters``). What workers share comes in shards
(``host_shards``); of what the tensor axis divides each rank has its part here, with which it computes.

What a block that is not recomputed saves of its weights for its backward pass is noted by its place in the block, and
found again where the block is then. The memory of a parameter that is elsewhere is not to be read: it has no number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from tonnage.kernels.lanes import Lane
from tonnage.kernels.regions import region_of
from tonnage.offload.pages import Place
from tonnage.parallel.parts import is_gathered, with_local
from tonnage.parallel.rooms import Room, Rooms
from tonnage.parallel.shelves import InMemory, OnDisk, aligned
from tonnage.parallel.tiled import TiledWeight

OF_WEIGHTS = 0.9
"""Part of a device's free memory that weights may take where nothing is trained; the rest is for what is computed, and
for keys and values."""
ON_DEVICE = "memory.parameter_tier=device"
"""What to change where the blocks of a model that is trained cannot be locked."""
ELSEWHERE = "a higher limit of locked memory (ulimit -l), or several GPUs"
"""The same where it only answers."""


def has_no_room(model: nn.Module, device: torch.device) -> bool:
    """Whether a model that is not trained has no room on a GPU for what is not there yet. What torch holds and nobody
    uses is free. With parameters of a kind of their own, as those of other libraries' quantization, it goes there."""
    if device.type != "cuda" or any(type(one) is not nn.Parameter for one in model.parameters()):
        return False
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    coming = [one for one in model.parameters() if one.device.type != device.type]
    return sum(one.numel() * one.itemsize for one in coming) > OF_WEIGHTS * free


def come_and_go(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> HostBlocks:
    """Let the parameters of a model's ``blocks`` rest in the host's memory, and all others lie on the device. It is not
    trained.

    Raises:
        UserError: so much of the host's memory cannot be locked.
    """
    model.requires_grad_(requires_grad=False)
    on_host = HostBlocks(model, blocks, device, recomputed=0, otherwise=ELSEWHERE)
    on_host.begin()
    model.to(device)
    return on_host


@dataclass
class _Part:
    """A parameter of a block, or this rank's part of it."""

    owner: nn.Module
    name: str
    whole_name: str
    """In the model."""
    start: int
    """Its first byte in the block."""
    shape: torch.Size
    dtype: torch.dtype
    is_trained: bool = False
    whole: DTensor | None = None
    """What it is a part of, if it is one."""

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def put(self, content: Tensor) -> nn.Parameter:
        """Let it be another one, with a content."""
        if self.whole is not None:
            parameter = with_local(self.whole, content)
        else:
            parameter = nn.Parameter(content, requires_grad=self.is_trained)
        self.owner._parameters[self.name] = parameter
        return parameter

    def turn_to(self, content: Tensor) -> None:
        """Let the same one have another content."""
        parameter = self.owner._parameters[self.name]
        assert parameter is not None
        if isinstance(parameter, DTensor):
            parameter._local_tensor = content
        else:
            parameter.data = content

    def seen_in(self, memory: Tensor) -> Tensor:
        """The parameter in the bytes of its block."""
        return memory[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class _Saved:
    """A weight that a block saved, or a view of one: where in which block it is."""

    number: int
    start: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class HostBlocks:
    """The parameters of ``blocks``, in turns on ``device``: those that are frozen or, with ``trains``, all.

    Parameters that are on the meta device get memory, for whoever fills them; what others have is copied there.
    ``begin`` lets them come and go.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Sequence[nn.Module],
        device: torch.device,
        *,
        recomputed: int,
        trains: bool = False,
        directories: Sequence[Path] = (),
        stored: Mapping[str, Place] = MappingProxyType({}),
        otherwise: str = ON_DEVICE,
        tiled: Sequence[TiledWeight] = (),
        lane: Callable[[torch.device], Lane] = Lane,
    ) -> None:
        """Take the memory, or space in ``directories`` if there are some, but for what is ``stored`` in files as it is;
        parameters that several modules of ``root`` share, or that are gathered, are left alone. So is what comes in
        tiles (``tiled``), for which there is space in ``directories`` too.

        ``recomputed``: how many blocks, the first ones, save no weights, as they are computed again in the backward
        pass. ``otherwise`` is what to change where memory cannot be locked.

        Raises:
            UserError: so much of the host's memory cannot be locked, or there is not enough space.
        """
        self._blocks, self._device, self._recomputed, self._trains = blocks, device, recomputed, trains
        self._useless: dict[torch.dtype, Tensor] = {}
        names = {id(one): name for name, one in root.named_parameters()}
        in_tiles = {names[id(one.parameter)]: one.parameter for one in tiled}
        self._parts = _laid_out(root, blocks, trains, in_tiles)
        places = [{one.whole_name: (one.start, one.start + one.num_bytes) for one in parts} for parts in self._parts]
        self.shelf: InMemory | OnDisk = InMemory(places, device, otherwise)
        if directories:
            beside = {name: one.numel() * one.itemsize for name, one in in_tiles.items()}
            self.shelf = OnDisk(places, device, directories, stored, beside)
        self.rooms = Rooms(self.shelf, len(blocks), device, lane(device))
        self.rooms.left, self.rooms.came = self._leave, self._enter
        self.parameters = [self._rested(part) for parts in self._parts for part in parts]
        """As they lie, until they begin to come and go."""

    def begin(self) -> None:
        """From now on parameters are on the device, while their block runs."""
        self.parameters.clear()
        largest = max((one.start + one.num_bytes for parts in self._parts for one in parts), default=0)
        self.rooms.open(largest)
        for parts in self._parts:
            for part in parts:
                part.put(self._nowhere(part))
        for number, block in enumerate(self._blocks):
            block.forward = partial(self._run, number, block.forward)

    @property
    def copied_bytes(self) -> int:
        """To the device, so far."""
        return self.rooms.copied_bytes

    @torch.no_grad()
    def _rested(self, part: _Part) -> nn.Parameter:
        """A parameter on the shelf."""
        before = part.owner._parameters[part.name]
        content = self.shelf.bytes_of(part.whole_name).view(part.dtype).view(part.shape)
        if before is not None and not before.is_meta:
            content.copy_(before)
        return part.put(content)

    def _run(self, number: int, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        self.rooms.have(number)
        following = number + 1
        if following == len(self._blocks) and not torch.is_grad_enabled() and not self._trains:
            following = 0  # of the next forward pass
        self.rooms.call(following, keeping=number)
        if number < self._recomputed or not torch.is_grad_enabled():
            output = forward(*inputs, **named)
        else:
            with saved_tensors_hooks(partial(self._save, number), self._restore):
                output = forward(*inputs, **named)
        first = output[0] if isinstance(output, (tuple, list)) else output
        if first.requires_grad:
            first.register_hook(partial(self._before_backward, number))
        return output

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        self.rooms.have(number)
        self.rooms.call(number - 1, keeping=number)

    def _save(self, number: int, saved: Tensor) -> Tensor | _Saved:
        room = self.rooms.of(number)
        assert room is not None
        if saved.untyped_storage().data_ptr() != room.memory.untyped_storage().data_ptr():
            return saved
        start = int(saved.storage_offset()) * saved.itemsize
        return _Saved(number, start, saved.dtype, saved.size(), saved.stride())

    def _restore(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        room = self.rooms.have(saved.number)
        last = sum((size - 1) * stride for size, stride in zip(saved.size, saved.stride, strict=True))
        content = room.memory[saved.start : saved.start + (last + 1) * saved.dtype.itemsize].view(saved.dtype)
        return content.as_strided(saved.size, saved.stride, content.storage_offset())

    def _leave(self, number: int) -> None:
        for part in self._parts[number]:
            part.turn_to(self._nowhere(part))

    def _enter(self, number: int, room: Room) -> None:
        for part in self._parts[number]:
            part.turn_to(part.seen_in(room.memory))

    def _nowhere(self, part: _Part) -> Tensor:
        """What a parameter is while its block is not on the device: of its shape, and of no use."""
        if part.dtype not in self._useless:
            number = float("nan") if part.dtype.is_floating_point else 0
            self._useless[part.dtype] = torch.full((), number, dtype=part.dtype, device=self._device)
        return self._useless[part.dtype].expand(part.shape)


def _laid_out(
    root: nn.Module, blocks: Sequence[nn.Module], trains: bool, others: Mapping[str, nn.Parameter]
) -> list[list[_Part]]:
    """The parameters of every block but ``others``, one after another in its bytes: what is trained too if it
    ``trains``."""
    names = {id(one): name for name, one in root.named_parameters()}
    found = []
    for block in own_parameters(blocks):
        parts, end = list[_Part](), 0
        for module, name, one in block:
            if is_gathered(one) or (one.requires_grad and not trains) or names[id(one)] in others:
                continue
            whole = one if isinstance(one, DTensor) else None
            shape = region_of(one)[0].shape
            parts.append(_Part(module, name, names[id(one)], end, shape, one.dtype, one.requires_grad, whole))
            end = aligned(end + parts[-1].num_bytes)
        found.append(parts)
    return found


def own_parameters(blocks: Sequence[nn.Module]) -> list[list[tuple[nn.Module, str, nn.Parameter]]]:
    """The parameters of every block that no other module of the blocks has: whose they are, and by which name."""
    held = [
        [
            (module, name, one)
            for module in block.modules()
            for name, one in module._parameters.items()
            if one is not None
        ]
        for block in blocks
    ]
    holders = Counter(id(one) for block in held for _, _, one in block)
    return [[(module, name, one) for module, name, one in block if holders[id(one)] == 1] for block in held]
