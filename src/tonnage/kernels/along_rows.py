"""The gradient of a weight, ``left.T @ right`` summed along the rows of both, by tile registers: bf16 on CPUs with AMX.

Both operands lie the wrong way round for it: a library turns them as it multiplies, at half the rate of a layer's
other two products. Here they are laid out as tiles of 1 KB, which registers load as they are (``tile_registers``): of
``left`` columns become rows, and of both, neighbours along the depth become words. ``right`` is laid out once. Then
each thread takes blocks of the result, whose sums in fp32 stay in its cache, and for so many rows at a time lays out
the columns of ``left`` that the block needs. What is done is rounded to bf16, and stored or added to a sum in fp32.

The order of every sum is that of the rows, whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange, types
from numba.extending import overload
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tonnage.kernels.bits import narrow, wide
from tonnage.kernels.loops import inner, loop
from tonnage.kernels.scratch import kept_memory
from tonnage.kernels.threads import num_threads
from tonnage.kernels.tile_registers import AMX, SQUARE, begin_tiles, end_tiles, make_square
from tonnage.kernels.tiles import copy_across, copy_turned
from tonnage.kernels.vectors import LANES

_TILE = LANES * LANES
"""Words of a tile: 16 rows of 16."""
_DEEP = 8
"""Tiles along the depth that are multiplied at a time: of 256 rows. Two by two they fit the innermost cache."""
_ROWS, _COLUMNS = 256, 768
"""Of a block of the result, at most: its sums are 768 KB, its operands 512 KB at a time."""
LAID_OUT = 1 << 22
"""Numbers of the right operand that are laid out at a time, about: 8 MB."""

_set_square, _add_square = make_square(adds=False), make_square(adds=True)


def takes(left: Tensor, right: Tensor) -> bool:
    """Whether ``left.T @ right`` is computed here: matrices of bf16 whose rows lie in one piece, on such a CPU."""
    return AMX and all(
        tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16 and tensor.stride(1) == 1 and tensor.numel() > 0
        for tensor in (left, right)
    )


@inner
def _lay_out_tile(words, target, halves, source, step, turns):
    """A tile of 32 rows of 16 numbers, ``step`` apart."""
    if turns:
        copy_turned(words, target, halves, source, step)
    else:
        for line in range(LANES):
            copy_across(words, target + line * LANES, halves, source + 2 * line * step, source + (2 * line + 1) * step)


@inner
def _lay_out_rows(words, start, halves, place, rows, columns, turns, edge):
    """Up to 32 rows, ``place``: where the first begins, and how far they are apart. ``start``: of the tile of the first
    16 columns; those of the next come ``_DEEP`` tiles later. What fills up a square is zero."""
    source, step = place
    for tile in range((columns + SQUARE - 1) // SQUARE * 2):
        target, begin = start + tile * _DEEP * _TILE, source + tile * LANES
        num_columns = max(0, min(LANES, columns - tile * LANES))
        if rows == 2 * LANES and num_columns == LANES:
            _lay_out_tile(words, target, halves, begin, step, turns)
        else:
            edge[:] = 0
            for i in range(rows):
                for j in range(num_columns):
                    edge[i * LANES + j] = halves[begin + i * step + j]
            _lay_out_tile(words, target, edge, 0, LANES, turns)


@loop
def _lay_out(words, halves, rows, place, columns, threads):
    """Some columns of the right operand: for ``_DEEP`` tiles along the depth those of all columns, then the next."""
    tiles = (columns + SQUARE - 1) // SQUARE * 2
    for thread in prange(threads):
        edge = np.zeros(2 * LANES * LANES, np.uint16)
        for band in range(thread, (rows + 2 * LANES - 1) // (2 * LANES), threads):
            row = band * 2 * LANES
            begin, count = (place[0] + row * place[1], place[1]), min(2 * LANES, rows - row)
            start = (band // _DEEP * tiles * _DEEP + band % _DEEP) * _TILE
            _lay_out_rows(words, start, halves, begin, count, columns, False, edge)


def _bring(result: Any, row: Any, column: Any, count: Any, sums: Any, first: Any) -> Any:
    """Some sums of a row, rounded to bf16: added to a result in fp32, or stored."""
    raise NotImplementedError


@overload(_bring)
def _bring_by_type(result, row, column, count, sums, first):
    if isinstance(result.dtype, types.Float):

        def bring(result, row, column, count, sums, first):
            target = result[row, column : column + count]
            source = sums[first : first + count]
            for i in range(count):
                target[i] += wide(narrow(source[i]))
    else:

        def bring(result, row, column, count, sums, first):
            target = result[row, column : column + count]
            source = sums[first : first + count]
            for i in range(count):
                target[i] = narrow(source[i])

    return bring


@inner
def _multiply_band(sums, left, right, start, sizes, squares, is_first):
    """A block of so many rows and columns of what ``sizes[2]`` words along the depth add to it. Squares of sums, so
    many beside each other, lie in one piece each."""
    rows, columns, words = sizes
    steps = (LANES, _TILE, _DEEP * _TILE)
    for j in range(0, columns, SQUARE):
        of_right = start + j // LANES * _DEEP * _TILE
        for i in range(0, rows, SQUARE):
            of_left, at = i // LANES * _DEEP * _TILE, (i // SQUARE * squares + j // SQUARE) * SQUARE * SQUARE
            if is_first:
                _set_square(sums, at, SQUARE, left, of_left, steps, right, of_right, steps, words)
            else:
                _add_square(sums, at, SQUARE, left, of_left, steps, right, of_right, steps, words)


@loop
def _multiply(halves, place, right, depth, result, blocks, scratch):
    """``halves`` and ``place``: the left operand; ``right``: as it was laid out. ``blocks``: rows, columns."""
    num_rows, num_columns = result.shape
    tiles, high = (num_columns + SQUARE - 1) // SQUARE * 2, 2 * LANES
    bands, threads, squares = (depth + high - 1) // high, len(scratch), blocks[1] // SQUARE
    down, across = (num_rows + blocks[0] - 1) // blocks[0], (num_columns + blocks[1] - 1) // blocks[1]
    for thread in prange(threads):
        edge = np.zeros(high * LANES, np.uint16)
        sums, left = scratch[thread, : _ROWS * _COLUMNS], scratch[thread, _ROWS * _COLUMNS :].view(np.uint32)
        begin_tiles()
        for task in range(thread, down * across, threads):
            row, column = task // across * blocks[0], task % across * blocks[1]
            rows, columns = min(blocks[0], num_rows - row), min(blocks[1], num_columns - column)
            for band in range(0, bands, _DEEP):
                deep = min(_DEEP, bands - band)
                for number in range(deep):
                    first = (band + number) * high
                    begin = (place[0] + first * place[1] + row, place[1])
                    _lay_out_rows(left, number * _TILE, halves, begin, min(high, depth - first), rows, True, edge)
                start = (band * tiles + column // LANES * _DEEP) * _TILE
                _multiply_band(sums, left, right, start, (rows, columns, deep * LANES), squares, band == 0)
            for i in range(rows):
                for j in range(0, columns, SQUARE):
                    at = ((i // SQUARE * squares + j // SQUARE) * SQUARE + i % SQUARE) * SQUARE
                    _bring(result, row + i, column + j, min(SQUARE, columns - j), sums, at)
        end_tiles()


def _whole(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _block(rows: int, columns: int, threads: int) -> tuple[int, int]:
    """Rows and columns of a block, whole squares: as many blocks as threads can share evenly."""
    across = -(-columns // _COLUMNS)
    down = -(-rows // _ROWS)
    while down * across % threads and down * SQUARE < rows:
        down += 1
    return _whole(-(-rows // down), SQUARE), _whole(-(-columns // across), SQUARE)


def _flat(matrix: Tensor) -> np.ndarray:
    size = (matrix.shape[0] - 1) * matrix.stride(0) + matrix.shape[1]
    bits: np.ndarray = matrix.detach().as_strided((size,), (1,)).view(torch.uint16).numpy()
    return bits


def _fill(result: Tensor, left: Tensor, right: Tensor) -> None:
    depth, threads = len(left), num_threads()
    deep = _whole(depth, 2 * LANES * _DEEP)
    at_a_time = min(max(_COLUMNS, LAID_OUT // deep // SQUARE * SQUARE), _whole(right.shape[1], SQUARE))
    of_thread = _ROWS * _COLUMNS + _ROWS * LANES * _DEEP
    memory = kept_memory(4 * (deep * at_a_time // 2 + threads * of_thread)).view(np.float32)
    scratch, laid_out = (
        memory[: threads * of_thread].reshape(threads, -1),
        memory[threads * of_thread :].view(np.uint32),
    )
    whole = result.view(torch.uint16) if result.dtype == torch.bfloat16 else result
    for column in range(0, right.shape[1], at_a_time):
        columns = min(at_a_time, right.shape[1] - column)
        _lay_out(laid_out, _flat(right), depth, (column, right.stride(0)), columns, threads)
        part = whole[:, column : column + columns].numpy()
        blocks = _block(left.shape[1], columns, threads)
        _multiply(_flat(left), (0, left.stride(0)), laid_out, depth, part, blocks, scratch)


@torch.library.custom_op("tonnage::product_along_rows", mutates_args=())
def _product(left: Tensor, right: Tensor) -> Tensor:
    result = left.new_empty(left.shape[1], right.shape[1])
    _fill(result, left, right)
    return result


@_product.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[1], right.shape[1])


@torch.library.custom_op("tonnage::product_along_rows_into", mutates_args=("result",))
def _product_into(result: Tensor, left: Tensor, right: Tensor) -> None:
    _fill(result, left, right)


@register_flop_formula(torch.ops.tonnage.product_along_rows)
def _(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


@register_flop_formula(torch.ops.tonnage.product_along_rows_into)
def _(result: torch.Size, left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """``left.T @ right``, rounded once, of matrices that ``takes`` takes."""
    if out is None:
        result: Tensor = _product(left, right)
        return result
    _product_into(out, left, right)
    return out


def bring_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left.T @ right``, rounded once; ``total`` in fp32, its rows in one piece."""
    _product_into(total, left, right)
