"""Products of bf16 matrices by the processor's tile registers (AMX), within loops that numba compiles.

A tile register holds 16 rows of 16 words, each of two bf16 numbers, or 16 rows of 16 fp32 numbers. One instruction adds
the product of two such tiles to a third: 16,384 operations in 16 cycles, where vectors take 128. Four registers hold a
square of 32 rows and 32 columns of the result while it is summed up, two the left operand's rows and two the right
one's columns.

The system lets a process use these registers once it has asked, and each thread says what shape they have
(``begin_tiles``) before its first product, and that it is done with them (``end_tiles``) after its last. Libraries do
so as well, between the two nobody else may.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from tonnage.kernels.vectors import LANES, pointer_to


def features() -> list[str]:
    """What numba compiles for, as LLVM calls it: "+avx2", "-amx-bf16" and the like."""
    names: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return names.split(",")


AMX = "+amx-bf16" in features() and bool(torch.cpu._init_amx())
"""Whether numba compiles for a processor with tile registers, and the system lets this process use them."""
SQUARE = 2 * LANES
"""Rows and columns that are computed at a time."""

_BYTE, _SIZE = ir.IntType(8), ir.IntType(64)
_MEMORY = _BYTE.as_pointer()
_SHAPES = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])
"""The first palette; bytes of a row, two to a number, and rows of the eight registers."""


def _call(builder: Any, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _register(number: int) -> Any:
    return ir.Constant(_BYTE, number)


@intrinsic
def begin_tiles(typing):
    """Before products by tile registers, in their thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if AMX:
            shapes = ir.Constant(ir.ArrayType(_BYTE, len(_SHAPES)), bytearray(_SHAPES))
            place = cgutils.global_constant(builder, "tile_shapes", shapes)
            _call(builder, "ldtilecfg", builder.bitcast(place, _MEMORY))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def end_tiles(typing):
    """After products by tile registers, in their thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if AMX:
            _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def tiles_take(typing, array):
    """Whether elements of an array are words, and this processor has tile registers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), AMX and signature.args[0].dtype == types.uint32)

    return types.boolean(array), generate


def make_square(*, adds: bool) -> Any:
    """A function that computes a square of a product, or adds it to what is there.

    ``square(c, c0, c_row, a, a0, a_steps, b, b0, b_steps, depth)``: arrays, one-dimensional, where in them the square
    and its operands begin, and the step from row to row; of operands also those from tile to tile along the depth, and
    to the tiles beside them. ``depth``: words, a multiple of 16.
    """

    @intrinsic
    def square(typing, c, c0, c_row, a, a0, a_steps, b, b0, b_steps, depth):
        size, steps = types.intp, types.UniTuple(types.intp, 3)
        signature = types.void(c, size, size, a, size, steps, b, size, steps, size)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            c, c0, c_row, a, a0, a_steps, b, b0, b_steps, depth = arguments
            if not AMX or signature.args[3].dtype != types.uint32:
                return context.get_dummy_value()
            kinds, bytes_each = signature.args, ir.Constant(_SIZE, 4)
            a_row, a_deeper, a_beside = cgutils.unpack_tuple(builder, a_steps)
            b_row, b_deeper, b_beside = cgutils.unpack_tuple(builder, b_steps)
            rows = {row: builder.mul(row, bytes_each) for row in (c_row, a_row, b_row)}

            def move(name: str, number: int, kind: Any, array: Any, at: Any, row: Any) -> None:
                place = builder.bitcast(pointer_to(context, builder, kind, array, at), _MEMORY)
                _call(builder, name, _register(number), place, rows[row])

            below = builder.add(c0, builder.mul(c_row, ir.Constant(_SIZE, LANES)))
            corners = [builder.add(start, ir.Constant(_SIZE, beside)) for start in (c0, below) for beside in (0, LANES)]
            for number, corner in enumerate(corners):
                if adds:
                    move("tileloadd64", number, kinds[0], c, corner, c_row)
                else:
                    _call(builder, "tilezero", _register(number))
            with cgutils.for_range(builder, builder.udiv(depth, ir.Constant(_SIZE, LANES))) as loop:
                left = builder.add(a0, builder.mul(loop.index, a_deeper))
                right = builder.add(b0, builder.mul(loop.index, b_deeper))
                move("tileloadd64", 4, kinds[3], a, left, a_row)
                move("tileloadd64", 6, kinds[6], b, right, b_row)
                move("tileloadd64", 5, kinds[3], a, builder.add(left, a_beside), a_row)
                move("tileloadd64", 7, kinds[6], b, builder.add(right, b_beside), b_row)
                for number in range(4):
                    _call(builder, "tdpbf16ps", *map(_register, (number, 4 + number // 2, 6 + number % 2)))
            for number, corner in enumerate(corners):
                move("tilestored64", number, kinds[0], c, corner, c_row)
            return context.get_dummy_value()

        return signature, generate

    return square
