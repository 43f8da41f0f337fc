"""Loops over a row of fp32 numbers, written down in vectors of 16 within loops that numba compiles.

LLVM makes vectors of a plain loop as well, but takes 64 numbers at a time and what is left over one by one, and it sums
up nothing in another order than is written. Rows of attention are short: there that costs a third of the time.

The exponential is the power of two of ``bits``. What is below 2^-126 is zero; what is no number stays none.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tonnage.kernels.bits import OF_REST, ROUNDS

LANES = 16
VECTOR = ir.VectorType(ir.FloatType(), LANES)
_INTEGERS = ir.VectorType(ir.IntType(32), LANES)
_CONTRACT = ("contract",)


def pointer_to(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Pointer to an element of a one-dimensional array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def vector_at(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Pointer to a number of a one-dimensional array and the 15 after it."""
    return builder.bitcast(pointer_to(context, builder, array_type, array, index), VECTOR.as_pointer())


def shuffled(builder: Any, vector: Any, lanes: list[int], other: Any = None) -> Any:
    """Lanes of a vector; numbers from its length on are lanes of ``other``."""
    places = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined) if other is None else other, places)


def everywhere(builder: Any, number: Any) -> Any:
    """A number in all lanes."""
    first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return shuffled(builder, first, [0] * LANES)


def _constant(number: float) -> Any:
    return ir.Constant(VECTOR, [number] * LANES)


def _larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", right, left), right, left)


def _power_of_two(builder: Any, exponent: Any) -> Any:
    exponent = _larger(builder, exponent, _constant(-127.0))
    rounded = builder.fadd(exponent, _constant(ROUNDS))
    rest = builder.fsub(exponent, builder.fsub(rounded, _constant(ROUNDS)))
    result = _constant(OF_REST[0])
    for coefficient in OF_REST[1:]:
        result = builder.fadd(builder.fmul(result, rest, flags=_CONTRACT), _constant(coefficient), flags=_CONTRACT)
    bits = builder.shl(builder.bitcast(rounded, _INTEGERS), ir.Constant(_INTEGERS, [23] * LANES))
    bits = builder.add(bits, ir.Constant(_INTEGERS, [127 << 23] * LANES))
    return builder.fmul(result, builder.bitcast(bits, VECTOR))


def _combined(builder: Any, count: Any, start: float, vector_of: Any, combine: Any) -> Any:
    """All vectors of ``count`` numbers combined into one, and its lanes into a number, half by half."""
    slot = cgutils.alloca_once(builder, VECTOR)
    builder.store(_constant(start), slot)
    zero, step = ir.Constant(count.type, 0), ir.Constant(count.type, LANES)
    with cgutils.for_range_slice(builder, zero, count, step) as (index, _):
        builder.store(combine(builder, builder.load(slot), vector_of(index)), slot)
    combined = builder.load(slot)
    for half in (8, 4, 2, 1):
        other = shuffled(builder, combined, [(lane + half) % LANES for lane in range(LANES)])
        combined = combine(builder, combined, other)
    return builder.extract_element(combined, ir.Constant(ir.IntType(32), 0))


@intrinsic
def largest(typing, numbers, first, count):
    """Of ``count`` numbers from ``first`` on, of what is a number; a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, first, count = arguments

        def vector_of(index: Any) -> Any:
            place = vector_at(context, builder, signature.args[0], numbers, builder.add(first, index))
            return builder.load(place, align=4)

        return _combined(builder, count, -math.inf, vector_of, _larger)

    return types.float32(numbers, types.intp, types.intp), generate


@intrinsic
def exponentials(typing, numbers, first, count, factor, shift):
    """Turn ``count`` numbers x from ``first`` on, a multiple of 16, into 2^(``factor`` x - ``shift``): their sum."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, first, count, *scalars = arguments
        factor, shift = (everywhere(builder, scalar) for scalar in scalars)

        def vector_of(index: Any) -> Any:
            place = vector_at(context, builder, signature.args[0], numbers, builder.add(first, index))
            scaled = builder.fmul(builder.load(place, align=4), factor, flags=_CONTRACT)
            power = _power_of_two(builder, builder.fsub(scaled, shift, flags=_CONTRACT))
            builder.store(power, place, align=4)
            return power

        return _combined(builder, count, 0.0, vector_of, ir.IRBuilder.fadd)

    number = types.float32
    return number(numbers, types.intp, types.intp, number, number), generate


@intrinsic
def weights_and_slopes(typing, scores, gradients, first, count, factor, shift, along):
    """Turn ``count`` scores x from ``first`` on, a multiple of 16, into weights w = 2^(``factor`` x - ``shift``), and
    what lies there of ``gradients`` of weights, g, into those of scores: w (g - ``along``)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, gradients, first, count, *scalars = arguments
        factor, shift, along = (everywhere(builder, scalar) for scalar in scalars)
        zero, step = ir.Constant(count.type, 0), ir.Constant(count.type, LANES)
        with cgutils.for_range_slice(builder, zero, count, step) as (index, _):
            at = builder.add(first, index)
            place, other = (
                vector_at(context, builder, kind, array, at)
                for kind, array in zip(signature.args, (scores, gradients), strict=False)
            )
            scaled = builder.fmul(builder.load(place, align=4), factor, flags=_CONTRACT)
            weight = _power_of_two(builder, builder.fsub(scaled, shift, flags=_CONTRACT))
            builder.store(weight, place, align=4)
            slope = builder.fmul(weight, builder.fsub(builder.load(other, align=4), along))
            builder.store(slope, other, align=4)
        return context.get_dummy_value()

    number, size = types.float32, types.intp
    return types.void(scores, gradients, size, size, number, number, number), generate
