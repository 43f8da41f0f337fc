"""The AdamW update as one kernel of a GPU (Triton): each number is read, updated and written once.

The rule, the forms of masters and moments, and the order of operations are those of ``adamw`` and ``moments``. Roots
and quotients are rounded as IEEE 754 has it and nothing is fused (``enable_fp_fusion``), so the bits should be those of
``adamw.update_torch``; in Triton's interpreter they are.

The factor on the gradient lies in the device's memory, so that the host need not know it yet. If it is NaN, nothing
changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tonnage.kernels import moments as codecs
from tonnage.kernels.moments import Moments

_ELEMENTS = 1024
"""Elements that a program updates, where moments are fp32 or bf16."""
_BLOCKS = 4
"""Blocks that a program updates, where moments are int8: 232e9 parameters a second on an H200, 179e9 with 8."""
_BLOCK = tl.constexpr(codecs.BLOCK)
_M_UNIT, _V_UNIT = tl.constexpr(codecs.M_UNIT), tl.constexpr(codecs.V_UNIT)
_M_LEVELS, _V_LEVELS = tl.constexpr(codecs.M_LEVELS), tl.constexpr(codecs.V_LEVELS)
_TINY = tl.constexpr(codecs.TINY)


@triton.jit
def _read_master(weights, lows, at, mask):
    weight = tl.load(weights + at, mask, other=0.0)
    master = weight.to(tl.float32)
    if weights.dtype.element_ty == tl.bfloat16:
        low = tl.load(lows + at, mask, other=0).to(tl.int32)
        high = weight.to(tl.int16, bitcast=True).to(tl.int32) << 16
        master = (high + low).to(tl.float32, bitcast=True)
    elif weights.dtype.element_ty == tl.float16:
        low = tl.load(lows + at, mask, other=0)
        master = (master.to(tl.int32, bitcast=True) + low).to(tl.float32, bitcast=True)
    return master


@triton.jit
def _write_master(weights, lows, at, mask, master):
    bits = master.to(tl.int32, bitcast=True)
    if weights.dtype.element_ty == tl.bfloat16:
        high = (bits + 0x8000) >> 16
        tl.store(weights + at, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask)
        tl.store(lows + at, (bits - (high << 16)).to(tl.int16), mask)
    elif weights.dtype.element_ty == tl.float16:
        rounded = master.to(tl.float16)
        tl.store(weights + at, rounded, mask)
        tl.store(lows + at, bits - rounded.to(tl.float32).to(tl.int32, bitcast=True), mask)
    else:
        tl.store(weights + at, master, mask)


@triton.jit
def _rule(w, m, v, gradient, scale, omb1, beta2, omb2, keep, step_size, unbias, eps):
    g = gradient * scale
    m = m + (g - m) * omb1
    v = v * beta2 + (g * g) * omb2
    root = tl.sqrt_rn(v)
    w = w * keep - tl.div_rn(m, root * unbias + eps) * step_size
    return w, m, v, root


@triton.jit
def _random_bits(index, key):  # as in moments.random_bits
    bits = (index ^ key).to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _truncate(values, noise):
    bits = values.to(tl.uint32, bitcast=True) + noise
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["key", "first"])
def update_elements(
    weights,
    lows,
    ms,
    vs,
    gradients,
    factor,
    number,
    key,
    first,
    omb1,
    beta2,
    omb2,
    keep,
    step_size,
    unbias,
    eps,
    SIZE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    scale = tl.load(factor)
    mask = at < tl.where(scale == scale, number, 0)
    w = _read_master(weights, lows, at, mask)
    m = tl.load(ms + at, mask, other=0.0).to(tl.float32)
    v = tl.load(vs + at, mask, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + at, mask, other=0.0).to(tl.float32)
    w, m, v, _ = _rule(w, m, v, gradient, scale, omb1, beta2, omb2, keep, step_size, unbias, eps)
    _write_master(weights, lows, at, mask, w)
    if ms.dtype.element_ty == tl.bfloat16:
        noise = _random_bits(at.to(tl.int32) + first, key)
        tl.store(ms + at, _truncate(m, noise & 0xFFFF), mask)
        tl.store(vs + at, _truncate(v, noise >> 16), mask)
    else:
        tl.store(ms + at, m, mask)
        tl.store(vs + at, v, mask)


@triton.jit
def update_blocks(
    weights,
    lows,
    ms,
    vs,
    m_scales,
    v_scales,
    gradients,
    factor,
    number,
    row,
    omb1,
    beta2,
    omb2,
    keep,
    step_size,
    unbias,
    eps,
    SIZE: tl.constexpr,
):
    blocks_a_row = tl.cdiv(row, _BLOCK)
    block = (tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE))[:, None]
    begins = block // blocks_a_row * row
    at = begins + block % blocks_a_row * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    scale = tl.load(factor)
    is_block = block < tl.where(scale == scale, number, 0)
    mask = is_block & (at < begins + row)
    code = tl.load(ms + at, mask, other=0).to(tl.float32)
    m = tl.load(m_scales + block, is_block, other=0.0) * _M_UNIT * (code * tl.abs(code))
    code = tl.load(vs + at, mask, other=0).to(tl.float32) + 1.0
    root = tl.load(v_scales + block, is_block, other=0.0) * _V_UNIT * (code * code)
    w = _read_master(weights, lows, at, mask)
    gradient = tl.load(gradients + at, mask, other=0.0).to(tl.float32)
    w, m, _, root = _rule(w, m, root * root, gradient, scale, omb1, beta2, omb2, keep, step_size, unbias, eps)
    _write_master(weights, lows, at, mask, w)

    largest = tl.max(tl.where(mask, tl.abs(m), 0.0), 1, keep_dims=True)
    largest = tl.where(largest < _TINY, 0.0, largest)
    tl.store(m_scales + block, largest, is_block)
    inverse = tl.where(largest == 0.0, 0.0, tl.div_rn(tl.full(largest.shape, _M_LEVELS, tl.float32), largest))
    magnitude = (tl.sqrt_rn(tl.abs(m) * inverse) + 0.5).to(tl.int32)
    tl.store(ms + at, tl.where(m < 0.0, -magnitude, magnitude).to(tl.int8), mask)

    largest = tl.max(tl.where(mask, root, 0.0), 1, keep_dims=True)
    largest = tl.where(largest < _TINY, 0.0, largest)
    tl.store(v_scales + block, largest, is_block)
    inverse = tl.where(largest == 0.0, 0.0, tl.div_rn(tl.full(largest.shape, _V_LEVELS, tl.float32), largest))
    tl.store(vs + at, (tl.sqrt_rn(root * inverse) - 0.5).to(tl.int32).to(tl.uint8), mask)


def update(
    weight: Tensor,
    low: Tensor | None,
    moments: Moments,
    gradient: Tensor,
    scale: Tensor,
    coefficients: Sequence[float],
    key: int,
    first: int,
) -> None:
    """Update in place; tensors are flat or of one shape, contiguous, all on one device.

    ``scale`` fp32, one number: the factor on the gradient. ``coefficients``: all others of ``adamw``, in order.
    ``key`` and ``first`` are 32 bits as a signed number.
    """
    number = weight.numel()
    if number == 0:
        return
    tensors = weight, weight if low is None else low, moments.m, moments.v
    if moments.m_scale is None or moments.v_scale is None:
        grid, numbers = (triton.cdiv(number, _ELEMENTS),), (number, key, first, *coefficients)
        update_elements[grid](*tensors, gradient, scale, *numbers, SIZE=_ELEMENTS, enable_fp_fusion=False)
        return
    scales, blocks = (moments.m_scale, moments.v_scale), moments.m_scale.numel()
    grid, numbers = (triton.cdiv(blocks, _BLOCKS),), (blocks, moments.row, *coefficients)
    update_blocks[grid](*tensors, *scales, gradient, scale, *numbers, SIZE=_BLOCKS, enable_fp_fusion=False)
