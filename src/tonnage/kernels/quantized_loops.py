"""Loops that pack numbers in 4 and 8 bits and widen them again (CPU); ``quantized`` says what the formats are.

All work on numbers of the flattened weight. Widening is what happens in every product, so its common case, bf16 from
whole blocks, is written twice: a block has 16 values, and where the processor can look 16 numbers of 32 bits up in a
register at once (AVX-512), LLVM is told to, which it does not find by itself: 0.05 ns a number on a core of an EPYC,
where the plain loop takes 0.4 and a product of 512 rows 4.8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from tonnage.kernels.bits import narrow
from tonnage.kernels.loops import loop

BLOCK, OUTER_BLOCK = 64, 256
"""Those of ``host.quantized``. Numba looks for changes in this file only, so they stand here as well."""
_HALF = 32
"""Bytes of a block."""
HAS_LANES = bool(binding.get_host_cpu_features().get("avx512f"))
"""Whether this processor has the instructions of ``to_bf16_by_lanes``."""
_SMALLEST = np.float32(1e-38)
"""A scale below this counts as this when its inverse is taken: bitsandbytes' own guard."""


# Packing.


@njit(inline="always")
def _absolute(x):
    """The bits of an absolute value, which sort as the values do; those of NaN come last."""
    return np.uint32(np.float32(x).view(np.uint32) & np.uint32(0x7FFFFFFF))


@loop
def pack_blocks(numbers, bounds, codes, scales):
    """Whole blocks of fp32 ``numbers`` become two codes a byte, the first in the high half; ``scales``, largest
    absolute numbers, are infinite or NaN where a number is. A code is the number of ``bounds`` (15) below it."""
    for part in prange((len(scales) + 15) // 16):
        scaled, block_codes = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint8)
        for block in range(16 * part, min(len(scales), 16 * part + 16)):
            first = block * BLOCK
            bits = np.uint32(0)
            for i in range(BLOCK):
                bits = max(bits, _absolute(numbers[first + i]))
            scale = np.uint32(bits).view(np.float32)
            scales[block] = scale
            inverse = np.float32(1.0) / max(scale, _SMALLEST)
            for i in range(BLOCK):
                scaled[i] = numbers[first + i] * inverse
                block_codes[i] = 0
            for bound in bounds:
                for i in range(BLOCK):
                    block_codes[i] += np.uint8(scaled[i] > bound)
            for i in range(_HALF):
                codes[block * _HALF + i] = np.uint8(block_codes[2 * i] << np.uint8(4)) | block_codes[2 * i + 1]


@loop
def pack_rows(numbers, codes, scales):
    """Rows of fp32 ``numbers`` become codes of 8 bits, their largest absolute number 127; a row whose factor is
    not finite becomes zeros."""
    num_rows, size = numbers.shape
    for row in prange(num_rows):
        bits = np.uint32(0)
        for i in range(size):
            bits = max(bits, _absolute(numbers[row, i]))
        scale = np.uint32(bits).view(np.float32)
        scales[row] = scale
        factor = np.float32(1.0) / scale * np.float32(127.0)
        if np.isfinite(factor):
            for i in range(size):
                codes[row, i] = np.int8(np.rint(numbers[row, i] * factor))
        else:
            for i in range(size):
                codes[row, i] = np.int8(0)


# Widening. A scale is a number of ``scales`` or, where there is a ``book``, what its 8 bits stand for; numba compiles
# only the one that applies.


@njit(inline="always")
def _scale(scales, book, outer, mean, block):
    if book is None:
        return scales[block]
    return book[scales[block]] * outer[block // OUTER_BLOCK] + mean


@loop
def to_fp32(codes, scales, book, outer, mean, levels, width, row, column, out):
    """The part of a weight with rows ``width`` long that begins at ``row`` and ``column`` and has the shape of ``out``,
    whatever blocks it cuts."""
    num_rows, size = out.shape
    for line in prange(num_rows):
        start = (row + line) * width + column
        for block in range(start // BLOCK, (start + size + BLOCK - 1) // BLOCK):
            scale = _scale(scales, book, outer, mean, block)
            place, end = max(start, block * BLOCK), min(start + size, block * BLOCK + BLOCK)
            if place % 2:
                out[line, place - start] = levels[codes[place // 2] & np.uint8(15)] * scale
                place += 1
            pairs, outputs = codes[place // 2 : (end + 1) // 2], out[line, place - start : end - start]
            for i in range(len(outputs) // 2):
                outputs[2 * i] = levels[pairs[i] >> np.uint8(4)] * scale
                outputs[2 * i + 1] = levels[pairs[i] & np.uint8(15)] * scale
            if len(outputs) % 2:
                outputs[len(outputs) - 1] = levels[pairs[len(pairs) - 1] >> np.uint8(4)] * scale


@loop
def to_bf16_by_pairs(codes, scales, book, outer, mean, levels, width, row, column, out):
    """The same in bf16 (16 bits), where ``width``, ``column`` and the length of rows of ``out`` are whole blocks."""
    num_rows, size = out.shape
    for line in prange(num_rows):
        table = np.empty(16, np.uint16)
        block = ((row + line) * width + column) // BLOCK
        for number in range(size // BLOCK):
            scale = _scale(scales, book, outer, mean, block + number)
            for level in range(16):
                table[level] = narrow(levels[level] * scale)
            start = (block + number) * _HALF
            pairs, outputs = codes[start : start + _HALF], out[line, number * BLOCK : number * BLOCK + BLOCK]
            for i in range(_HALF):
                outputs[2 * i] = table[pairs[i] >> np.uint8(4)]
                outputs[2 * i + 1] = table[pairs[i] & np.uint8(15)]


@loop
def to_bf16_by_lanes(codes, scales, book, outer, mean, levels, width, row, column, out):
    """The same on processors with AVX-512; ``out`` has pairs of numbers (32 bits)."""
    num_rows, size = out.shape
    flat = out.reshape(-1)
    for line in prange(num_rows):
        block = ((row + line) * width + column) // BLOCK
        for number in range(size // _HALF):
            scale = _scale(scales, book, outer, mean, block + number)
            _look_up(flat, line * size + number * _HALF, codes, (block + number) * _HALF, levels, scale)


_LANES = 16
_INTEGERS, _FLOATS = ir.VectorType(ir.IntType(32), _LANES), ir.VectorType(ir.FloatType(), _LANES)
_BYTES = ir.VectorType(ir.IntType(8), _LANES)


@intrinsic
def _look_up(typing, out, place, codes, start, levels, scale):
    """A block of 32 bytes becomes 64 bf16 numbers: the 16 levels times the scale are rounded once, as ``bits.narrow``
    does, and each byte picks one for its high half and one for its low."""
    size = types.intp

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, place, codes, start, levels, scale = arguments
        kinds = signature.args

        def at(kind: Any, array: Any, index: Any, vector: Any, beyond: int = 0) -> Any:
            index = builder.add(index, ir.Constant(index.type, beyond))
            pointer = builder.gep(context.make_array(kind)(context, builder, array).data, [index])
            return builder.bitcast(pointer, vector.as_pointer())

        def all_lanes(number: int) -> Any:
            return ir.Constant(_INTEGERS, [number] * _LANES)

        look_up = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_INTEGERS, [_INTEGERS, _INTEGERS]), "llvm.x86.avx512.permvar.si.512"
        )
        first_lane = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), scale, ir.Constant(ir.IntType(32), 0))
        scales = builder.shuffle_vector(first_lane, ir.Constant(_FLOATS, ir.Undefined), all_lanes(0))
        values = builder.load(at(kinds[4], levels, ir.Constant(place.type, 0), _FLOATS), align=4)
        wide = builder.bitcast(builder.fmul(values, scales), _INTEGERS)
        odd = builder.and_(builder.lshr(wide, all_lanes(16)), all_lanes(1))
        rounded = builder.add(builder.add(wide, all_lanes(0x7FFF)), odd)
        firsts = builder.lshr(rounded, all_lanes(16))
        seconds = builder.and_(rounded, all_lanes(0xFFFF0000))
        for half in (0, _LANES):
            pairs = builder.zext(builder.load(at(kinds[2], codes, start, _BYTES, half), align=1), _INTEGERS)
            high = builder.call(look_up, [firsts, builder.lshr(pairs, all_lanes(4))])
            low = builder.call(look_up, [seconds, pairs])  # which looks at four bits of each
            builder.store(builder.or_(high, low), at(kinds[0], out, place, _INTEGERS, half), align=4)
        return context.get_dummy_value()

    return types.void(out, size, codes, size, levels, types.float32), generate


_UNIT = np.float32(7.874015718698502e-3)
"""1 / 127, as bitsandbytes multiplies with it."""


@loop
def rows_to_fp32(codes, scales, row, column, out):
    """The part of a weight of 8 bits that begins at ``row`` and ``column`` and has the shape of ``out``."""
    num_rows, size = out.shape
    for line in prange(num_rows):
        scale = scales[row + line]
        row_codes, outputs = codes[row + line, column : column + size], out[line]
        for i in range(size):
            outputs[i] = np.float32(row_codes[i]) * scale * _UNIT


@loop
def rows_to_bf16(codes, scales, row, column, out):
    """The same in bf16 (16 bits)."""
    num_rows, size = out.shape
    for line in prange(num_rows):
        scale = scales[row + line]
        # indices into these are never negative
        row_codes, outputs = codes[row + line, column : column + size], out[line]
        for i in range(size):
            outputs[i] = narrow(np.float32(row_codes[i]) * scale * _UNIT)
