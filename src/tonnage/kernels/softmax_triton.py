"""Cross-entropy of logits and its gradient, in their own memory, as one kernel of a GPU (Triton).

A program takes a row. It goes over it once for the largest value and the sum of exponentials, by pieces, and once more
for the gradient: what it wrote last is what a GPU's cache has. Softmax and sums are fp32, and the gradient is rounded
once. What is not finite stays not finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE, _WARPS = 4096, 8
"""Logits of a row at a time, and 32 threads each that share them."""


@triton.jit
def softmax_rows(
    logits, targets, weights, losses, scale, SIZE: tl.constexpr, GRADIENT: tl.constexpr, PIECE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * SIZE
    places = tl.arange(0, PIECE)
    target, weight = tl.load(targets + row), tl.load(weights + row)
    picked = tl.load(logits + target).to(tl.float32) * scale
    largest, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, SIZE, PIECE):
        x = tl.load(logits + start + places, start + places < SIZE, other=float("-inf")).to(tl.float32) * scale
        before, largest = largest, tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(x - largest), 0)
    tl.store(losses + row, (tl.log(total) + (largest - picked)) * weight)
    if GRADIENT:
        factor = weight * scale
        each = factor / total
        for start in range(0, SIZE, PIECE):
            mask = start + places < SIZE
            x = tl.load(logits + start + places, mask, other=float("-inf")).to(tl.float32) * scale
            slope = tl.exp(x - largest) * each
            slope = tl.where(start + places == target, slope - factor, slope)
            tl.store(logits + start + places, slope.to(logits.dtype.element_ty), mask)


def softmax_loss(logits: Tensor, targets: Tensor, weights: Tensor, scale: float, gradient: bool) -> Tensor:
    """As ``softmax.softmax_loss``, of contiguous logits (rows, vocabulary) of any type."""
    rows, size = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        softmax_rows[(rows,)](
            logits,
            targets,
            weights.contiguous(),
            losses,
            float(scale),
            SIZE=size,
            GRADIENT=gradient,
            PIECE=min(_PIECE, triton.next_power_of_2(size)),
            num_warps=_WARPS,
        )
    return losses
