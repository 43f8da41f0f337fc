"""Products with frozen weights of 4 and 8 bits, whose widened form is never there whole (CPU), nor kept.

The forward pass widens some rows of the weight, the backward pass some of its columns, into a buffer that stays in the
processor's cache, and multiplies with that before it widens the next: ``host.quantized.WORKING_NUMBERS`` are
held. Either way each number of the result is one sum, rounded once, as with the whole weight. Only the packed tensors
are kept for the backward pass, which widens them again: the weight has no gradient, so inputs are not kept at all.

On other devices, and where ``quantized`` is switched off, the whole weight is widened, forward and backward: on a
GPU by one kernel, else in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tonnage.host.quantized import part_length
from tonnage.kernels.grouped import groups_of, grown
from tonnage.kernels.products import product
from tonnage.kernels.quantized import PackedWeight, widen
from tonnage.kernels.switches import is_on


def linear(inputs: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``F.linear(inputs, unpack(packed, inputs.dtype), bias)``, differentiable in inputs and bias.

    Shapes: ``inputs`` (..., in) of bf16, fp16 or fp32, the weight (out, in), ``bias`` (out,) of the type of the inputs.
    Returns (..., out).

    Raises:
        ValueError: the weight is no matrix, or has rows of another length.
    """
    if len(packed.shape) != 2 or packed.shape[1] != inputs.shape[-1]:
        raise ValueError(f"inputs of {tuple(inputs.shape)} cannot be multiplied by a weight of {packed.shape}")
    rows = inputs.reshape(-1, inputs.shape[-1])
    output: Tensor = quantized_linear(rows, *_tensors(packed), bias, packed.form, packed.shape[0], False)
    return output.view(*inputs.shape[:-1], packed.shape[0])


def grouped_product(rows: Tensor, packed: PackedWeight, ends: Tensor, *, turned: bool = False) -> Tensor:
    """``rows[i] @ weights[group of i].T``, or ``turned`` ``rows[i] @ weights[group of i]``, differentiable in rows.

    As ``grouped.grouped_product``. Shapes: ``rows`` (rows, in), the weights (groups, out, in), ``turned`` (groups, in,
    out), ``ends`` int64 (groups,): where each group ends, ascending. Rows after the last end are in no group and give
    zeros. Returns (rows, out).

    Raises:
        ValueError: the weight has not three dimensions, or matrices of another size.
    """
    if len(packed.shape) != 3 or packed.shape[1 if turned else 2] != rows.shape[-1]:
        raise ValueError(f"rows of {tuple(rows.shape)} cannot be multiplied by weights of {packed.shape}")
    output: Tensor = quantized_grouped_product(rows, *_tensors(packed), ends, packed.form, list(packed.shape), turned)
    return output


def _tensors(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return packed.codes, packed.scales, packed.outer, packed.mean


@torch.library.custom_op("tonnage::quantized_linear", mutates_args=())
def quantized_linear(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    outer: Tensor | None,
    mean: Tensor | None,
    bias: Tensor | None,
    form: str,
    outputs: int,
    turned: bool,
) -> Tensor:
    """``rows @ weight.T + bias`` with a weight of ``outputs`` rows, or ``rows @ weight`` where ``turned``, of which
    ``outputs`` are the columns: the tensors are those of a ``PackedWeight``."""
    shape = (rows.shape[1], outputs) if turned else (outputs, rows.shape[1])
    packed = PackedWeight(form, shape, codes, scales, outer, mean)
    output = rows.new_empty(len(rows), outputs)
    _multiply(output, rows, packed, 0, shape, turned, bias)
    return output


@quantized_linear.register_fake
def _(rows: Tensor, *given: Any) -> Tensor:
    return rows.new_empty(rows.shape[0], given[6])


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, codes, scales, outer, mean, _, ctx.form, _, ctx.turned = inputs
    ctx.inputs = rows.shape[1]
    ctx.save_for_backward(codes, scales, outer, mean)


def _linear_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    for_rows = for_bias = None
    if ctx.needs_input_grad[0]:
        arguments = (*ctx.saved_tensors, None, ctx.form, ctx.inputs, not ctx.turned)
        for_rows = quantized_linear(gradient.contiguous(), *arguments)
    if ctx.needs_input_grad[5]:
        for_bias = gradient.sum(0)
    return for_rows, None, None, None, None, for_bias, None, None, None


quantized_linear.register_autograd(_linear_backward, setup_context=_keep_linear)


@torch.library.custom_op("tonnage::quantized_grouped_product", mutates_args=())
def quantized_grouped_product(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    outer: Tensor | None,
    mean: Tensor | None,
    ends: Tensor,
    form: str,
    shape: list[int],
    turned: bool,
) -> Tensor:
    """As ``grouped_product``; tensors and ``shape`` (groups, rows, columns) are those of a weight."""
    packed = PackedWeight(form, tuple(shape), codes, scales, outer, mean)
    _, high, wide = shape
    output = rows.new_empty(len(rows), wide if turned else high)
    end = 0
    for number, span in groups_of(ends):
        group, end = rows[span], span.stop
        if (more := grown(group)) is group:
            _multiply(output[span], group, packed, number * high, (high, wide), turned, None)
        else:
            whole = rows.new_empty(len(more), output.shape[1])
            _multiply(whole, more, packed, number * high, (high, wide), turned, None)
            output[span] = whole[: len(group)]
    output[end:] = 0
    return output


@quantized_grouped_product.register_fake
def _(rows: Tensor, *given: Any) -> Tensor:
    *_, shape, turned = given
    return rows.new_empty(rows.shape[0], shape[2] if turned else shape[1])


def _keep_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scales, outer, mean, ends, ctx.form, ctx.shape, ctx.turned = inputs
    ctx.save_for_backward(codes, scales, outer, mean, ends)


def _grouped_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    for_rows = None
    if ctx.needs_input_grad[0]:
        arguments = (*ctx.saved_tensors, ctx.form, ctx.shape, not ctx.turned)
        for_rows = quantized_grouped_product(gradient.contiguous(), *arguments)
    return (for_rows, *[None] * 8)


quantized_grouped_product.register_autograd(_grouped_backward, setup_context=_keep_grouped)


@register_flop_formula(torch.ops.tonnage.quantized_linear)
def _(rows: torch.Size, *given: Any, **__: Any) -> int:
    return 2 * rows[0] * rows[1] * int(given[6])


@register_flop_formula(torch.ops.tonnage.quantized_grouped_product)
def _(rows: torch.Size, *given: Any, **__: Any) -> int:
    _, high, wide = given[6]
    return 2 * rows[0] * int(high) * int(wide)


def _multiply(
    output: Tensor,
    rows: Tensor,
    packed: PackedWeight,
    row: int,
    shape: tuple[int, int],
    turned: bool,
    bias: Tensor | None,
) -> None:
    """Fill ``output`` with ``rows @ matrix.T + bias``, or ``rows @ matrix``, where the matrix begins at a row of a
    weight and has a ``shape``."""
    high, wide = shape
    others, number = (high, wide) if turned else (wide, high)
    by_parts = rows.device.type == "cpu" and is_on("quantized")
    step = part_length(others, number) if by_parts else number
    memory = rows.new_empty(others * step)
    for start in range(0, number, max(1, step)):
        part = slice(start, min(number, start + step))
        size = part.stop - part.start
        matrix = memory[: others * size].view((high, size) if turned else (size, wide))
        widen(packed, matrix, row + (0 if turned else part.start), part.start if turned else 0)
        target = output[:, part]
        product(rows, matrix if turned else matrix.t(), out=target, bias=None if bias is None else bias[part])
