"""Whether kernels in Triton's language can be used: on GPUs, where torch has brought Triton with it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def takes_triton(device: torch.device) -> bool:
    """Whether tensors of a device are for kernels in Triton. Those of no device (``meta``), by which a model is weighed
    for GPUs that may be elsewhere, are taken for a GPU's."""
    return device.type == "meta" or (device.type == "cuda" and has_triton())


@cache
def has_triton() -> bool:
    """Whether Triton is installed: torch for CUDA on Linux depends on it."""
    return find_spec("triton") is not None
