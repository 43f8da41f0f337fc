"""FSDP2's collectives on CPUs: gradients are summed in the memory in which it collects them, and workers of one machine
exchange through memory that they share.

By default a gradient is copied more often than that. Where a worker has all parameters, FSDP2 divides the collected
gradients by one into new memory and copies the result; where parameters are sharded, gloo copies what it reduces. On
CPUs such a copy takes longer than the sum itself, as its memory comes anew from the system in every step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from tonnage.parallel.shared_memory import SharedMemory, share_memory


def sums_in_place(mesh: DeviceMesh) -> bool:
    """Whether the workers of a mesh sum that way: those on CPUs."""
    return mesh.device_type == "cpu"


class CpuCollectives:
    """How units of FSDP2 gather and sum over the workers of a ``mesh`` of CPUs with one axis.

    ``is_whole``: whether each worker has all parameters of a unit; otherwise they are sharded.
    """

    def __init__(self, mesh: DeviceMesh, *, is_whole: bool) -> None:
        self._group, self._is_whole = mesh.get_group(), is_whole
        self._shared = share_memory(self._group) if mesh.size() > 1 else None

    def serve(self, module: FSDPModule) -> None:
        """Let a unit's collectives go this way."""
        module.set_custom_reduce_scatter(InPlace(self._shared, is_whole=self._is_whole))  # type: ignore[arg-type]
        if self._is_whole:
            module.set_all_reduce_hook(self._sum)
        elif self._shared is not None:
            module.set_custom_all_gather(Gathering(self._shared))  # type: ignore[arg-type]

    def _sum(self, gradients: Tensor) -> None:
        if self._shared is not None:
            self._shared.all_reduce(gradients)
        else:
            dist.all_reduce(gradients, group=self._group)


class Gathering:
    """torch's ``AllGather`` among workers of one machine."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of ``size`` numbers."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather into ``output_tensor``, of which ``input_tensor`` is this rank's part."""
        assert not async_op
        self._shared.all_gather(output_tensor, input_tensor)


class InPlace:
    """torch's ``ReduceScatter``. For each reduction FSDP2 asks it twice for memory: to collect gradients in, and then
    for this rank's part of their sum."""

    def __init__(self, shared: SharedMemory | None, *, is_whole: bool) -> None:
        self._shared, self._is_whole = shared, is_whole
        self._collected: Tensor | None = None

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of ``size`` numbers: new, or where this rank's part of a sum is all of it, the memory of the
        gradients."""
        if self._collected is not None:
            collected, self._collected = self._collected, None
            return collected
        memory = torch.empty(size, dtype=dtype, device=device)
        self._collected = memory if self._is_whole else None
        return memory

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Put this rank's part of the sum of ``input_tensor`` into ``output_tensor``. What gloo sums is overwritten,
        where it would copy it."""
        assert not async_op
        assert op == dist.ReduceOp.SUM
        if self._shared is not None:
            self._shared.reduce_scatter(output_tensor, input_tensor)
            return
        dist.all_reduce(input_tensor, op, group)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
