"""Sums of gradients over workers on CPUs, in the memory in which FSDP2 collects them.

Left alone, FSDP2 copies what a worker need not send twice more, to divide it by one, and gloo copies what it reduces.
On CPUs such a copy takes longer than the sum: most of it is memory that comes anew in every step.
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


def sum_in_place(module: FSDPModule, copies: DeviceMesh | None, *, is_whole: bool) -> None:
    """Let a unit of FSDP2 on CPUs sum its gradients where it collects them.

    ``is_whole``: whether a worker has all of its parameters, so that nothing is left of a sum. They are summed over
    ``copies``, unless that is None, whenever FSDP2 reduces.
    """
    module.set_custom_reduce_scatter(_InPlace(is_whole))  # type: ignore[arg-type]
    if copies is not None:
        group = copies.get_group()
        module.set_all_reduce_hook(lambda gradients: dist.all_reduce(gradients, group=group))


class _InPlace:
    """torch's ``ReduceScatter``. FSDP2 asks it for memory to collect gradients in, and for more, for this rank's part
    of their sum, before the next reduction begins."""

    def __init__(self, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._collected: Tensor | None = None

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for gradients, and the same again for their sum where that has all of them."""
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
        """What gloo does for a ``reduce_scatter_tensor``, but for its copy of the input."""
        assert not async_op
        dist.all_reduce(input_tensor, op, group)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
