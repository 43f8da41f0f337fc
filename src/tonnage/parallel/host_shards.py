"""Shards of parameters that rest in the host's memory or on disk, and come to the device for FSDP2 to gather.

FSDP2 asks what it is to gather for what it sends (its extension ``fsdp_pre_all_gather``), in the queue of the device in
which it sends that, before a block runs, forward or backward. What is asked here is a shard without memory, which
fetches its bytes then; FSDP2 gathers them in its own types and its own order, and reduces gradients as of any other
shard. So each worker's link carries its own part alone, and what is whole is whole on devices only.

    host      shard of block 1     shard of block 2               (of this rank; each worker has its own)
    stream    ────copied────┐      ────copied────┐
    FSDP2     gathers 0     └─ cast, gathers 1   └─ cast, gathers 2
    device    block 0 runs         block 1 runs         block 2 runs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tonnage.kernels.streams import Stream
from tonnage.offload.pages import Place
from tonnage.parallel.host_blocks import BlocksElsewhere, Part, laid_out
from tonnage.parallel.parts import is_gathered, turned


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
        stored: Mapping[str, Place] = MappingProxyType({}),
        stream: Callable[[torch.device], Stream] = Stream,
    ) -> None:
        """Take the memory, as ``BlocksElsewhere`` does; parameters that several modules of ``root`` share are left
        alone."""

        def takes(name: str, parameter: nn.Parameter) -> bool:
            return is_gathered(parameter) and parameter.requires_grad == trains

        parts = laid_out(root, blocks, takes)
        super().__init__(blocks, parts, device, directories=directories, stored=stored, stream=stream)
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

    def _fetch(self, number: int, part: Part) -> Tensor:
        """The shard of a parameter on the device. The block that is gathered next begins to come meanwhile."""
        slot = self.ring.have(number)
        self._call(number + 1 if self._entering == number else number - 1, keeping=number)
        return part.seen_in(slot.memory)
