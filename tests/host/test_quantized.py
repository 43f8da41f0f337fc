"""What packed weights take, and where they may be cut, by hand."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from tonnage.host.quantized import WORKING_NUMBERS, Format, packed_tensors, part_length, rows_per_block

FORMATS: tuple[Format, ...] = get_args(Format)


def packed_bytes(shape: tuple[int, ...], form: Format) -> int:
    bytes_each = {"uint8": 1, "int8": 1, "float32": 4}
    return sum(bytes_each[dtype] * math.prod(size) for dtype, size in packed_tensors(shape, form).values())


def test_bytes_by_hand() -> None:
    assert packed_bytes((4096, 4096), "nf4") == 4096 * 4096 // 2 + 4 * 4096 * 64
    assert packed_bytes((4096, 4096), "nf4-double") == 4096 * 4096 // 2 + 4096 * 64 + 4 * 1024 + 4
    assert packed_bytes((4096, 4096), "int8") == 4096 * 4096 + 4 * 4096
    assert packed_bytes((5, 13), "nf4") == 33 + 2 * 4  # 65 numbers, of which the last has half a byte and a block
    assert packed_bytes((5, 13), "nf4-double") == 33 + 2 + 4 + 4
    assert packed_bytes((8, 48, 32), "int8") == 8 * 48 * 32 + 4 * 8 * 48


def test_a_number_takes_what_is_said_of_it() -> None:
    assert packed_bytes((4096, 4096), "nf4") / 4096**2 == 0.5625
    assert packed_bytes((4096, 4096), "nf4-double") / 4096**2 == pytest.approx(0.516, abs=1e-3)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((10, 64), 1), ((10, 576), 1), ((10, 96), 2), ((10, 40), 10), ((16, 40), 8), ((64, 13), 64), ((63, 13), 63)],
)
def test_a_group_of_rows_ends_where_a_block_does_or_is_all(shape: tuple[int, int], rows: int) -> None:
    assert rows_per_block(shape, "nf4") == rows_per_block(shape, "nf4-double") == rows
    assert rows_per_block(shape, "int8") == 1
    for form in FORMATS:
        groups = shape[0] // rows_per_block(shape, form)
        assert {packed_tensors(shape, form)[name][1][0] for name in ("codes", "scales")} == {groups}


@pytest.mark.parametrize(
    ("others", "number"), [(64, 64), (4096, 4096), (4096, 14336), (14336, 4096), (128256, 4096), (5000, 700)]
)
def test_parts_are_whole_blocks_within_the_bound(others: int, number: int) -> None:
    step = part_length(others, number)
    assert step == number or step % 64 == 0
    assert others * step <= max(WORKING_NUMBERS, 64 * max(others, number))
