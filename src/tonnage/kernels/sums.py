"""Gradients of several micro-batches, summed in fp32 as they are computed (CPU).

Left to autograd a bf16 gradient is made anew in fp32, and then added: twice its memory, and for a large one pages that
are new each time. Whoever computes the gradient of a weight adds it here instead, piece by piece through the cache, and
hands autograd nothing. The sum is the same to the bit.
"""

from __future__ import annotations

from torch import Tensor

from tonnage.kernels.switches import is_on

PIECE = 1 << 19
"""Numbers that are converted at a time."""
SMALL = 8 * PIECE
"""Up to so many numbers nothing is gained: torch allocates at most 16 MB, which the heap keeps."""


def adds_up(weight: Tensor) -> bool:
    """Whether there is a sum of another type to which gradients of ``weight`` are added.

    There is none yet in a first micro-batch, and none where gradients leave or weights are sharded: autograd's hooks
    see those.
    """
    return is_on("sums") and _has_sum(weight)


def _has_sum(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not weight.is_leaf:
        return False
    return weight.grad is not None and weight.grad.dtype != weight.dtype


def add(total: Tensor, part: Tensor) -> None:
    """``total += part``, which may be of another data type; both are matrices.

    On a CPU torch would first make all of ``part`` anew in the type of the sum: twice the memory of a bf16 gradient,
    and, where that no longer fits a heap, five times as slow as piece by piece through the cache.
    """
    if total.device.type != "cpu" or total.dtype == part.dtype or part.numel() <= SMALL or not is_on("sums"):
        total += part
        return
    rows = max(1, PIECE // total.shape[1])
    piece = total.new_empty(min(rows, len(total)), total.shape[1])
    for summed, added in zip(total.split(rows), part.split(rows), strict=True):
        summed += piece[: len(added)].copy_(added)


def handed_over(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """The micro-batch's gradient of ``weight`` to return to autograd: None if it is added up here."""
    if not adds_up(weight):
        return gradient
    assert weight.grad is not None
    add(weight.grad, gradient)
    return None
