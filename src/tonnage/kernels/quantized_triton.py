"""Weights of 4 and 8 bits widened by one kernel of a GPU (Triton): codes are read once, numbers written once.

Code times scale in fp32, rounded once, nothing fused: the bits of the twin in torch (``quantized``).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tonnage.host.locked import sent
from tonnage.host.quantized import BLOCK, OUTER_BLOCK
from tonnage.kernels.quantized import LEVELS, PackedWeight, book

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


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """What codes of four bits, and scales of eight, stand for."""
    return sent(torch.tensor(LEVELS), device), sent(book(), device)


def widen(packed: PackedWeight, out: Tensor, row: int, column: int) -> None:
    """As ``quantized.widen``; of 4 bits width, columns and the first column are even."""
    rows, columns = out.shape
    if not out.numel():
        return
    grid, place = (rows, triton.cdiv(columns, _NUMBERS)), (packed.shape[-1], row, column, columns)
    if packed.form == "int8":
        widen_rows[grid](out, packed.codes, packed.scales, *place, SIZE=_NUMBERS, enable_fp_fusion=False)
        return
    tables, double = _tables(out.device), packed.outer is not None
    tensors = packed.codes, packed.scales, *((packed.outer, packed.mean) if double else tables)
    options = {"DOUBLE": double, "PAIRS": _NUMBERS // 2}
    widen_pairs[grid](out, *tensors, *tables, *place, **options, enable_fp_fusion=False)
