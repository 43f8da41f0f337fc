"""A linear layer with a low-rank addition: ``x W' + b + factor (x A') B'``, of which only A and B are trained.

The layer and its addition are one operation. Its output exists once, the addition is added where the layer's product
lies, and what is kept for the backward pass is the input and ``x A'``, a few numbers a token. Of the frozen weight's
backward pass only the product that carries the gradient down is computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tonnage.kernels.products import goes_through_fp32, product, product_in_fp32
from tonnage.kernels.quantized import PackedWeight
from tonnage.kernels.quantized_products import quantized_linear
from tonnage.kernels.sums import handed_over


def adapted_linear(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, factor: float
) -> Tensor:
    """``F.linear(inputs, weight, bias) + factor * F.linear(F.linear(inputs, down), up)``, in the type of ``inputs``.

    Shapes: ``inputs`` (..., in), ``weight`` (out, in), ``bias`` (out,), ``down`` (rank, in), ``up`` (out, rank), all of
    one type. ``weight`` and ``bias`` get no gradient.
    """
    output: Tensor = _AdaptedLinear.apply(inputs, weight, bias, down, up, factor)  # type: ignore[no-untyped-call]
    return output


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, factor: float
    ) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        output, low = _multiply(rows, weight, bias, down, up, factor)
        ctx.save_for_backward(rows, weight, low, down, up)
        ctx.factor, ctx.shape = factor, inputs.shape
        output = output.view(*inputs.shape[:-1], len(weight))
        assert isinstance(output, Tensor)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, low, down, up = ctx.saved_tensors
        slopes = gradient.reshape(-1, gradient.shape[-1])
        of_inputs = product(slopes, weight) if ctx.needs_input_grad[0] else None
        of_inputs, of_down, of_up = through_addition(slopes, of_inputs, rows, low, down, up, ctx.factor)
        return None if of_inputs is None else of_inputs.view(ctx.shape), None, None, of_down, of_up, None


def adapted_packed_linear(
    inputs: Tensor, packed: PackedWeight, bias: Tensor | None, down: Tensor, up: Tensor, factor: float
) -> Tensor:
    """As ``adapted_linear``, with a weight (out, in) that is packed."""
    parts = (packed.codes, packed.scales, packed.outer, packed.mean)
    output: Tensor = _AdaptedPackedLinear.apply(  # type: ignore[no-untyped-call]
        inputs, *parts, packed.form, packed.shape[0], packed.first, bias, down, up, factor
    )
    return output


class _AdaptedPackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        codes: Tensor,
        scales: Tensor,
        outer: Tensor | None,
        mean: Tensor | None,
        form: str,
        outputs: int,
        first: int,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        factor: float,
    ) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        output, low = _multiply_packed(rows, codes, scales, outer, mean, form, outputs, first, bias, down, up, factor)
        ctx.save_for_backward(rows, codes, scales, outer, mean, low, down, up)
        ctx.form, ctx.first, ctx.factor, ctx.shape = form, first, factor, inputs.shape
        output = output.view(*inputs.shape[:-1], outputs)
        assert isinstance(output, Tensor)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, codes, scales, outer, mean, low, down, up = ctx.saved_tensors
        slopes, of_inputs = gradient.reshape(-1, gradient.shape[-1]), None
        if ctx.needs_input_grad[0]:
            given = (codes, scales, outer, mean, None, ctx.form, rows.shape[1], ctx.first, True)
            of_inputs = quantized_linear(slopes.contiguous(), *given)
        of_inputs, of_down, of_up = through_addition(slopes, of_inputs, rows, low, down, up, ctx.factor)
        whole = None if of_inputs is None else of_inputs.view(ctx.shape)
        return (whole, *[None] * 8, of_down, of_up, None)


def through_addition(
    slopes: Tensor, of_inputs: Tensor | None, rows: Tensor, low: Tensor, down: Tensor, up: Tensor, factor: float
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the inputs, of ``down`` and of ``up`` for ``slopes``, the gradient of a layer's output.

    ``of_inputs``, through the layer's weight, is added to in place where there is one.
    """
    of_up = handed_over(up, product(slopes.t(), low).mul_(factor))
    of_low = product(slopes, up).mul_(factor)
    of_down = handed_over(down, product(of_low.t(), rows))
    if of_inputs is not None:
        _add(of_inputs, of_low, down, 1.0)
    return of_inputs, of_down, of_up


@torch.library.custom_op("tonnage::adapted_linear", mutates_args=())
def _multiply(
    rows: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    if goes_through_fp32(rows):
        output = product_in_fp32(rows, weight.t(), bias)
    else:
        output = F.linear(rows, weight, bias)
    low = product(rows, down.t())
    _add(output, low, up.t(), factor)
    return output, low


@_multiply.register_fake
def _(
    rows: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(len(rows), len(weight)), rows.new_empty(len(rows), len(down))


@register_flop_formula(torch.ops.tonnage.adapted_linear)
def _(rows: torch.Size, weight: torch.Size, bias: Any, down: torch.Size, up: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * (weight[0] * weight[1] + down[0] * down[1] + up[0] * up[1])


@torch.library.custom_op("tonnage::adapted_packed_linear", mutates_args=())
def _multiply_packed(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    outer: Tensor | None,
    mean: Tensor | None,
    form: str,
    outputs: int,
    first: int,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    factor: float,
) -> tuple[Tensor, Tensor]:
    output = quantized_linear(rows, codes, scales, outer, mean, bias, form, outputs, first, False)
    low = product(rows, down.t())
    _add(output, low, up.t(), factor)
    return output, low


@_multiply_packed.register_fake
def _(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    outer: Tensor | None,
    mean: Tensor | None,
    form: str,
    outputs: int,
    first: int,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    factor: float,
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(len(rows), outputs), rows.new_empty(len(rows), len(down))


@register_flop_formula(torch.ops.tonnage.adapted_packed_linear)
def _(rows: torch.Size, *given: Any, **__: Any) -> int:
    outputs, down, up = given[5], given[8], given[9]
    return int(2 * rows[0] * (outputs * rows[1] + down[0] * down[1] + up[0] * up[1]))


def _add(total: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    """``total += factor * left @ right``."""
    if goes_through_fp32(total):
        total.add_(product(left, right), alpha=factor)
    else:
        total.addmm_(left, right, alpha=factor)
