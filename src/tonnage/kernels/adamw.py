"""The AdamW update, written once, over the forms in which master weights, moments and gradients can rest.

Update (Loshchilov & Hutter 2019, decoupled decay; bias correction as in ``torch.optim.AdamW``), in fp32::

    g = scale * gradient                      scale: clipping, and the inverse of a loss scale
    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g g
    w = w (1 - lr decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Forms of a master weight:

* an fp32 weight is its own master;
* a bf16 weight is the *high half* of its master, ``low`` the signed low 16 bits. Weights are rounded half up on
  the bit pattern, ``high = (bits + 0x8000) >> 16``, because then ``low = bits - (high << 16)`` always fits 16 signed
  bits and ``(high << 16) + low`` gives the master back exactly. Round-half-to-even differs on ties only
  (2^-17 of all values), and for it no such remainder exists;
* an fp16 weight is its master rounded to nearest. ``low`` is what is missing between the bit patterns of both as fp32
  numbers, in 32 bits: an fp16 number is no half of an fp32 one, and below 6e-5 it has fewer digits than any half.

The forms of the moments are in ``moments``.

On the CPU these are two numba loops, one over elements and one over blocks: one pass over memory, all cores, no GIL, no
compiler needed on the machine. Which form is read and written is settled by the type of the array when a loop is
compiled. Fused multiply-add is off, so that every form rounds in the same way and the split master equals the plain
one bit for bit. On a GPU it is one kernel in Triton (``adamw_triton``). ``update_torch`` is the same rule in torch
operations, for other devices and where these are off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import overload
from torch import Tensor

from tonnage.host.locked import sent
from tonnage.host.moments import UPDATE_ELEMENTS
from tonnage.kernels import moments as codecs
from tonnage.kernels.gpu import has_triton
from tonnage.kernels.loops import loop
from tonnage.kernels.moments import BLOCK, TINY, Moments
from tonnage.kernels.switches import is_on


@dataclass(frozen=True)
class Hyper:
    """What one update of one parameter needs besides tensors."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    step: int
    """Number of this update, from 1."""
    scale: float | Tensor = 1.0
    """Factor on the gradient: a number, or an fp32 scalar that the device has yet to compute. With NaN, nothing
    changes."""
    key: int = 0
    """Key of the random bits (``moments.noise_key``); only bf16 moments use them."""
    first: int = 0
    """Index of the first element in the whole parameter, for the random bits."""


def coefficients_of(hyper: Hyper) -> tuple[np.float32, ...]:
    """The numbers of the rule, in its order."""
    correction1 = 1.0 - hyper.beta1**hyper.step
    correction2 = 1.0 - hyper.beta2**hyper.step
    numbers = (
        float(hyper.scale),
        1.0 - hyper.beta1,
        hyper.beta2,
        1.0 - hyper.beta2,
        1.0 - hyper.lr * hyper.decay,
        hyper.lr / correction1,
        1.0 / math.sqrt(correction2),
        hyper.eps,
    )
    return tuple(map(np.float32, numbers))


# The rule.


@njit(inline="always")
def _rule(w, m, v, gradient, coefficients):  # type: ignore[no-untyped-def]
    scale, one_minus_beta1, beta2, one_minus_beta2, keep, step_size, unbias, eps = coefficients
    g = scale * gradient
    m = m + one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * (g * g)
    root = np.sqrt(v)
    w = w * keep - step_size * (m / (root * unbias + eps))
    return w, m, v, root


# Reading and writing, by type. The bodies in Python are never run: numba takes the overloads.


def _as_float(bits: Any) -> Any:
    """An element as fp32; a bf16 one arrives as its uint16 bit pattern."""
    raise NotImplementedError


@overload(_as_float, inline="always")
def _as_float_by_type(bits):  # type: ignore[no-untyped-def]  # numba compares signatures, annotations included
    if bits == types.uint16:
        return lambda bits: np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
    return lambda bits: bits


def _read_master(weight: Any, low: Any, i: Any) -> Any:
    """Element ``i`` of the master: of ``weight`` alone if that is fp32, else joined from both halves."""
    raise NotImplementedError


@overload(_read_master, inline="always")
def _read_master_by_type(weight, low, i):  # type: ignore[no-untyped-def]
    if weight.dtype == types.float32:
        return lambda weight, low, i: weight[i]
    return lambda weight, low, i: np.uint32(
        np.uint32(np.uint32(weight[i]) << np.uint32(16)) + np.uint32(np.int32(low[i]))
    ).view(np.float32)


def _write_master(weight: Any, low: Any, i: Any, w: Any) -> None:
    """Set element ``i`` of the master."""
    raise NotImplementedError


@overload(_write_master, inline="always")
def _write_master_by_type(weight, low, i, w):  # type: ignore[no-untyped-def]
    if weight.dtype == types.float32:

        def write(weight, low, i, w):  # type: ignore[no-untyped-def]
            weight[i] = w
    else:

        def write(weight, low, i, w):  # type: ignore[no-untyped-def]
            bits = np.float32(w).view(np.uint32)
            top = np.uint32(np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16))
            weight[i] = np.uint16(top)
            low[i] = np.int16(np.uint16(np.uint32(bits - np.uint32(top << np.uint32(16)))))

    return write


def _write_moments(m: Any, v: Any, i: Any, new_m: Any, new_v: Any, index: Any, key: Any) -> None:
    """Set element ``i`` of both moments, fp32 or bf16; ``index`` and ``key`` give the random bits."""
    raise NotImplementedError


@overload(_write_moments, inline="always")
def _write_moments_by_type(m, v, i, new_m, new_v, index, key):  # type: ignore[no-untyped-def]
    if m.dtype == types.float32:

        def write(m, v, i, new_m, new_v, index, key):  # type: ignore[no-untyped-def]
            m[i] = new_m
            v[i] = new_v
    else:

        def write(m, v, i, new_m, new_v, index, key):  # type: ignore[no-untyped-def]
            noise = _random_bits(np.uint32(index ^ key))
            m_bits = np.uint32(np.float32(new_m).view(np.uint32) + np.uint32(noise & np.uint32(0xFFFF)))
            v_bits = np.uint32(np.float32(new_v).view(np.uint32) + np.uint32(noise >> np.uint32(16)))
            m[i] = np.uint16(np.uint32(m_bits >> np.uint32(16)))
            v[i] = np.uint16(np.uint32(v_bits >> np.uint32(16)))

    return write


@njit(inline="always")
def _random_bits(x):  # type: ignore[no-untyped-def]  # as in moments.random_bits
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


# The loops.


@loop
def _update_elements(weight, low, m, v, gradient, first, key, coefficients):  # type: ignore[no-untyped-def]
    for i in prange(weight.size):
        w, g = _read_master(weight, low, i), _as_float(gradient[i])
        w, new_m, new_v, _ = _rule(w, _as_float(m[i]), _as_float(v[i]), g, coefficients)
        _write_master(weight, low, i, w)
        _write_moments(m, v, i, new_m, new_v, np.uint32(np.uint32(i) + first), key)


_M_LEVELS, _V_LEVELS = np.float32(codecs.M_LEVELS), np.float32(codecs.V_LEVELS)
_M_UNIT, _V_UNIT = np.float32(codecs.M_UNIT), np.float32(codecs.V_UNIT)
_TINY = np.float32(TINY)
_BLOCKS_A_TURN = 32
"""Blocks that a thread takes at once, so that its scratch space costs nothing."""

# A block is read, updated, measured and written in loops of their own over a scratch space in the first cache: mixed in
# one loop, bytes and floats are converted half as fast. Indices are unsigned where they are sums, because numba tests
# a signed one for being negative, and such a loop does not use vector instructions (five times slower).


@loop
def _update_blocks(weight, low, m, v, m_scale, v_scale, gradient, row, coefficients):  # type: ignore[no-untyped-def]
    blocks_a_row = (row + BLOCK - 1) // BLOCK
    num_blocks = m_scale.size
    for turn in prange((num_blocks + _BLOCKS_A_TURN - 1) // _BLOCKS_A_TURN):
        new_m, new_root = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        for block in range(turn * _BLOCKS_A_TURN, min(num_blocks, (turn + 1) * _BLOCKS_A_TURN)):
            first = block // blocks_a_row * row
            start = first + block % blocks_a_row * BLOCK
            stop = min(start + BLOCK, first + row)
            _read_codes(start, stop - start, m, v, m_scale[block] * _M_UNIT, v_scale[block] * _V_UNIT, new_m, new_root)
            _update_block(start, stop - start, weight, low, gradient, new_m, new_root, coefficients)
            m_scale[block] = _largest(new_m, stop - start)
            v_scale[block] = _largest(new_root, stop - start)
            _write_codes(start, stop - start, m, v, new_m, new_root, m_scale[block], v_scale[block])


@njit(error_model="numpy")
def _read_codes(start, size, m, v, m_unit, v_unit, new_m, new_root):  # type: ignore[no-untyped-def]
    for i in range(size):
        code = np.float32(np.int32(m[np.uint64(start + i)]))
        new_m[i] = m_unit * (code * np.abs(code))
    for i in range(size):
        code = np.float32(np.int32(v[np.uint64(start + i)])) + np.float32(1.0)
        new_root[i] = v_unit * (code * code)


@njit(error_model="numpy")
def _update_block(start, size, weight, low, gradient, new_m, new_root, coefficients):  # type: ignore[no-untyped-def]
    for i in range(size):
        w, g = _read_master(weight, low, np.uint64(start + i)), _as_float(gradient[np.uint64(start + i)])
        w, new_m[i], _, new_root[i] = _rule(w, new_m[i], new_root[i] * new_root[i], g, coefficients)
        _write_master(weight, low, np.uint64(start + i), w)


@njit(error_model="numpy")
def _largest(values, size):  # type: ignore[no-untyped-def]
    """Largest magnitude, by way of bit patterns, which order as magnitudes do and make a loop of integers."""
    bits = values.view(np.uint32)
    largest = np.uint32(0)
    for i in range(size):
        largest = max(largest, np.uint32(bits[i] & np.uint32(0x7FFFFFFF)))
    magnitude = np.uint32(largest).view(np.float32)
    return np.float32(0.0) if magnitude < _TINY else magnitude


@njit(error_model="numpy")
def _write_codes(start, size, m, v, new_m, new_root, m_scale, v_scale):  # type: ignore[no-untyped-def]
    m_inverse = np.float32(0.0) if m_scale == np.float32(0.0) else _M_LEVELS / m_scale
    v_inverse = np.float32(0.0) if v_scale == np.float32(0.0) else _V_LEVELS / v_scale
    for i in range(size):
        magnitude = np.int32(np.sqrt(np.abs(new_m[i]) * m_inverse) + np.float32(0.5))
        sign = np.int32(np.float32(new_m[i]).view(np.int32)) >> np.int32(31)
        m[np.uint64(start + i)] = np.int8(np.int32((magnitude ^ sign) - sign))
        v[np.uint64(start + i)] = np.uint8(np.int32(np.sqrt(new_root[i] * v_inverse) - np.float32(0.5)))


def update(weight: Tensor, low: Tensor | None, moments: Moments, gradient: Tensor, hyper: Hyper) -> None:
    """Update ``weight`` (and ``low`` and ``moments``) in place by one step of AdamW.

    ``weight`` is fp32 with ``low`` None, bf16 with ``low`` int16 or fp16 with ``low`` int32; ``gradient`` is fp32 or of
    the type of ``weight``. All have the same number of elements and are contiguous. fp16, which numba does not know, is
    updated in torch operations on a CPU too. A GPU has a kernel for all of it (``adamw_triton``), which alone need not
    know the factor on the gradient before it is asked for.
    """
    if is_unseen(weight.device):
        return _update_on_gpu(weight, low, moments, gradient, hyper)
    if isinstance(hyper.scale, Tensor):
        hyper = replace(hyper, scale=float(hyper.scale))
    if math.isnan(hyper.scale):
        return None
    if weight.device.type != "cpu" or not is_on("adamw") or torch.float16 in (weight.dtype, gradient.dtype):
        return update_torch(weight, low, moments, gradient, hyper)
    coefficients, lows = coefficients_of(hyper), _NO_LOW if low is None else _flat(low)
    arrays = _flat(weight), lows, _flat(moments.m), _flat(moments.v)
    if moments.m_scale is not None and moments.v_scale is not None:
        scales = _flat(moments.m_scale), _flat(moments.v_scale)
        _update_blocks(*arrays, *scales, _flat(gradient), moments.row, coefficients)
    else:
        first = np.uint32(hyper.first & 0xFFFFFFFF)
        _update_elements(*arrays, _flat(gradient), first, np.uint32(hyper.key), coefficients)
    return None


def is_unseen(device: torch.device) -> bool:
    """Whether an update is asynchronous: the host does not wait for it, nor see what comes of it."""
    return device.type == "cuda" and is_on("adamw") and has_triton()


def _update_on_gpu(weight: Tensor, low: Tensor | None, moments: Moments, gradient: Tensor, hyper: Hyper) -> None:
    from tonnage.kernels.adamw_triton import update as update_on_gpu

    scale = hyper.scale
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float32, device=weight.device)
    _, *coefficients = map(float, coefficients_of(replace(hyper, scale=1.0)))
    update_on_gpu(weight.detach(), low, moments, gradient, scale, coefficients, signed(hyper.key), signed(hyper.first))


_NO_LOW = np.empty(0, np.int16)


def _flat(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as a flat array; bf16 as its uint16 bit patterns."""
    flat = tensor.detach().view(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.uint16)
    return flat.numpy()


@torch.no_grad()
def update_torch(weight: Tensor, low: Tensor | None, moments: Moments, gradient: Tensor, hyper: Hyper) -> None:
    """The same rule in torch operations, tile by tile, on any device."""
    device = weight.device
    coefficients = sent(torch.tensor(coefficients_of(hyper)), device)
    key = _int32(hyper.key, device)
    weight, gradient = weight.detach().view(-1), gradient.view(-1)
    lows = None if low is None else low.view(-1)
    for start, stop in codecs.cut(weight.numel(), moments.row, UPDATE_ELEMENTS):
        update_tile(
            weight[start:stop],
            None if lows is None else lows[start:stop],
            moments.part(start, stop),
            gradient[start:stop],
            coefficients,
            key,
            _int32(hyper.first + start, device),
        )


def update_tile(
    weight: Tensor,
    low: Tensor | None,
    moments: Moments,
    gradient: Tensor,
    coefficients: Tensor,
    key: Tensor,
    first: Tensor,
) -> None:
    scale, one_minus_beta1, beta2, one_minus_beta2, keep, step_size, unbias, eps = coefficients.unbind()
    master = weight if low is None else join(weight, low)
    m, v = codecs.decode(moments)
    g = gradient.float() * scale
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    root = v.sqrt()
    master = master * keep - m / (root * unbias + eps) * step_size
    codecs.encode(moments, m, v, root, key, first)
    if low is None:
        weight.copy_(master)
    else:
        high, remainder = split(master, weight.dtype)
        weight.copy_(high)
        low.copy_(remainder)


def _int32(value: int, device: torch.device) -> Tensor:
    """The low 32 bits of ``value`` as a signed scalar."""
    return torch.full((), signed(value), dtype=torch.int32, device=device)


def signed(value: int) -> int:
    """The low 32 bits of ``value`` as a signed number."""
    low = value & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low


LOW = {torch.bfloat16: torch.int16, torch.float16: torch.int32}
"""Type of what is missing of the master of a weight of 16 bits."""


def split(master: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """An fp32 master as (bf16 weight, int16 low half) or (fp16 weight, int32 rest), exactly."""
    bits = master.contiguous().view(torch.int32)
    if dtype == torch.float16:
        rounded = master.to(torch.float16)
        return rounded, bits - rounded.float().contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(weight: Tensor, low: Tensor) -> Tensor:
    """The fp32 master of a weight of 16 bits and what is missing of it (``LOW``), exactly."""
    if weight.dtype == torch.float16:
        return (weight.float().contiguous().view(torch.int32) + low).view(torch.float32)
    return ((weight.contiguous().view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)
