"""A linear layer with a low-rank addition: ``x W' + b + factor (x A') B'``, of which only A and B are trained.

The layer and its addition are one operation. Its output exists once, the addition is added where the layer's product
lies, and what is kept for the backward pass is the input and ``x A'``, a few numbers a token. Of the frozen weight's
backward pass only the product that carries the gradient down is computed.

With a mask (``dropout``) the addition is ``factor / kept (drop(x) A') B'``. Inputs are dropped from piece by piece, and
again for the backward pass: ``dropout.PIECE`` numbers of them exist twice at a time, and no mask is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tonnage.kernels.dropout import PIECE, Mask, drop_
from tonnage.kernels.products import goes_through_fp32, product
from tonnage.kernels.quantized import PackedWeight
from tonnage.kernels.quantized_products import quantized_linear
from tonnage.kernels.sums import handed_over


def adapted_linear(
    inputs: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    factor: float,
    mask: Mask | None = None,
) -> Tensor:
    """``F.linear(inputs, weight, bias) + factor * F.linear(F.linear(inputs, down), up)``, in the type of ``inputs``.

    Shapes: ``inputs`` (..., in), ``weight`` (out, in), ``bias`` (out,), ``down`` (rank, in), ``up`` (out, rank), all of
    one type; the weight may be packed instead. It and ``bias`` get no gradient. ``mask`` says which inputs of the
    addition are dropped, with a key for each of their rows; what is left is divided by the share that is kept.
    """
    frozen: tuple[Any, ...] = (weight, None, None, None, None)
    if isinstance(weight, PackedWeight):
        frozen = (weight.codes, weight.scales, weight.outer, weight.mean, weight.form)
    rows = inputs.reshape(-1, inputs.shape[-1])
    drops = (factor, None, None, 0, 0) if mask is None else (factor / mask.kept_share, *mask)
    output: Tensor = _AdaptedLinear.apply(rows, *frozen, bias, down, up, *drops)  # type: ignore[no-untyped-call]
    return output.view(*inputs.shape[:-1], len(up))  # here: a view that a Function returns takes no addition


def mask_of(keys: Tensor | None, salt: Tensor | None, first: int, threshold: int) -> Mask | None:
    return None if keys is None or salt is None else Mask(keys, salt, first, threshold)


class _AdaptedLinear(torch.autograd.Function):
    """``_multiply`` and its gradients. Where there is a ``form``, ``weight`` is the codes of a packed one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *given: Any) -> Tensor:
        weight, scales, outer, mean, form, _, down, up, factor, keys, salt, first_channel, threshold = given
        output, low = _multiply(rows, *given)
        ctx.save_for_backward(rows, low, down, up, keys, salt, weight, scales, outer, mean)
        ctx.form, ctx.factor, ctx.drops = form, factor, (first_channel, threshold)
        assert isinstance(output, Tensor)
        return output

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, down, up, keys, salt, *frozen = ctx.saved_tensors
        of_inputs = None
        if ctx.needs_input_grad[0]:
            if ctx.form is None:
                of_inputs = product(slopes, frozen[0])
            else:
                of_inputs = quantized_linear(slopes.contiguous(), *frozen, None, ctx.form, rows.shape[1], True)
        mask = mask_of(keys, salt, *ctx.drops)
        of_inputs, of_down, of_up = through_addition(slopes, of_inputs, rows, low, down, up, ctx.factor, mask)
        return (of_inputs, *[None] * 6, of_down, of_up, *[None] * 5)


def through_addition(
    slopes: Tensor,
    of_inputs: Tensor | None,
    rows: Tensor,
    low: Tensor,
    down: Tensor,
    up: Tensor,
    factor: float,
    mask: Mask | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the inputs, of ``down`` and of ``up`` for ``slopes``, the gradient of a layer's output.

    ``of_inputs``, through the layer's weight, is added to in place where there is one.
    """
    of_up = handed_over(up, product(low.t(), slopes).mul_(factor).t().contiguous())  # the other way round is slower
    of_low = product(slopes, up).mul_(factor)
    if mask is None:
        of_down = handed_over(down, product(of_low.t(), rows))
        if of_inputs is not None:
            _add_product(of_inputs, of_low, down)
    else:
        of_down = handed_over(down, _through_dropped(of_low, rows, *mask))
        if of_inputs is not None:
            _add_dropped(of_inputs, of_low, down, *mask)
    return of_inputs, of_down, of_up


def low_of(rows: Tensor, down: Tensor, mask: Mask | None) -> Tensor:
    """``drop(rows) @ down'``, (rows, rank)."""
    if mask is None:
        return product(rows, down.t())
    low = rows.new_empty(len(rows), len(down))
    for some, piece, those in _pieces(rows, mask):
        product(drop_(piece.copy_(rows[some]), those), down.t(), out=low[some])
    return low


def _pieces(rows: Tensor, mask: Mask) -> Iterator[tuple[slice, Tensor, Mask]]:
    """Which rows are dropped from at a time, memory for as many, and their part of the mask."""
    number = max(1, PIECE // max(1, rows.shape[1]))
    memory = rows.new_empty(min(number, len(rows)), rows.shape[1])
    for start in range(0, len(rows), number):
        some = slice(start, min(start + number, len(rows)))
        yield some, memory[: some.stop - start], mask.of_rows(some)


@torch.library.custom_op("tonnage::through_dropped", mutates_args=())
def _through_dropped(of_low: Tensor, rows: Tensor, keys: Tensor, salt: Tensor, first: int, threshold: int) -> Tensor:
    """``of_low' @ drop(rows)``, (rank, in), pieces of it added up in fp32."""
    total = torch.zeros(of_low.shape[1], rows.shape[1], dtype=torch.float32, device=rows.device)
    for some, piece, those in _pieces(rows, Mask(keys, salt, first, threshold)):
        drop_(piece.copy_(rows[some]), those)
        total += product(of_low[some].t(), piece)
    return total.to(rows.dtype)


@_through_dropped.register_fake
def _(of_low: Tensor, rows: Tensor, keys: Tensor, salt: Tensor, first: int, threshold: int) -> Tensor:
    return rows.new_empty(of_low.shape[1], rows.shape[1])


@register_flop_formula(torch.ops.tonnage.through_dropped)
def _(of_low: torch.Size, rows: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * of_low[0] * of_low[1] * rows[1]


@torch.library.custom_op("tonnage::add_product", mutates_args=("of_inputs",))
def _add_product(of_inputs: Tensor, of_low: Tensor, down: Tensor) -> None:
    """``of_inputs += of_low @ down``. As one of torch's, ``torch.compile`` would have it add to a copy."""
    add_to(of_inputs, of_low, down, 1.0)


@torch.library.custom_op("tonnage::add_dropped", mutates_args=("of_inputs",))
def _add_dropped(
    of_inputs: Tensor, of_low: Tensor, down: Tensor, keys: Tensor, salt: Tensor, first: int, threshold: int
) -> None:
    """``of_inputs += drop(of_low @ down)``."""
    for some, piece, those in _pieces(of_inputs, Mask(keys, salt, first, threshold)):
        of_inputs[some] += drop_(product(of_low[some], down, out=piece), those)


@register_flop_formula([torch.ops.tonnage.add_product, torch.ops.tonnage.add_dropped])
def _(of_inputs: torch.Size, of_low: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * of_low[0] * of_low[1] * of_inputs[1]


@torch.library.custom_op("tonnage::adapted_linear", mutates_args=())
def _multiply(
    rows: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    outer: Tensor | None,
    mean: Tensor | None,
    form: str | None,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    factor: float,
    keys: Tensor | None,
    salt: Tensor | None,
    first_channel: int,
    threshold: int,
) -> tuple[Tensor, Tensor]:
    """The layer's output with its addition, (rows, out), and ``drop(rows) @ down'``, (rows, rank)."""
    if form is None:
        output = product(rows, weight.t(), bias=bias)
    else:
        output = quantized_linear(rows, weight, scales, outer, mean, bias, form, len(up), False)
    low = low_of(rows, down, mask_of(keys, salt, first_channel, threshold))
    add_to(output, low, up.t(), factor)
    return output, low


@_multiply.register_fake
def _(rows: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    down, up = given[6], given[7]
    return rows.new_empty(len(rows), len(up)), rows.new_empty(len(rows), len(down))


@register_flop_formula(torch.ops.tonnage.adapted_linear)
def _(rows: torch.Size, *given: Any, **__: Any) -> int:
    down, up = given[6], given[7]
    return int(2 * rows[0] * (up[0] * rows[1] + down[0] * down[1] + up[0] * up[1]))


def add_to(total: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    """``total += factor * left @ right``."""
    if goes_through_fp32(total):
        total.add_(product(left, right), alpha=factor)
    else:
        torch.addmm(total, left, right, alpha=factor, out=total)  # whose work is counted, as that of addmm_ is not
