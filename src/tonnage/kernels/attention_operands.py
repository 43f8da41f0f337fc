"""How attention's loops on the CPU read numbers of bf16 or fp32, lay them out for products, and write them.

A tensor comes as a flat array and three numbers, in a tuple: the index of its first element, and the steps from token
to token and from head to head; the numbers of a head lie side by side. bf16 comes as bits.

Elements of an operand are fp32 numbers; or, of bf16 tensors on a processor that multiplies these (``tiles.PAIRS``),
words of two numbers that are neighbours along the depth of the product. numba decides which by the types that a
function is given: it compiles the function's overload, and the body in Python is never run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from tonnage.kernels.attention_tiles import TILE
from tonnage.kernels.bits import narrow, wide
from tonnage.kernels.loops import inner
from tonnage.kernels.tile_registers import AMX
from tonnage.kernels.tiles import BLOCK, PAIRS, copy_across, copy_beside, pair_across, pair_beside, pair_turned, turn
from tonnage.kernels.vectors import LANES

WIDTH = TILE + 16
"""Numbers from row to row of a matrix with a column for each key of a tile. Were they a multiple of 128 bytes apart,
columns would lie in few sets of a cache."""


def _number(stored: Any) -> Any:
    """The fp32 number that an element stands for."""
    raise NotImplementedError


@overload(_number, inline="always")
def _number_by_type(stored):  # numba compares signatures, annotations included
    if isinstance(stored, types.Float):
        return lambda stored: stored
    return lambda stored: wide(stored)


def _put(array: Any, index: Any, number: Any) -> None:
    """Store an fp32 number, rounded to the type of the array."""
    raise NotImplementedError


@overload(_put, inline="always")
def _put_by_type(array, index, number):
    if isinstance(array.dtype, types.Float):

        def put(array, index, number):
            array[index] = number
    else:

        def put(array, index, number):
            array[index] = narrow(number)

    return put


@inner
def up_to(number, multiple):
    return (number + multiple - 1) // multiple * multiple


@inner
def cut_off(memory, count):
    """So many elements of memory, and what is left. Both begin at a line of the cache, of 16 elements, if the memory
    does."""
    return memory[:count], memory[up_to(count, LANES) :]


def as_operand(stored: Any, memory: Any) -> Any:
    """fp32 memory as elements of operands that are made of such a stored number."""
    raise NotImplementedError


@overload(as_operand)
def _operand_by_type(stored, memory):
    if isinstance(stored, types.Float) or not PAIRS:
        return lambda stored, memory: memory
    return lambda stored, memory: memory.view(np.uint32)


def elements_of(operand: Any, numbers: Any) -> Any:
    """How many elements hold so many numbers."""
    raise NotImplementedError


@overload(elements_of)
def _elements_by_type(operand, numbers):
    if isinstance(operand.dtype, types.Float):
        return lambda operand, numbers: numbers
    return lambda operand, numbers: (numbers + 1) // 2


def read_rows(rows: Any, width: Any, tensor: Any, head: Any, token: Any, count: Any, size: Any) -> Any:
    """Tokens of a head become rows of a matrix, ``width`` apart; what fills up a block is zero."""
    raise NotImplementedError


@overload(read_rows)
def _read_by_type(rows, width, tensor, head, token, count, size):
    if isinstance(rows.dtype, types.Float):

        def read(rows, width, tensor, head, token, count, size):
            memory, place = tensor
            step, begin = place[1], place[0] + head * place[2] + token * place[1]
            for i in range(count):
                source, target = begin + i * step, i * width
                for j in range(size):
                    rows[np.uint64(target + j)] = _number(memory[np.uint64(source + j)])
            rows[count * width : up_to(count, BLOCK) * width] = 0
    else:

        def read(rows, width, tensor, head, token, count, size):
            memory, place = tensor
            step, begin = place[1], place[0] + head * place[2] + token * place[1]
            for i in range(count):
                source, target = begin + i * step, i * width
                for j in range(0, size - LANES + 1, LANES):
                    copy_beside(rows, target + j // 2, memory, source + j)
                for j in range(size // LANES * LANES, size, 2):
                    high = memory[source + j + 1] if j + 1 < size else np.uint16(0)
                    rows[target + j // 2] = _word(memory[source + j], high)
            rows[count * width : up_to(count, BLOCK) * width] = 0

    return read


@inner
def _word(low, high):
    return np.uint32(np.uint32(low) | np.uint32(np.uint32(high) << np.uint32(16)))


def read_right(rows: Any, width: Any, tensor: Any, head: Any, token: Any, count: Any, size: Any) -> Any:
    """The same, for the right operand of a product whose depth is the tokens."""
    raise NotImplementedError


@overload(read_right)
def _read_right_by_type(rows, width, tensor, head, token, count, size):
    if isinstance(rows.dtype, types.Float):
        return lambda rows, width, tensor, head, token, count, size: read_rows(
            rows, width, tensor, head, token, count, size
        )

    def read(rows, width, tensor, head, token, count, size):
        memory, place = tensor
        step, begin = place[1], place[0] + head * place[2] + token * place[1]
        for i in range(count // 2):
            source, target = begin + 2 * i * step, i * width
            for j in range(0, size - LANES + 1, LANES):
                copy_across(rows, target + j, memory, source + j, source + step + j)
            for j in range(size // LANES * LANES, size):
                rows[target + j] = _word(memory[source + j], memory[source + step + j])
        if count % 2:
            source, target = begin + (count - 1) * step, count // 2 * width
            for j in range(size):
                rows[np.uint64(target + j)] = memory[np.uint64(source + j)]
        rows[(count + 1) // 2 * width : up_to(count, BLOCK) // 2 * width] = 0

    return read


def rounded_rows(words: Any, numbers: Any, count: Any, columns: Any) -> Any:
    """So many rows of fp32 numbers, ``WIDTH`` apart, as a left operand: put into ``words``, or as they are if operands
    are fp32."""
    raise NotImplementedError


@overload(rounded_rows)
def _rounded_by_type(words, numbers, count, columns):
    if isinstance(words.dtype, types.Float):
        return lambda words, numbers, count, columns: numbers

    def rounded(words, numbers, count, columns):
        for row in range(count):
            for j in range(0, columns, 2 * LANES):
                low = row * WIDTH + j
                pair_beside(words, row * WIDTH + j // 2, numbers, low, low + LANES)
        return words

    return rounded


def rounded_columns(words: Any, numbers: Any, count: Any, columns: Any) -> Any:
    """The same, for a product that has a row for each column, and whose depth is the rows; with it the steps from row
    to row and from column to column of that operand, and its depth."""
    raise NotImplementedError


@overload(rounded_columns)
def _rounded_turned_by_type(words, numbers, count, columns):
    if isinstance(words.dtype, types.Float):
        return lambda words, numbers, count, columns: (numbers, 1, WIDTH, count)

    def turned(words, numbers, count, columns):
        numbers[count * WIDTH : BLOCK * WIDTH] = np.float32(0.0)
        for j in range(0, columns, LANES):
            pair_turned(words, j * LANES, numbers, j, WIDTH)
        return words, LANES, 1, BLOCK // 2

    def across(words, numbers, count, columns):
        if count % 2:
            numbers[count * WIDTH : count * WIDTH + columns] = np.float32(0.0)
        for row in range(0, count, 2):
            for j in range(0, columns, LANES):
                low = row * WIDTH + j
                pair_across(words, row // 2 * WIDTH + j, numbers, low, low + WIDTH)
        return words, 1, WIDTH, (count + 1) // 2

    return turned if AMX else across


@inner
def read_columns(turned, tensor, head, token, count, size, rows, deep):
    """Tokens of a head become columns of a matrix, for the right operand of a product whose depth is the head's size;
    ``rows`` has them as rows afterwards."""
    read_rows(rows, deep, tensor, head, token, count, size)
    turn(turned, WIDTH, rows, deep, up_to(count, BLOCK), up_to(elements_of(rows, size), 16))


@inner
def write_rows(tensor, head, token, count, size, rows, width, factor):
    """Tokens of a head from rows of fp32 numbers, ``width`` apart, times ``factor``."""
    memory, place = tensor
    step, begin = place[1], place[0] + head * place[2] + token * place[1]
    for i in range(count):
        target, source = begin + i * step, i * width
        for j in range(size):
            _put(memory, np.uint64(target + j), factor * rows[np.uint64(source + j)])


@inner
def add_to_rows(rows, width, tensor, head, token, count, size, factor):
    """Add tokens of a head to rows of fp32 numbers, ``width`` apart, after these were multiplied by ``factor``."""
    memory, place = tensor
    step, begin = place[1], place[0] + head * place[2] + token * place[1]
    for i in range(count):
        source, target = begin + i * step, i * width
        for j in range(size):
            at = np.uint64(target + j)
            rows[at] = factor * rows[at] + memory[np.uint64(source + j)]
