"""Rows of an adapted weight with a length of their own (DoRA): ``m * (W + factor B A) / ||W + factor B A||``.

Each row of the sum of a frozen weight and its low-rank addition is scaled to the length that a trained vector ``m``
says (Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation"). As there (section 4.3) and in peft, the length by
which it is divided is taken as a constant: no gradient goes through it.

The sum is never made. What a layer computes with it is computed as without magnitudes (``adapted``), and every output
is multiplied by ``m`` over the length; and the square of the length is

    ||W||^2 + 2 factor <W, B A> + factor^2 ||B A||^2,    of each row

of which the first term never changes, the second is a product of W with as many rows as the rank, and the third needs
A and B alone. Lengths are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tonnage.kernels.products import linear
from tonnage.kernels.quantized import PackedWeight
from tonnage.kernels.quantized_products import linear as packed_linear


@torch.no_grad()
def lengths_of(weight: Tensor | PackedWeight, norms: Tensor, down: Tensor, up: Tensor, factor: float) -> Tensor:
    """The length of each row of ``weight + factor * up @ down``, fp32 (out,), without gradient.

    Shapes: ``weight`` (out, in), ``norms`` fp32 (out,), the lengths of its rows, ``down`` (rank, in), ``up`` (out,
    rank).
    """
    across = packed_linear(down, weight) if isinstance(weight, PackedWeight) else linear(down, weight, None)
    wide_down, wide_up = down.float(), up.float()
    mixed = (across.float().t() * wide_up).sum(1)
    own = ((wide_up @ (wide_down @ wide_down.t())) * wide_up).sum(1)
    squares = norms.square() + 2 * factor * mixed + factor**2 * own
    return squares.clamp_min_(torch.finfo(torch.float32).tiny).sqrt_()


def scaled(outputs: Tensor, magnitudes: Tensor, lengths: Tensor, bias: Tensor | None) -> Tensor:
    """``outputs * (magnitudes / lengths) + bias``, computed in fp32 and rounded to the type of ``outputs``.

    Shapes: ``outputs`` (..., out), ``magnitudes`` and ``lengths`` fp32 (out,), ``bias`` (out,). Of the last two nothing
    gets a gradient. ``outputs`` are kept for the backward pass.
    """
    result: Tensor = _Scaled.apply(outputs, magnitudes, lengths, bias)  # type: ignore[no-untyped-call]
    return result


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, magnitudes: Tensor, lengths: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(outputs, magnitudes, lengths)
        result = torch.mul(outputs, magnitudes.float() / lengths, out=torch.empty_like(outputs))
        return result if bias is None else result.add_(bias)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        outputs, magnitudes, lengths = ctx.saved_tensors
        of_outputs = torch.mul(slopes, magnitudes.float() / lengths, out=torch.empty_like(slopes))
        summed = torch.linalg.vecdot(slopes.float().flatten(0, -2), outputs.float().flatten(0, -2), dim=0)
        return of_outputs, (summed / lengths).to(magnitudes.dtype), None, None


def lengthened(summed: Tensor, magnitudes: Tensor) -> Tensor:
    """A matrix (out, in) whose rows have the lengths that ``magnitudes`` say, in fp32."""
    lengths = torch.linalg.vector_norm(summed.float(), dim=1, keepdim=True)
    longer: Tensor = summed.float() * (magnitudes.float().view(-1, 1) / lengths)
    return longer
