"""What tensors a frozen weight has in 4 or 8 bits, where it may be cut, and in what parts its products widen it.

=========== =================== ===================================================================================
format      bytes a number      what
=========== =================== ===================================================================================
nf4         1/2 + 4/64          codes of 4 bits, one fp32 scale for each ``BLOCK`` numbers
nf4-double  1/2 + 1/64 + ...    the same, its scales in 8 bits with one fp32 scale for each ``OUTER_BLOCK`` of them
int8        1 + 4 / row length  codes of 8 bits, one fp32 scale for each row
=========== =================== ===================================================================================

Weights of quantised checkpoints may stay in forms of their own, row by row (``host.stored_forms``).

Blocks follow each other along the flattened weight, as bitsandbytes has them, wherever its rows end. What is packed
lies in tensors whose dimension 0 counts *groups* of rows: the smallest number of rows that end where a block does, so
who shards along dimension 0, as ``fully_shard`` does, cuts no block. Nothing here imports torch:
``kernels.quantized`` allocates what it says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tonnage.host.stored_forms import stored_form

Format = str
"""``nf4``, ``nf4-double``, ``int8``, or the name of a stored form."""

BLOCK = 64
"""Numbers of 4 bits that share a scale."""
OUTER_BLOCK = 256
"""Scales of 8 bits that share one."""
WORKING_NUMBERS = 1 << 21
"""Numbers of a weight that are widened at a time for a product: 4 MB in bf16, which stay in a cache. Of rows or columns
so long that a part of ``BLOCK`` of them is more, that part; without the loops for CPUs, all of the weight."""


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """A weight's shape as that of a matrix: all dimensions but the last are rows."""
    return math.prod(shape[:-1]), shape[-1]


def rows_per_block(shape: Sequence[int], form: Format) -> int:
    """Rows in a group: a shard of a packed weight may start at multiples of it.

    One where rows are a multiple of ``BLOCK`` long, as in nearly every model, and in int8; 64 / gcd(64, length) rows
    for other lengths; all rows, so that nothing can be cut, where these do not divide the number of rows. The outer
    scales of nf4-double are one number for 16,384 of the weight and are not sharded: every shard has them whole.
    """
    rows, columns = rows_and_columns(shape)
    if form == "int8" or stored_form(form) is not None:
        return 1
    group = BLOCK // math.gcd(BLOCK, columns)
    return group if rows % group == 0 else max(1, rows)


def packed_tensors(shape: Sequence[int], form: Format) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor of a weight of ``shape`` in a format, by name.

    ``codes`` and ``scales`` have groups of rows along dimension 0; ``outer`` and ``mean`` are those of nf4-double.
    """
    rows, columns = rows_and_columns(shape)
    if (stored := stored_form(form)) is not None:
        return {
            name: ("uint8", (rows, size))
            for name, size in zip(("codes", "scales"), stored.row_bytes(columns), strict=True)
        }
    if form == "int8":
        return {"codes": ("int8", (rows, columns)), "scales": ("float32", (rows, 1))}
    each = rows_per_block(shape, form)
    groups, numbers = rows // each, each * columns
    blocks = -(-numbers // BLOCK)
    inner: dict[str, tuple[str, tuple[int, ...]]] = {
        "codes": ("uint8", (groups, -(-numbers // 2))),
        "scales": ("float32" if form == "nf4" else "uint8", (groups, blocks)),
    }
    if form == "nf4":
        return inner
    return inner | {"outer": ("float32", (-(-groups * blocks // OUTER_BLOCK),)), "mean": ("float32", ())}


def part_length(others: int, number: int) -> int:
    """How many of ``number`` rows of ``others`` numbers (or columns) are widened at a time: all, or a multiple of
    ``BLOCK`` in parts of about the same length."""
    if others * number <= WORKING_NUMBERS:
        return number
    most = max(1, WORKING_NUMBERS // (others * BLOCK))
    blocks = -(-number // BLOCK)
    return BLOCK * -(-blocks // -(-blocks // most))
