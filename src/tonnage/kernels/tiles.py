"""Products of small fp32 matrices within loops that numba compiles, at the rate of the processor.

A library's product is made for large matrices: it is called, divides its operands among threads, and lays them out
anew. The matrices of attention within a document are small, and are in a cache already. Here a tile of the result stays
in registers while it is summed up, which LLVM does not find by itself, so its instructions are written down: vectors of
sums, one or two of the right operand, and each number of the left one in all lanes of one more. A tile is as large as
the registers allow:

    AVX-512   32 registers of 16 numbers    8 rows x 32 columns    112 GFLOP/s of 115 that a core of an EPYC can
    others    16 registers of  8 numbers    6 rows x 16 columns     95 GFLOP/s of a core of an EPYC without AVX-512,
                                                                    23 with the tile above

A number is the sum of the same products in the same order, whatever the tile.

Operands are fp32, or where the processor multiplies these (``PAIRS``) words: uint32, each of two bf16 numbers that lie
side by side along the depth of the product, the first of them in the lower bits. A step of the loop then adds two
products to each sum, in fp32, at twice the rate. What is too small for a normal number is zero to such an instruction.
Where the processor has tile registers, these multiply words at many times that rate (``tile_registers``).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tonnage.host.processor import processor
from tonnage.kernels.loops import inner
from tonnage.kernels.tile_registers import AMX, SQUARE, features, make_square, tiles_take
from tonnage.kernels.vectors import LANES, VECTOR, everywhere, pointer_to, shuffled, vector_at

ROWS, COLUMNS, BLOCK = (8, 32, 32) if "avx512f" in processor()[1] else (6, 16, 48)
"""Of a tile; and how many rows or columns attention takes at a time, which are whole tiles. Smaller blocks compute less
that is hidden: rows of instructions took 1.5 times as long with 64 as with 32 (AVX-512)."""
PAIRS = AMX or ("+avx512bf16" in features() and "Intel" not in processor()[0])
"""Whether operands are words of two bf16 numbers: where these are multiplied faster than fp32 ones. Intel's processors
do so by tile registers alone; on the Xeon that was measured, vectors of words took 1.5 times as long as fp32 ones."""


_WORDS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


def _plus_product(builder: Any, number: Any, left: Any, right: Any, element: Any) -> Any:
    """Vectors of sums, and what the products of two operands of such elements add to them."""
    if element == types.float32:
        return builder.fadd(number, builder.fmul(left, right, flags=("contract",)), flags=("contract",))
    kind = ir.FunctionType(VECTOR, [VECTOR, _WORDS, _WORDS])
    instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(instruction, [number, builder.bitcast(left, _WORDS), builder.bitcast(right, _WORDS)])


def _make_tile(*, adds: bool) -> Any:
    @intrinsic
    def tile(typing, c, c0, c_row, a, a0, a_row, a_column, b, b0, b_row, depth):
        size = types.intp
        signature = types.void(c, size, size, a, size, size, size, b, size, size, size)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            c, c0, c_row, a, a0, a_row, a_column, b, b0, b_row, depth = arguments
            kinds = signature.args

            def at(base: Any, factor: Any, number: int, beside: int = 0) -> Any:
                moved = builder.add(base, builder.mul(factor, ir.Constant(base.type, number)))
                return builder.add(moved, ir.Constant(base.type, beside))

            columns = range(0, COLUMNS, LANES)
            places = [
                vector_at(context, builder, kinds[0], c, at(c0, c_row, row, column))
                for row in range(ROWS)
                for column in columns
            ]
            sums = [cgutils.alloca_once(builder, VECTOR) for _ in places]
            for place, slot in zip(places, sums, strict=True):
                builder.store(builder.load(place, align=4) if adds else ir.Constant(VECTOR, 0.0), slot)
            with cgutils.for_range(builder, depth) as loop:
                b_start = at(builder.mul(loop.index, b_row), b0, 1)
                a_start = at(builder.mul(loop.index, a_column), a0, 1)
                right = [
                    builder.load(vector_at(context, builder, kinds[7], b, at(b_start, b_row, 0, column)), align=4)
                    for column in columns
                ]
                for row in range(ROWS):
                    number = builder.load(pointer_to(context, builder, kinds[3], a, at(a_start, a_row, row)))
                    left = everywhere(builder, builder.bitcast(number, ir.FloatType()))
                    for factor, slot in zip(right, sums[row * len(right) :], strict=False):
                        builder.store(_plus_product(builder, builder.load(slot), left, factor, kinds[3].dtype), slot)
            for place, slot in zip(places, sums, strict=True):
                builder.store(builder.load(slot), place, align=4)
            return context.get_dummy_value()

        return signature, generate

    return tile


def _columns_of(builder: Any, lines: list[Any]) -> list[Any]:
    """Of sixteen rows of sixteen numbers, each a vector."""
    for apart in (1, 2, 4, 8):  # what lies off the diagonal changes sides, in ever larger squares
        for upper in (line for line in range(LANES) if not line & apart):
            pair = lines[upper], lines[upper + apart]
            kept_lanes = [lane if not lane & apart else LANES + lane - apart for lane in range(LANES)]
            moved_lanes = [lane + apart if not lane & apart else LANES + lane for lane in range(LANES)]
            lines[upper], lines[upper + apart] = (
                shuffled(builder, pair[0], lanes, pair[1]) for lanes in (kept_lanes, moved_lanes)
            )
    return lines


@intrinsic
def _turn_square(typing, turned, first, width, rows, start, step):
    """Sixteen rows of sixteen numbers become as many columns."""
    size = types.intp

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        turned, first, width, rows, start, step = arguments

        def at(kind: Any, array: Any, begin: Any, factor: Any, number: int) -> Any:
            index = builder.add(begin, builder.mul(factor, ir.Constant(begin.type, number)))
            return vector_at(context, builder, kind, array, index)

        lines = [builder.load(at(signature.args[3], rows, start, step, line), align=4) for line in range(LANES)]
        for line, vector in enumerate(_columns_of(builder, lines)):
            builder.store(vector, at(signature.args[0], turned, first, width, line), align=4)
        return context.get_dummy_value()

    return types.void(turned, size, size, rows, size, size), generate


@inner
def turn(turned, width, rows, step, many, deep):
    """A matrix of ``many`` rows of ``deep`` numbers, ``step`` apart, becomes columns of another that has ``width``.

    Whole squares of sixteen are turned: there must be memory for them.
    """
    for column in range(0, deep, LANES):
        for row in range(0, many, LANES):
            _turn_square(turned, column * width + row, width, rows, row * step + column, step)


ACROSS = [lane + half for lane in range(LANES) for half in (0, LANES)]
"""Numbers of two vectors in turns."""


def _paired(builder: Any, low: Any, high: Any, lanes: list[int]) -> Any:
    """Two vectors of 16 numbers, in these lanes of the words that they become."""
    kind = ir.FunctionType(_HALVES, [VECTOR, VECTOR])
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    narrow = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [high, low])
    return builder.bitcast(shuffled(builder, narrow, lanes), VECTOR)


def _make_pairing(lanes: list[int]) -> Any:
    @intrinsic
    def pairing(typing, words, target, numbers, low, high):
        size = types.intp

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            words, target, numbers, low, high = arguments
            of_words, _, of_numbers, *_ = signature.args
            of_low, of_high = (
                builder.load(vector_at(context, builder, of_numbers, numbers, at), align=4) for at in (low, high)
            )
            paired = _paired(builder, of_low, of_high, lanes)
            builder.store(paired, vector_at(context, builder, of_words, words, target), align=4)
            return context.get_dummy_value()

        return types.void(words, size, numbers, size, size), generate

    return pairing


pair_beside = _make_pairing(list(range(2 * LANES)))
"""``pair_beside(words, target, numbers, low, high)``: 16 words of 32 numbers in their order, those from ``low`` on and
those from ``high`` on."""
pair_across = _make_pairing(ACROSS)
"""``pair_across(words, target, numbers, low, high)``: 16 words, each of one of the numbers from ``low`` on and one of
those from ``high`` on."""


@intrinsic
def copy_beside(typing, words, target, halves, source):
    """Eight words of 16 numbers that are bf16 already."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, target, halves, source = arguments
        kind = ir.VectorType(ir.IntType(16), LANES).as_pointer()
        source = builder.bitcast(pointer_to(context, builder, signature.args[2], halves, source), kind)
        target = builder.bitcast(pointer_to(context, builder, signature.args[0], words, target), kind)
        builder.store(builder.load(source, align=2), target, align=4)
        return context.get_dummy_value()

    return types.void(words, types.intp, halves, types.intp), generate


def _halves_at(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Sixteen bf16 numbers of an array, each in the lower bits of a word."""
    kind = ir.VectorType(ir.IntType(16), LANES).as_pointer()
    place = builder.bitcast(pointer_to(context, builder, array_type, array, index), kind)
    return builder.zext(builder.load(place, align=2), _WORDS)


def _word_of(builder: Any, low: Any, high: Any) -> Any:
    return builder.or_(low, builder.shl(high, ir.Constant(_WORDS, [16] * LANES)))


@intrinsic
def copy_across(typing, words, target, halves, low, high):
    """Sixteen words, each of one of the bf16 numbers from ``low`` on and one of those from ``high`` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words, target, halves, *ends = arguments
        low, high = (_halves_at(context, builder, signature.args[2], halves, end) for end in ends)
        word = _word_of(builder, low, high)
        place = pointer_to(context, builder, signature.args[0], words, target)
        builder.store(word, builder.bitcast(place, _WORDS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(words, types.intp, halves, types.intp, types.intp), generate


def _numbers_at(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Sixteen fp32 numbers of an array."""
    return builder.load(vector_at(context, builder, array_type, array, index), align=4)


def _make_turned(row_at: Any, words_of: Any) -> Any:
    """A function that turns 32 rows of 16 numbers, ``step`` apart: their columns become sixteen rows of 16 words, which
    lie side by side."""

    @intrinsic
    def turned(typing, words, target, numbers, first, step):
        size = types.intp

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            words, target, numbers, first, step = arguments
            of_words, _, of_numbers, *_ = signature.args

            def row(number: int) -> Any:
                at = builder.add(first, builder.mul(step, ir.Constant(first.type, number)))
                return row_at(context, builder, of_numbers, numbers, at)

            lines = [words_of(builder, row(2 * line), row(2 * line + 1)) for line in range(LANES)]
            for line, vector in enumerate(_columns_of(builder, lines)):
                at = builder.add(target, ir.Constant(target.type, LANES * line))
                place = vector_at(context, builder, of_words, words, at)
                builder.store(builder.bitcast(vector, VECTOR), place, align=4)
            return context.get_dummy_value()

        return types.void(words, size, numbers, size, size), generate

    return turned


pair_turned = _make_turned(_numbers_at, lambda builder, low, high: _paired(builder, low, high, ACROSS))
"""``pair_turned(words, target, numbers, first, step)``: of fp32 numbers."""
copy_turned = _make_turned(_halves_at, _word_of)
"""``copy_turned(words, target, halves, first, step)``: of bf16 numbers."""


def _make_product(*, adds: bool) -> Any:
    tile, square = _make_tile(adds=adds), make_square(adds=adds)

    @inner
    def product(c, c0, c_row, a, a0, a_row, a_column, b, b0, b_row, rows, columns, depth):
        if tiles_take(a) and a_column == 1 and depth % LANES == 0 and columns % SQUARE == 0:
            a_steps, b_steps = (a_row, LANES, LANES * a_row), (b_row, LANES * b_row, LANES)
            for row in range(0, rows, SQUARE):
                for column in range(0, columns, SQUARE):
                    c_start, a_start = c0 + row * c_row + column, a0 + row * a_row
                    square(c, c_start, c_row, a, a_start, a_steps, b, b0 + column, b_steps, depth)
            return
        for column in range(0, columns, COLUMNS):
            for row in range(0, rows, ROWS):
                c_start, a_start = c0 + row * c_row + column, a0 + row * a_row
                tile(c, c_start, c_row, a, a_start, a_row, a_column, b, b0 + column, b_row, depth)

    return product


set_product = _make_product(adds=False)
"""``C = A B`` in fp32, of matrices that lie in one-dimensional arrays: element (i, j) of A is
``a[a0 + i * a_row + j * a_column]``, and rows of B and C lie in one piece. Elements of A and B are fp32 numbers, or
words: then ``depth`` counts words, and row i of B has the numbers of its rows 2 i and 2 i + 1.

Shapes: A (rows, depth), B (depth, columns), C (rows, columns). Whole tiles are computed: there must be memory for
rows of A and C up to the next multiple of ``BLOCK`` and columns up to that of ``COLUMNS``, and C has them afterwards.
"""
add_product = _make_product(adds=True)
"""``C += A B``, otherwise as ``set_product``."""
