"""Products of groups of rows with a matrix each: what the experts of a mixture compute (CPU).

The rows of one group lie side by side; an expert that no token chose has none. Where groups end is a tensor, so that a
model can be weighed on tensors without content: what is multiplied, kept and allocated depends on the number of rows
alone. Each group is one product of ``products``, as fast as this processor can. The gradient of an
expert that no token reached is zero, and where gradients of earlier micro-batches are added up (``sums``), only those
of experts that were reached are touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tonnage.kernels import sums
from tonnage.kernels.products import product, sizes_matter

EIGHTHS = 3
"""Groups grow to a multiple of an eighth (1 / 2 ** this) of the power of two below, where sizes matter."""
FEWEST = 8
"""Least step, in rows, by which groups grow there."""


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor, *, turned: bool = False) -> Tensor:
    """``rows[i] @ weights[group of i].T``, or with ``turned`` ``rows[i] @ weights[group of i]``, differentiable.

    Shapes: ``rows`` (rows, in), ``weights`` (groups, out, in), ``turned`` (groups, in, out), ``ends`` int64 (groups,):
    where each group ends, ascending. Rows after the last end are in no group and give zeros. Returns (rows, out).
    """
    output: Tensor = _GroupedProduct.apply(rows, weights, ends, turned)  # type: ignore[no-untyped-call]
    return output


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor, turned: bool) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        ctx.turned = turned
        output: Tensor = _multiply(rows, weights if turned else weights.transpose(1, 2), ends)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, ends = ctx.saved_tensors
        need_rows, need_weights, *_ = ctx.needs_input_grad
        gradient = gradient.contiguous()
        for_rows = for_weights = None
        if need_weights:
            pair = (rows, gradient) if ctx.turned else (gradient, rows)
            if sums.adds_up(weights):
                add_outer(weights.grad, *pair, ends)
            else:
                for_weights = _outer(*pair, ends)
        if need_rows:
            for_rows = _multiply(gradient, weights.transpose(1, 2) if ctx.turned else weights, ends)
        return for_rows, for_weights, None, None


@torch.library.custom_op("tonnage::grouped_product", mutates_args=())
def _multiply(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """``rows[i] @ matrices[group of i]``: (rows, in) and (groups, in, out) give (rows, out)."""
    output = rows.new_empty(len(rows), matrices.shape[2])
    end = 0
    for number, span in groups_of(ends):
        group, end = rows[span], span.stop
        if (larger := grown(group)) is group:
            product(group, matrices[number], out=output[span])
        else:
            output[span] = product(larger, matrices[number])[: len(group)]
    output[end:] = 0
    return output


@_multiply.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(rows), matrices.shape[2])


@torch.library.custom_op("tonnage::grouped_outer", mutates_args=())
def _outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The sums over each group's rows of ``left[i] x right[i]``: (rows, a) and (rows, b) give (groups, a, b)."""
    result = left.new_empty(len(ends), left.shape[1], right.shape[1])
    reached = 0
    for number, span in groups_of(ends):
        result[reached:number] = 0
        product(grown(left[span]).t(), grown(right[span]), out=result[number])
        reached = number + 1
    result[reached:] = 0
    return result


@_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(len(ends), left.shape[1], right.shape[1])


@torch.library.custom_op("tonnage::add_grouped_outer", mutates_args=("total",))
def add_outer(total: Tensor, left: Tensor, right: Tensor, ends: Tensor, starts: Tensor | None = None) -> None:
    """``total += outer(left, right, ends)``, each group's rounded to the type of ``left`` before; of some groups, which
    lie from ``starts`` to ``ends``, where these are given."""
    for number, span in groups_of(ends, starts):
        sums.add(total[number], product(grown(left[span]).t(), grown(right[span])))


@torch.library.custom_op("tonnage::grouped_product_into", mutates_args=("output",))
def multiply_into(output: Tensor, rows: Tensor, matrices: Tensor, starts: Tensor, ends: Tensor) -> None:
    """``output[i] = rows[i] @ matrices[group of i]`` for some groups, which lie from ``starts`` to ``ends``."""
    for number, span in groups_of(ends, starts):
        output[span] = product(grown(rows[span]), matrices[number])[: span.stop - span.start]


def groups_of(ends: Tensor, starts: Tensor | None = None) -> Iterator[tuple[int, slice]]:
    """Number and rows of each group that has any; without ``starts`` they follow each other."""
    lasts = ends.tolist()
    firsts = [0, *lasts] if starts is None else starts.tolist()
    for number, (start, end) in enumerate(zip(firsts, lasts, strict=False)):
        if end > start:
            yield number, slice(start, end)


def grown(rows: Tensor) -> Tensor:
    """Rows of a group, filled up with zeros to one of few sizes where each new size takes a compiler's time."""
    if not sizes_matter(rows.device, rows.dtype):
        return rows
    step = max(FEWEST, 1 << max(0, len(rows).bit_length() - 1 - EIGHTHS))
    more = -len(rows) % step
    return F.pad(rows, (0, 0, 0, more)) if more else rows


@register_flop_formula(torch.ops.tonnage.grouped_product)
def _(rows: torch.Size, matrices: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * matrices[1] * matrices[2]


@register_flop_formula(torch.ops.tonnage.grouped_outer)
def _(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


@register_flop_formula(torch.ops.tonnage.add_grouped_outer)
def _(total: torch.Size, left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]
