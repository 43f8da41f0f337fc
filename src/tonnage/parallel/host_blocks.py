"""Parameters of blocks that rest in the host's memory or on disk, and come to the device block by block.

They have a home (``homes``), and the device has slots for two blocks (``ring``). Nothing goes back: what is frozen does
not change, and what is trained is updated where it rests (``host_masters``). What workers share comes in shards, for
FSDP2 to gather; of what the tensor axis divides each rank has its part here, with which it computes.

A block that is not recomputed saves views of its weights for its backward pass. They are noted by their place in the
block, and found again where the block is then. While a parameter is elsewhere its memory must not be read: it holds no
number (NaN).
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
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tonnage.kernels.regions import region_of
from tonnage.kernels.streams import Stream
from tonnage.offload.pages import FileRange
from tonnage.offload.residency import BLOCKS
from tonnage.offload.ring import Ring
from tonnage.parallel.homes import Block, FileHome, HostHome, aligned
from tonnage.parallel.parts import before_backward, is_gathered, padded_shape, turned, with_local
from tonnage.parallel.tiled import TiledWeight

OF_WEIGHTS = 0.9
"""Part of a device's free memory that weights may take where nothing is trained; the rest is for what is computed, and
for keys and values."""
ON_DEVICE = "memory.parameter_tier=device"
"""What to change where the blocks of a model that is trained cannot be locked."""
ELSEWHERE = "a higher limit of locked memory (ulimit -l), or several GPUs"
"""The same where it only answers."""


def has_no_room(model: nn.Module, device: torch.device) -> bool:
    """Whether a GPU has no room for those parameters of a model, which is not trained, that are not on it yet. Memory
    that torch holds unused is free. Models with parameters of other classes (quantization by other libraries) always go
    there."""
    if device.type != "cuda" or any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
        return False
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    coming = [parameter for parameter in model.parameters() if parameter.device.type != device.type]
    return sum(parameter.numel() * parameter.itemsize for parameter in coming) > OF_WEIGHTS * free


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
class BlockParameter:
    """A parameter of a block, or this rank's part of it."""

    owner: nn.Module
    name: str
    whole_name: str
    """In the model."""
    start: int
    """Its first byte in the block."""
    parameter: nn.Parameter
    """As the model has it, or one like it without a content."""
    shape: torch.Size
    """Of this rank's part."""
    padded: torch.Size
    """With the rows that make all shards equal, if it is one."""

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.start + self.padded.numel() * self.dtype.itemsize

    def put(self, content: Tensor) -> nn.Parameter:
        """Put a new parameter, with this content, in its place."""
        parameter = with_local(self.parameter, content)
        self.owner._parameters[self.name] = parameter
        return parameter

    def turn_to(self, content: Tensor) -> None:
        """Let the same parameter have other content."""
        parameter = self.owner._parameters[self.name]
        assert parameter is not None
        if isinstance(parameter, DTensor):
            parameter._local_tensor = content
        else:
            parameter.data = content

    def seen_in(self, memory: Tensor) -> Tensor:
        """The parameter in the bytes of its block."""
        return memory[self.start : self.end].view(self.dtype).view(self.padded)


@dataclass(frozen=True)
class _Saved:
    """A weight that a block saved, or a view of one: where in which block it is."""

    number: int
    start: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class BlocksElsewhere:
    """Parameters of ``blocks`` that rest elsewhere, and come to ``device`` in turns.

    ``rest`` gives them their memory there, for whoever fills it.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        parts: Sequence[Sequence[BlockParameter]],
        device: torch.device,
        *,
        directories: Sequence[Path],
        stored: Mapping[str, FileRange],
        beside: Mapping[str, int] = MappingProxyType({}),
        otherwise: str = ON_DEVICE,
    ) -> None:
        """Take the memory, or space in ``directories`` if there are some, but for what is ``stored`` in files as it is;
        ``beside`` is as of ``FileHome``. ``otherwise`` is what to change where memory cannot be locked.

        Raises:
            UserError: so much of the host's memory cannot be locked, or there is not enough space.
        """
        self._blocks, self._parts, self._device = blocks, parts, device
        places = [
            {part.whole_name: (part.start, part.start + part.num_bytes) for part in block if part.num_bytes}
            for block in parts
        ]
        self.home: HostHome | FileHome = (
            FileHome(places, device, directories, stored, beside)
            if directories
            else HostHome(places, device, otherwise)
        )
        self.ring = Ring(self.home, Stream(device))
        self.updates: Callable[[], int] = int
        """Returns the number of updates so far: blocks that came before the last one are old."""
        self.await_block: Callable[[int], None] = lambda number: None
        """Waits until the last update of a block is made."""
        self.parameters: list[Tensor] = [part.parameter for block in parts for part in block]
        """As the model has them, until they begin to come and go."""

    @property
    def copied_bytes(self) -> int:
        """To the device, so far."""
        return self.home.copied_bytes

    @torch.no_grad()
    def rest(self) -> None:
        """Move the parameters to where they rest, with their values where they have some."""
        self.parameters = [self._rested(part) for several in self._parts for part in several]

    def _rested(self, part: BlockParameter) -> nn.Parameter:
        before = part.owner._parameters[part.name]
        memory = self.home.bytes_of(part.whole_name) if part.num_bytes else torch.empty(0, dtype=torch.uint8)
        content = memory.view(part.dtype).view(part.shape)
        if before is not None and not before.is_meta and not isinstance(before, DTensor):
            content.copy_(before)
        return part.put(content)

    def begin(self) -> None:
        """From now on parameters are on the device, while their block needs them."""
        self.parameters.clear()
        size = max((part.end for several in self._parts for part in several), default=0)
        number = min(BLOCKS.slots, len(self._blocks))
        self.ring.open(torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(number))

    def _have(self, number: int) -> Tensor:
        """The bytes of a block on the device, for what is done from now on."""
        return self.ring.have(self._updated(number))

    def _call(self, number: int, keeping: int) -> None:
        """Begin to bring a block to the device, if there is one of that number, and to read the one after it."""
        if 0 <= number < len(self._blocks):
            update = self.updates()
            self.ring.call(self._updated(number), (keeping, update), following=(2 * number - keeping, update))

    def _updated(self, number: int) -> Block:
        """A block as last updated."""
        block = number, self.updates()
        if block not in self.ring.here:
            self.await_block(number)
        return block


class HostBlocks(BlocksElsewhere):
    """Parameters as they are computed with: those that are frozen or, with ``trains``, all.

    Parameters that are on the meta device get memory, for whoever fills them; what others have is copied there.
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
        stored: Mapping[str, FileRange] = MappingProxyType({}),
        otherwise: str = ON_DEVICE,
        tiled: Sequence[TiledWeight] = (),
    ) -> None:
        """Take the memory, as ``BlocksElsewhere`` does, and put them there. Parameters that several modules of ``root``
        share, or that are gathered, are left alone. So is what comes in tiles (``tiled``), for which there is space in
        ``directories`` too.

        ``recomputed``: how many blocks, the first ones, save no weights, as they are computed again in the backward
        pass.
        """
        self._recomputed, self._trains = recomputed, trains
        self._useless: dict[torch.dtype, Tensor] = {}
        names = {id(parameter): name for name, parameter in root.named_parameters()}
        in_tiles = {names[id(weight.parameter)]: weight.parameter for weight in tiled}

        def takes(name: str, parameter: nn.Parameter) -> bool:
            return not is_gathered(parameter) and (trains or not parameter.requires_grad) and name not in in_tiles

        super().__init__(
            blocks,
            laid_out(root, blocks, takes),
            device,
            directories=directories,
            stored=stored,
            beside={name: parameter.numel() * parameter.itemsize for name, parameter in in_tiles.items()},
            otherwise=otherwise,
        )
        self.rest()
        self.ring.left, self.ring.came = self._leave, self._enter

    def begin(self) -> None:
        """From now on parameters are on the device, while their block runs."""
        super().begin()
        for parts in self._parts:
            for part in parts:
                part.put(self._nowhere(part))
        for number, block in enumerate(self._blocks):
            block.forward = partial(self._run, number, block.forward)

    def _run(self, number: int, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        self._have(number)
        following = number + 1
        if following == len(self._blocks) and not torch.is_grad_enabled() and not self._trains:
            following = 0  # of the next forward pass
        self._call(following, keeping=number)
        if number < self._recomputed or not torch.is_grad_enabled():
            output = forward(*inputs, **named)
        else:
            with saved_tensors_hooks(partial(self._save, number), self._restore):
                output = forward(*inputs, **named)
        before_backward(output, partial(self._before_backward, number))
        return output

    def _before_backward(self, number: int, gradient: Tensor) -> None:
        self._have(number)
        self._call(number - 1, keeping=number)

    def _save(self, number: int, saved: Tensor) -> Tensor | _Saved:
        memory = self.ring.here[self._updated(number)].memory
        if saved.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            return saved
        start = int(saved.storage_offset()) * saved.itemsize
        return _Saved(number, start, saved.dtype, saved.size(), saved.stride())

    def _restore(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        memory = self._have(saved.number)
        last = sum((size - 1) * stride for size, stride in zip(saved.size, saved.stride, strict=True))
        content = memory[saved.start : saved.start + (last + 1) * saved.dtype.itemsize].view(saved.dtype)
        return content.as_strided(saved.size, saved.stride, content.storage_offset())

    def _leave(self, block: Block) -> None:
        if all(number != block[0] for number, _ in self.ring.here):  # else a newer one is there
            for part in self._parts[block[0]]:
                part.turn_to(self._nowhere(part))

    def _enter(self, block: Block, memory: Tensor) -> None:
        for part in self._parts[block[0]]:
            part.turn_to(part.seen_in(memory))

    def _nowhere(self, part: BlockParameter) -> Tensor:
        """What a parameter is while its block is not on the device: a tensor of its shape without useful values."""
        if part.dtype not in self._useless:
            number = float("nan") if part.dtype.is_floating_point else 0
            self._useless[part.dtype] = torch.full((), number, dtype=part.dtype, device=self._device)
        return self._useless[part.dtype].expand(part.shape)


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
        """Allow what FSDP2 does to keep a shard: views of it. Nothing reads its content."""
        tensor = args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(tensor.shape, tensor.dtype, tensor.device, tensor.fetch)
        if func is torch.ops.aten.view.default:
            shape = torch.empty(tensor.shape, device="meta").view(args[1]).shape
            return cls(shape, tensor.dtype, tensor.device, tensor.fetch)
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
        """The shard to send, in the type in which it is gathered; integers stay as they are."""
        shard = self.fetch()
        return (shard.to(mp_policy.param_dtype) if shard.is_floating_point() else shard,), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The gathered tensor is the parameter."""
        (gathered,) = all_gather_outputs
        return None if out is not None else (gathered, (gathered,))


class HostShards(BlocksElsewhere):
    """This rank's shards of trained parameters or, unless it ``trains``, of frozen ones.

    FSDP2 asks what it is to gather for what it sends (its extension ``fsdp_pre_all_gather``), in the queue of the
    device in which it sends that, before a block runs, forward or backward. What is asked here is a shard without
    memory (``Elsewhere``), which fetches its bytes then; FSDP2 gathers them in its own types and its own order, and
    reduces gradients as of any other shard. So each worker's link carries its own part alone, and what is whole is
    whole on devices only.

        host      shard of block 1     shard of block 2               (of this rank; each worker has its own)
        stream    ────copied────┐      ────copied────┐
        FSDP2     gathers 0     └─ cast, gathers 1   └─ cast, gathers 2
        device    block 0 runs         block 1 runs         block 2 runs

    To be made while they are on the meta device. They are to ``rest`` once all else has its own memory.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Sequence[nn.Module],
        device: torch.device,
        *,
        trains: bool = True,
        directories: Sequence[Path] = (),
        stored: Mapping[str, FileRange] = MappingProxyType({}),
    ) -> None:
        """Take the memory, as ``BlocksElsewhere`` does; parameters that several modules of ``root`` share are left
        alone."""

        def takes(name: str, parameter: nn.Parameter) -> bool:
            return is_gathered(parameter) and parameter.requires_grad == trains

        parts = laid_out(root, blocks, takes)
        super().__init__(blocks, parts, device, directories=directories, stored=stored)
        self._entering: int | None = None

    def begin(self) -> None:
        """From now on they come to the device when FSDP2 gathers their block."""
        super().begin()
        for number, (block, parts) in enumerate(zip(self._blocks, self._parts, strict=True)):
            for part in parts:
                assert isinstance(part.parameter, DTensor)
                away = Elsewhere(part.padded, part.dtype, self._device, partial(self._fetch, number, part))
                part.owner._parameters[part.name] = turned(part.parameter, away)
            block.register_forward_pre_hook(partial(self._enter, number), prepend=True)
            block.register_forward_hook(partial(self._enter, None), always_call=True)

    def _enter(self, number: int | None, *_: Any) -> None:
        """Note which block is about to run forward; None when it has run."""
        self._entering = number

    def _fetch(self, number: int, part: BlockParameter) -> Tensor:
        """The shard of a parameter on the device. The block that is gathered next begins to come meanwhile."""
        memory = self._have(number)
        self._call(number + 1 if self._entering == number else number - 1, keeping=number)
        return part.seen_in(memory)


def laid_out(
    root: nn.Module, blocks: Sequence[nn.Module], takes: Callable[[str, nn.Parameter], bool]
) -> list[list[BlockParameter]]:
    """Lay out those parameters of every block that ``takes`` accepts and that no other module of the blocks has, one
    after another in the block's bytes; shards are padded to equal sizes."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    held = [
        [
            (module, name, parameter)
            for module in block.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        for block in blocks
    ]
    holders = Counter(id(parameter) for block in held for _, _, parameter in block)
    layout = []
    for block in held:
        parts = list[BlockParameter]()
        for module, name, parameter in block:
            if holders[id(parameter)] == 1 and takes(names[id(parameter)], parameter):
                start = aligned(parts[-1].end) if parts else 0
                shape = region_of(parameter)[0].shape
                padded = padded_shape(parameter) if isinstance(parameter, DTensor) and is_gathered(parameter) else shape
                like = (
                    parameter
                    if isinstance(parameter, DTensor)
                    else nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                )
                parts.append(BlockParameter(module, name, names[id(parameter)], start, like, shape, padded))
        layout.append(parts)
    return layout
