"""Weights of 4 and 8 bits widened by one kernel of a GPU (Triton): codes are read once, numbers written once.

Code times scale in fp32, rounded once, nothing fused: the bits of the twin in torch (``quantized``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tonnage.host.quantized import BLOCK, OUTER_BLOCK

_NUMBERS = 2048
"""Numbers of a row that a program writes."""
_BLOCK, _OUTER_BLOCK = tl.constexpr(BLOCK), tl.constexpr(OUTER_BLOCK)


@triton.jit
def widen_pairs(
    out,
    codes,
    scales,
    outer,
    mean,
    levels,
    book,
    width,
    row,
    column,
    columns,
    DOUBLE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    pairs = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    inside = 2 * pairs < columns
    place = ((row + line) * width + column) // 2 + pairs
    pair = tl.load(codes + place, inside, other=0)
    block = place // (_BLOCK // 2)
    if DOUBLE:
        inner = tl.load(book + tl.load(scales + block, inside, other=0).to(tl.int32))
        scale = inner * tl.load(outer + block // _OUTER_BLOCK, inside, other=0.0) + tl.load(mean)
    else:
        scale = tl.load(scales + block, inside, other=0.0)
    early = tl.load(levels + (pair >> 4).to(tl.int32)) * scale
    late = tl.load(levels + (pair & 15).to(tl.int32)) * scale
    at = tl.program_id(1) * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)
    tl.store(out + line * columns + at, tl.interleave(early, late).to(out.dtype.element_ty), at < columns)


@triton.jit
def widen_rows(out, codes, scales, width, row, column, columns, SIZE: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < columns
    code = tl.load(codes + (row + line) * width + column + at, inside, other=0).to(tl.float32)
    value = code * tl.load(scales + row + line) * 7.874015718698502e-3
    tl.store(out + line * columns + at, value.to(out.dtype.element_ty), inside)


def widen(
    out: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    tables: tuple[Tensor, Tensor] | None,
    place: tuple[int, int, int],
) -> None:
    """Fill ``out`` (rows, columns) with a part of a weight: ``tensors`` are those of a ``PackedWeight``, and ``tables``
    what its codes and scales stand for, of 4 bits. ``place``: numbers of a row of the weight, first row and first
    column of the part; of 4 bits all but the rows are even."""
    rows, columns = out.shape
    if not out.numel():
        return
    codes, scales, outer, mean = tensors
    grid = (rows, triton.cdiv(columns, _NUMBERS))
    if tables is None:
        widen_rows[grid](out, codes, scales, *place, columns, SIZE=_NUMBERS, enable_fp_fusion=False)
        return
    of_scales = tables if outer is None else (outer, mean)
    options = {"DOUBLE": outer is not None, "PAIRS": _NUMBERS // 2}
    widen_pairs[grid](out, codes, scales, *of_scales, *tables, *place, columns, **options, enable_fp_fusion=False)
