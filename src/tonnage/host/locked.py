"""Memory of the host as tensors, locked for a GPU to copy by itself: in one piece, of exactly the size asked for.

torch's own pinned memory is rounded up to a power of two, which may be twice as much; what is small goes through that
(``sent``).
"""

from __future__ import annotations

import weakref
from contextlib import suppress

import torch
from torch import Tensor

from tonnage.errors import user_error
from tonnage.host.arena import arena
from tonnage.host.lockable import limit_in_words, raise_limit


def host_memory(num_bytes: int) -> Tensor:
    """Memory of a number of bytes, all zeros."""
    return torch.frombuffer(arena(num_bytes), dtype=torch.uint8) if num_bytes else torch.empty(0, dtype=torch.uint8)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on its way to ``device``, for which nobody waits: what uses it there comes after it."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def locked_for(key: str, num_bytes: int, device: torch.device, otherwise: str) -> Tensor:
    """``host_memory``, locked if ``device`` is a GPU, for the tier of a ``key``.

    Raises:
        UserError: so much cannot be locked; ``otherwise`` says what to change.
    """
    memory = host_memory(num_bytes)
    if device.type == "cuda":
        raise_limit()
    if device.type == "cuda" and (status := lock(memory)):
        raise user_error(
            where=key,
            found=f"CUDA error {status} when {num_bytes / 1e9:.2f} GB of host memory were to be locked for it",
            needed="so much memory of the host that may be locked (ulimit -l, and the limit of a container): here "
            f"ulimit -l has {limit_in_words()}",
            change=otherwise,
        )
    return memory


def lock(memory: Tensor) -> int:
    """Lock all of what ``host_memory`` gave, until nobody has it any more; returns CUDA's error, or 0.

    Memory that is not locked works as well: copies of it are slower, and wait for each other.
    """
    if not memory.numel():
        return 0
    memory.zero_()  # by all threads: page by page, as it is locked, takes far longer
    cudart, address = torch.cuda.cudart(), memory.data_ptr()
    status = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
    if status == 0:
        weakref.finalize(memory.untyped_storage(), cudart.cudaHostUnregister, address).atexit = False
    else:
        with suppress(RuntimeError, AssertionError):  # CUDA tells of it once more, to the next that starts anything
            torch.zeros(1, device="cuda")
    return status
