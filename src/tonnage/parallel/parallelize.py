"""The order in which a model is transformed before it has memory.

A model arrives on the meta device and leaves sharded, still without memory. Every technique is a setting here, and
the order is the same whatever the settings, because each needs what comes before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class Precision:
    """Data types of a run."""

    compute: torch.dtype
    """Of the forward and backward pass."""
    storage: torch.dtype
    """Of the parameters at rest. bf16 weights are the high half of their fp32 master; where parameters are sharded,
    the shard *is* the master, in fp32 (the same four bytes), and is gathered in the compute dtype."""

    @staticmethod
    def of(name: str, shard: int) -> Precision:
        """The data types of ``precision: name`` when parameters are sharded over ``shard`` ranks."""
        compute = {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
        return Precision(compute, compute if shard == 1 else torch.float32)


def parallelize(root: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision) -> None:
    """Transform ``root`` in place.

    Shard last: it wraps whatever the blocks have become. Blocks first, the root after them, so that the root unit holds
    only what no block does (embedding, final norm, head).
    """
    shard_parameters(root, blocks, mesh, precision)


def shard_parameters(root: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, precision: Precision) -> None:
    """Shard every parameter over the ``shard`` axis (FSDP2, ZeRO-3). An axis of size one applies nothing.

    Gradients are *summed* over ranks, in fp32: the loss of a micro-batch is already divided by the step's global
    number of supervised tokens, so an average would divide twice.
    """
    if mesh["shard"].size() == 1:
        return
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=torch.float32)
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh["shard"], mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
