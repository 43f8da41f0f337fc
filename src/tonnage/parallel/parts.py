"""A rank's part of a parameter that several ranks have: what kind of part it is, and another one in its place.

Along the tensor axis a rank computes with its part (``tensor``); along the others it holds a shard of that part, from
which FSDP2 gathers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from tonnage.kernels.regions import TENSOR, part_of


def is_gathered(parameter: Tensor) -> bool:
    """Whether a parameter is a shard that FSDP2 gathers for computing."""
    return isinstance(parameter, DTensor) and set(parameter.device_mesh.mesh_dim_names or ()) != {TENSOR}


def padded_shape(parameter: DTensor) -> torch.Size:
    """The shape of a shard with the rows that make all equal, as FSDP2 sends it: all of this rank's part along the
    tensor axis."""
    mesh, shape = parameter.device_mesh, list(parameter.shape)
    names, place = mesh.mesh_dim_names or (), mesh.get_coordinate()
    assert place is not None
    for axis in sorted(range(mesh.ndim), key=lambda axis: names[axis : axis + 1] != (TENSOR,)):
        placement, number = parameter.placements[axis], mesh.size(axis)
        if not isinstance(placement, Shard | _StridedShard):
            continue
        whole = slice(0, shape[placement.dim])
        mine = part_of(whole, number, place[axis] if names[axis : axis + 1] == (TENSOR,) else 0)  # the first is largest
        shape[placement.dim] = mine.stop - mine.start
    return torch.Size(shape)


def with_local(parameter: Tensor, local: Tensor) -> nn.Parameter:
    """A parameter like another one, divided as that is, whose part on this rank is ``local``, wherever that lies
    (``DTensor.from_local`` would copy it to the device of the mesh)."""
    whole = DTensor(local, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else local
    return nn.Parameter(whole, parameter.requires_grad)


def before_backward(output: Any, hook: Callable[[Tensor], None]) -> None:
    """Let ``hook`` run, with the gradient of a block's ``output``, before the block's backward pass."""
    first = output[0] if isinstance(output, (tuple, list)) else output
    if first.requires_grad:
        first.register_hook(hook)


def turned(parameter: DTensor, local: Tensor) -> nn.Parameter:
    """The same parameter object, which FSDP2 looks after, with another local part."""
    assert isinstance(parameter, nn.Parameter)
    torch.utils.swap_tensors(parameter, with_local(parameter, local))
    return parameter
