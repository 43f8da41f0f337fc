"""Which region of a whole tensor this rank holds.

torch's own answer (``compute_local_shape_and_global_offset``) is wrong where two axes cut one dimension and the sizes
do not divide: FSDP2 cuts into even parts what the tensor axis has left, and torch reckons with parts of the whole (with
torch 2.13 for 258 rows on 4 x 4 ranks, for instance).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

TENSOR = "tensor"
"""The axis of a mesh along which a part is never gathered for computing."""
Region = tuple[slice, ...]
"""Where a part lies in its tensor: one slice for every dimension."""


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the shard of a ``DTensor``, through which gradients reach it; else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def region_of(tensor: Tensor) -> tuple[Tensor, Region]:
    """This rank's memory of a tensor, and the region of the whole that it holds."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    cuts = [
        (placement, tensor.device_mesh.size(axis), coordinate[axis])
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard | _StridedShard)
    ]
    region = [slice(0, size) for size in tensor.shape]
    for placement, number, place in sorted(cuts, key=lambda cut: isinstance(cut[0], _StridedShard)):  # those cut last
        region[placement.dim] = part_of(region[placement.dim], number, place)
    return tensor.to_local().detach(), tuple(region)


@torch.no_grad()
def fill_local(tensor: Tensor, whole: Tensor) -> None:
    """Let this rank's memory of a tensor have its part of the ``whole``."""
    local, region = region_of(tensor)
    if local.numel():
        local.copy_(whole[region])


def cuts_of(tensor: Tensor, *, tensor_axis: bool) -> Iterator[tuple[int, int]]:
    """The axes of a tensor's mesh that cut it, each with the dimension: that of a tensor axis, or all others."""
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard | _StridedShard) and (names[axis : axis + 1] == (TENSOR,)) == tensor_axis:
                yield axis, placement.dim


def part_of(whole: slice, number: int, place: int) -> slice:
    """The part at ``place`` of ``number`` parts that are equal, except for the last ones that are not empty."""
    each = -(-(whole.stop - whole.start) // number)
    start = min(whole.stop, whole.start + place * each)
    return slice(start, min(whole.stop, start + each))
