"""The AdamW update, written once, over the forms in which a master weight and a gradient can rest.

Update (Loshchilov & Hutter 2019, decoupled decay; bias correction as in ``torch.optim.AdamW``), in fp32::

    g = scale * gradient                      scale: clipping, and the inverse of a loss scale
    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g g
    w = w (1 - lr decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Forms:

* an fp32 weight is its own master;
* a bf16 weight is the *high half* of its master, ``low`` the signed low 16 bits. Weights are rounded half up on
  the bit pattern, ``high = (bits + 0x8000) >> 16``, because then ``low = bits - (high << 16)`` always fits 16 signed
  bits and ``(high << 16) + low`` gives the master back exactly. Round-half-to-even differs on ties only
  (2^-17 of all values), and for it no such remainder exists.

On the CPU these are numba loops: one pass over memory, all cores, no GIL, no compiler needed on the machine. Fused
multiply-add is off, so that every form rounds in the same way and the split master equals the plain one bit for
bit. ``update_torch`` is the same rule in torch operations, for other devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import overload
from torch import Tensor


def use_threads(number: int) -> None:
    """Let torch and the loops below use ``number`` CPU threads.

    Both run on one OpenMP pool, and numba, when it starts its threads, sets the size of that pool for torch as well.
    So numba goes first; otherwise the first update would give each of two workers on two cores two threads, and all
    four would spin against each other.
    """
    numba.set_num_threads(min(number, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(number)


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
    scale: float = 1.0
    """Factor on the gradient."""


@dataclass(frozen=True)
class _Coefficients:
    scale: np.float32
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    keep: np.float32
    step_size: np.float32
    root: np.float32
    eps: np.float32

    @staticmethod
    def of(hyper: Hyper) -> _Coefficients:
        correction1 = 1.0 - hyper.beta1**hyper.step
        correction2 = 1.0 - hyper.beta2**hyper.step
        f = np.float32
        return _Coefficients(
            scale=f(hyper.scale),
            one_minus_beta1=f(1.0 - hyper.beta1),
            beta2=f(hyper.beta2),
            one_minus_beta2=f(1.0 - hyper.beta2),
            keep=f(1.0 - hyper.lr * hyper.decay),
            step_size=f(hyper.lr / correction1),
            root=f(math.sqrt(correction2)),
            eps=f(hyper.eps),
        )

    def values(self) -> tuple[np.float32, ...]:
        return (
            self.scale,
            self.one_minus_beta1,
            self.beta2,
            self.one_minus_beta2,
            self.keep,
            self.step_size,
            self.root,
            self.eps,
        )


def _as_float(bits: Any) -> Any:
    """A gradient element as fp32; a bf16 one arrives as its uint16 bit pattern. Only numba calls this."""
    return bits


@overload(_as_float, inline="always")
def _as_float_by_type(bits):  # type: ignore[no-untyped-def]  # numba compares signatures, annotations included
    if bits == types.uint16:
        return lambda bits: np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
    return lambda bits: bits


@njit(inline="always")
def _rule(w, m, v, gradient, scale, one_minus_beta1, beta2, one_minus_beta2, keep, step_size, root, eps):  # type: ignore[no-untyped-def]
    g = scale * gradient
    m = m + one_minus_beta1 * (g - m)
    v = beta2 * v + one_minus_beta2 * (g * g)
    w = w * keep - step_size * (m / (np.sqrt(v) / root + eps))
    return w, m, v


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _update_plain(weight, m, v, gradient, scale, omb1, beta2, omb2, keep, step_size, root, eps):  # type: ignore[no-untyped-def]
    for i in prange(weight.size):
        weight[i], m[i], v[i] = _rule(
            weight[i],
            m[i],
            v[i],
            _as_float(gradient[i]),
            scale,
            omb1,
            beta2,
            omb2,
            keep,
            step_size,
            root,
            eps,
        )


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _update_split(high, low, m, v, gradient, scale, omb1, beta2, omb2, keep, step_size, root, eps):  # type: ignore[no-untyped-def]
    for i in prange(high.size):
        bits = np.uint32(np.uint32(np.uint32(high[i]) << np.uint32(16)) + np.uint32(np.int32(low[i])))
        w, m[i], v[i] = _rule(
            bits.view(np.float32),
            m[i],
            v[i],
            _as_float(gradient[i]),
            scale,
            omb1,
            beta2,
            omb2,
            keep,
            step_size,
            root,
            eps,
        )
        bits = np.float32(w).view(np.uint32)
        top = np.uint32(np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16))
        high[i] = np.uint16(top)
        low[i] = np.int16(np.uint16(np.uint32(bits - np.uint32(top << np.uint32(16)))))


def update(weight: Tensor, low: Tensor | None, m: Tensor, v: Tensor, gradient: Tensor, hyper: Hyper) -> None:
    """Update ``weight`` (and ``low``, ``m``, ``v``) in place by one step of AdamW.

    ``weight`` is fp32 with ``low`` None, or bf16 with ``low`` int16; ``m`` and ``v`` are fp32; ``gradient`` is fp32 or
    bf16. All have the same number of elements and are contiguous.
    """
    if weight.device.type != "cpu":
        return update_torch(weight, low, m, v, gradient, hyper)
    coefficients = _Coefficients.of(hyper).values()
    if low is None:
        _update_plain(_flat(weight), _flat(m), _flat(v), _flat(gradient), *coefficients)
    else:
        _update_split(_flat(weight), _flat(low), _flat(m), _flat(v), _flat(gradient), *coefficients)
    return None


def _flat(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as a flat array; bf16 as its uint16 bit patterns."""
    flat = tensor.detach().view(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.uint16)
    return flat.numpy()


TILE_ELEMENTS = 1 << 24


@torch.no_grad()
def update_torch(weight: Tensor, low: Tensor | None, m: Tensor, v: Tensor, gradient: Tensor, hyper: Hyper) -> None:
    """The same rule in torch operations, tile by tile, on any device."""
    c = _Coefficients.of(hyper)
    flats = [tensor.detach().view(-1) for tensor in (weight, m, v, gradient)]
    lows = None if low is None else low.view(-1)
    for start in range(0, weight.numel(), TILE_ELEMENTS):
        w, m_tile, v_tile, g = (flat[start : start + TILE_ELEMENTS] for flat in flats)
        low_tile = None if lows is None else lows[start : start + TILE_ELEMENTS]
        master = w if low_tile is None else join(w, low_tile)
        g = g.float() * float(c.scale)
        m_tile.add_((g - m_tile) * float(c.one_minus_beta1))
        v_tile.mul_(float(c.beta2)).add_((g * g) * float(c.one_minus_beta2))
        change = m_tile / (v_tile.sqrt() / float(c.root) + float(c.eps)) * float(c.step_size)
        master = master * float(c.keep) - change
        if low_tile is None:
            w.copy_(master)
        else:
            high, remainder = split(master)
            w.copy_(high)
            low_tile.copy_(remainder)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 master as (bf16 weight, int16 low half), exactly."""
    bits = master.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(weight: Tensor, low: Tensor) -> Tensor:
    """The fp32 master of a bf16 weight and its int16 low half, exactly."""
    return ((weight.contiguous().view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)
