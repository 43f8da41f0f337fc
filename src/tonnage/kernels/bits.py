"""What loops for the CPU do with single numbers: bf16 as 16 bits and back, and an exponential that becomes vectors.

All are compiled into the loops that use them.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

LOG2_E = 1 / math.log(2)
ROUNDS = 1.5 * 2**23
"""Added to a number of less than 2^22, it leaves the nearest whole number in the lowest bits."""
OF_REST = (0.0013264727, 0.0096715130, 0.055507336, 0.24022242, 0.69314700, 1.0)
"""A power of two is a product of two: that of the nearest whole number, which is made of its bits, and that of the
rest, between -1/2 and 1/2, this polynomial, the highest power first. They were fitted to 1.6e-7 of the result, rounding
included."""
_OF_INVERSE = (0.32321757, -1.45448037, 2.12114784)
"""The polynomial that is next to 1 / x between 1 and 2, to a hundredth of it."""


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


@njit(inline="always")
def sigmoid(x):
    """1 / (1 + e^-x), to 3e-7 of it where x is above -86. A division would take as long as all the rest."""
    y = abs(x) * np.float32(-LOG2_E)
    y = y if y > np.float32(-125.0) else np.float32(-125.0)
    rounded = y + np.float32(ROUNDS)
    rest = y - (rounded - np.float32(ROUNDS))
    p = np.float32(OF_REST[0]) * rest + np.float32(OF_REST[1])
    p = p * rest + np.float32(OF_REST[2])
    p = p * rest + np.float32(OF_REST[3])
    p = p * rest + np.float32(OF_REST[4])
    p = p * rest + np.float32(OF_REST[5])
    power = np.int32(np.int32(np.float32(rounded).view(np.int32) << np.int32(23)) + np.float32(p).view(np.int32)).view(
        np.float32
    )
    whole = np.float32(1.0) + power
    inverse = np.float32(_OF_INVERSE[0]) * whole + np.float32(_OF_INVERSE[1])
    inverse = inverse * whole + np.float32(_OF_INVERSE[2])
    inverse = inverse * (np.float32(2.0) - whole * inverse)  # Newton's steps double its digits
    inverse = inverse * (np.float32(2.0) - whole * inverse)
    return inverse if x >= np.float32(0.0) else power * inverse
