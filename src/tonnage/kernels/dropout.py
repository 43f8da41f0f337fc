"""Dropout whose masks no layout changes: a number is dropped by a hash of what it is, not of when it is computed.

    draw of the step, document, position in it ──► key of a token ─┐
    name of the layer ─────────────────────────► salt of the layer ├──► 16 bits for every channel ──► dropped if below
                                                                   │                                 p times 65,536
    channel of the layer's inputs ─────────────────────────────────┘

So a mask is the same in whichever micro-batch, row or rank the token is, and when its block is computed again. All
hashes are the finaliser of splitmix64 (Steele, Lea and Flood 2014): 64 bits, which are four channels' numbers. On a CPU
a loop draws them, elsewhere torch does; both give the same bits, and neither keeps a mask.

Numbers that are kept stay as they are, to the bit. The caller divides by the probability of being kept.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from tonnage.kernels.loops import loop

STEPS = 1 << 16
"""Of probabilities: they are multiples of one over this."""
PIECE = 1 << 19
"""Numbers that are dropped from at a time: 2 MB in fp32, which stay in a processor's cache."""
_LANES = 32
"""Hashes side by side; each is of four channels, ``_LANES`` apart."""
_BLOCK = 4 * _LANES
_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_U16, _U27, _U30, _U31 = np.uint64(16), np.uint64(27), np.uint64(30), np.uint64(31)
_U32, _U48, _LOW, _ONE = np.uint64(32), np.uint64(48), np.uint64(0xFFFF), np.uint64(1)


class Mask(NamedTuple):
    """Which of some rows' numbers are dropped."""

    keys: Tensor
    """int64 (rows,): of the tokens, ``token_keys``"""
    salt: Tensor
    """int64 (): of the layer, ``salt_of``. On a CPU, for any device; a tensor, so that compiled layers share code."""
    first: int
    """Channel of the layer with which the rows begin; not 0 where they are a part."""
    threshold: int
    """Numbers whose 16 bits are below it are dropped."""

    @property
    def kept_share(self) -> float:
        """The probability that a number is kept."""
        return 1 - self.threshold / STEPS

    def of_rows(self, some: slice) -> Mask:
        """The mask of some of the rows."""
        return Mask(self.keys[some], self.salt, self.first, self.threshold)


def threshold_of(probability: float) -> int:
    """Of ``Mask``, for a ``probability`` above 0 and below 1 of being dropped, to the nearest one that 16 bits have."""
    return min(max(round(probability * STEPS), 1), STEPS - 1)


def number_of(*parts: int | str) -> int:
    """63 bits that stand for something named by ``parts``."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


def salt_of(layer: str) -> Tensor:
    """The salt of a layer, int64 (), by its name in the model."""
    return torch.tensor(number_of(layer), dtype=torch.int64)


def token_keys(draw: int, documents: np.ndarray, positions: np.ndarray) -> Tensor:
    """Keys of tokens, int64 (tokens,), by their documents' numbers in the data set and their positions in these.

    ``draw`` stands for everything else that they depend on: the run's seed and the step.
    """
    mixed = _mix.py_func
    of_documents = mixed(np.uint64(draw) + _GOLDEN * (documents.astype(np.int64).view(np.uint64) + _ONE))
    keys: np.ndarray = mixed(of_documents + _GOLDEN * (positions.astype(np.int64).view(np.uint64) + _ONE))
    return torch.from_numpy(keys.view(np.int64))


def drop_(rows: Tensor, mask: Mask) -> Tensor:
    """Set what ``mask`` drops of ``rows``, (rows, channels), contiguous, of 16 or 32 bits, to zero; returns them."""
    if rows.device.type != "cpu":
        return rows.masked_fill_(kept(mask, rows.shape[1]).logical_not_(), 0)
    bits = rows.detach().view(torch.uint16 if rows.element_size() == 2 else torch.uint32).numpy()
    _drop(bits, mask.keys.numpy().view(np.uint64), np.uint64(int(mask.salt)), mask.first, mask.threshold)
    return rows


def kept(mask: Mask, channels: int) -> Tensor:
    """Which numbers of rows of so many ``channels`` are kept, bool (rows, channels), computed by torch."""
    device = mask.keys.device
    before, end = mask.first // _BLOCK, -(-(mask.first + channels) // _BLOCK)
    golden, first, second = (int(constant.astype(np.int64)) for constant in (_GOLDEN, _FIRST, _SECOND))

    def mixed(z: Tensor) -> Tensor:
        z = (z ^ _right(z, 30)) * first
        z = (z ^ _right(z, 27)) * second
        return z ^ _right(z, 31)

    states = mixed(mask.keys ^ mask.salt)
    counters = torch.arange(before * _LANES + 1, end * _LANES + 1, device=device)
    hashes = mixed(states[:, None] + counters * golden).view(len(states), end - before, 1, _LANES)
    # A right shift repeats the sign above the 16 bits that are taken.
    bits = (hashes >> torch.arange(0, 64, 16, device=device)[:, None] & 0xFFFF).flatten(1)
    start = mask.first - before * _BLOCK
    return bits[:, start : start + channels] >= mask.threshold


def _right(z: Tensor, places: int) -> Tensor:
    """64 bits moved to the right, with zeros behind them."""
    return (z >> places) & ((1 << (64 - places)) - 1)


@njit(inline="always")
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> _U30)) * _FIRST
    z = (z ^ (z >> _U27)) * _SECOND
    return z ^ (z >> _U31)


@loop
def _drop(numbers, keys, salt, first, threshold):  # type: ignore[no-untyped-def]
    num_rows, size = numbers.shape
    for row in prange(num_rows):
        state = _mix(keys[row] ^ salt)
        bits = np.empty(_BLOCK, np.uint16)
        for block in range(first // _BLOCK, (first + size + _BLOCK - 1) // _BLOCK):
            counter = np.uint64(block * _LANES + 1)
            for lane in range(_LANES):
                drawn = _mix(state + _GOLDEN * (counter + np.uint64(lane)))
                bits[lane] = np.uint16(drawn & _LOW)
                bits[_LANES + lane] = np.uint16((drawn >> _U16) & _LOW)
                bits[2 * _LANES + lane] = np.uint16((drawn >> _U32) & _LOW)
                bits[3 * _LANES + lane] = np.uint16(drawn >> _U48)
            start, end = max(first, block * _BLOCK), min(first + size, (block + 1) * _BLOCK)
            those, drawn_for = numbers[row, start - first : end - first], bits[start - block * _BLOCK :]
            for i in range(len(those)):
                those[i] = those[i] if drawn_for[i] >= threshold else 0
