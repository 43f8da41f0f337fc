"""Sums of gradients over workers on CPUs, in the memory in which FSDP2 collects them.

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


def sums_in_place(mesh: DeviceMesh) -> bool:
    """Whether the workers of a mesh sum that way: those on CPUs."""
    return mesh.device_type == "cpu"


def sum_in_place(module: FSDPModule, copies: DeviceMesh | None) -> None:
    """Let a unit of FSDP2 on CPUs sum its gradients where it collects them.

    ``copies``: the workers to sum over where each has all parameters of the unit; None where they are sharded, and
    FSDP2 sums.
    """
    module.set_custom_reduce_scatter(InPlace(is_whole=copies is not None))  # type: ignore[arg-type]
    if copies is not None and copies.size() > 1:
        group = copies.get_group()
        module.set_all_reduce_hook(lambda gradients: dist.all_reduce(gradients, group=group))


class InPlace:
    """torch's ``ReduceScatter``. For each reduction FSDP2 asks it twice for memory: to collect gradients in, and then
    for this rank's part of their sum."""

    def __init__(self, *, is_whole: bool) -> None:
        self._is_whole = is_whole
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
        """Put this rank's part of the sum of ``input_tensor`` into ``output_tensor``, as gloo does, but without its
        copy of the input, which is overwritten."""
        assert not async_op
        dist.all_reduce(input_tensor, op, group)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
