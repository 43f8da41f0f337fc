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

from tonnage.kernels.regions import TENSOR, cuts_of, part_of


def is_gathered(parameter: Tensor) -> bool:
    """Whether a parameter is a shard that FSDP2 gathers for computing."""
    return isinstance(parameter, DTensor) and set(parameter.device_mesh.mesh_dim_names or ()) != {TENSOR}


def padded_shape(parameter: DTensor) -> torch.Size:
    """The shape of a shard with the rows that make all equal, as FSDP2 sends it: all of this rank's part along the
    tensor axis."""
    mesh, shape = parameter.device_mesh, list(parameter.shape)
    for tensor_axis in (True, False):
        for axis, side in cuts_of(parameter, tensor_axis=tensor_axis):
            place = mesh.get_local_rank(axis) if tensor_axis else 0  # the first is largest
            mine = part_of(slice(0, shape[side]), mesh.size(axis), place)
            shape[side] = mine.stop - mine.start
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
