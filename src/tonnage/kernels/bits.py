"""What loops for the CPU do with single numbers: bf16 as 16 bits and back, and an exponential that becomes vectors.

All are compiled into the loops that use them.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(inline="always")
def wide(bits):
    """The fp32 number that 16 bits of bf16 stand for."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(inline="always")
def narrow(x):
    """The bits of an fp32 number in bf16, rounded half to even, as torch does."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))


@njit(inline="always")
def exponential(x):
    """Of what is not above zero, to 2e-7 of it; what is no number stays none.

    The usual one of the Cephes library: 2^k times a polynomial of the remainder.
    """
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    k = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    k = k if k > np.float32(-127.0) else np.float32(-127.0)  # for what is no number
    power = np.int32(np.int32(np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * (r * r) + r + np.float32(1.0)) * power
