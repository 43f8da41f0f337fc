"""In which order packs are trained: a pure function of (seed, position), with no list of indices anywhere.

Position p of a run trains pack ``pack_at(p, num_packs, seed)``. Each epoch (``p // num_packs``) is a permutation of
all packs, different for every epoch and seed. Starting at any position, on any number of workers, costs the same
as going on: nothing is replayed and nothing is stored.

The permutation is a Feistel network over the smallest even number of bits that holds ``num_packs`` (Luby and
Rackoff, 1988), followed until it lands below ``num_packs`` (cycle walking; Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002). The domain is at most four times too large, so fewer than four rounds of walking
are expected. The round function is the finaliser of SplitMix64 (Steele, Lea, Flood, 2014).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

Bits = TypeVar("Bits", int, np.ndarray)
_MASK = (1 << 64) - 1
_ROUNDS = 6


def mix(value: Bits) -> Bits:
    """SplitMix64's finaliser: a bijection on 64 bits in which every output bit depends on every input bit. Takes an
    integer, or uint64 of any shape."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _permuted(index: Bits, half: int, key: Bits) -> Bits:
    """Places of indices in a permutation of all numbers of ``2 * half`` bits."""
    low = (1 << half) - 1
    left, right = index >> half, index & low
    for number in range(_ROUNDS):
        left, right = right, left ^ (mix(key ^ mix((number << 32) ^ right)) & low)
    return (left << half) | right


def _half(size: int) -> int:
    return max(1, ((size - 1).bit_length() + 1) // 2)


def permute(index: int, size: int, key: int) -> int:
    """Place of ``index`` in the permutation of ``range(size)`` that belongs to ``key``."""
    if not 0 <= index < size:
        raise IndexError(f"index {index} is outside of range({size})")
    while True:
        index = _permuted(index, _half(size), key)
        if index < size:
            return index


def pack_at(position: int, num_packs: int, seed: int) -> int:
    """The pack trained at a global position, counted from the start of the run over all epochs.

    Raises ``IndexError`` for a negative position and ``ValueError`` when there are no packs.
    """
    if num_packs <= 0:
        raise ValueError("there are no packs")
    if position < 0:
        raise IndexError(f"position {position} is negative")
    epoch, index = divmod(position, num_packs)
    return permute(index, num_packs, mix(mix(seed & _MASK) ^ epoch))


def first_packs(count: int, num_packs: int, seed: int) -> np.ndarray:
    """``pack_at`` of the first ``count`` positions: int64 (count,)."""
    epochs, indices = np.divmod(np.arange(count, dtype=np.uint64), np.uint64(num_packs))
    keys = mix(mix(seed & _MASK) ^ epochs)
    walking = np.arange(count)
    while len(walking):
        indices[walking] = _permuted(indices[walking], _half(num_packs), keys[walking])
        walking = walking[indices[walking] >= num_packs]
    return indices.astype(np.int64)


def balanced(costs: np.ndarray, workers: int) -> np.ndarray:
    """An order of each step's packs in which workers that take them in turn have about equally much to compute.

    ``costs``: (steps, packs of a step). Returns indices along the second axis, int64 of the same shape.

    The costliest pack that is left goes to the worker with the least to compute (Graham, 1969) that has not got all
    of its packs yet: each gets equally many. Then each worker's packs alternate between costly and cheap ones, so that
    its micro-batches are about equally large.
    """
    steps, packs = costs.shape
    turns = packs // workers
    if workers == 1 or turns < 2:
        return np.tile(np.arange(packs), (steps, 1))
    falling, row = np.argsort(-costs, axis=1, kind="stable"), np.arange(steps)
    dealt, loads = np.empty((steps, turns, workers), dtype=np.int64), np.zeros((steps, workers))
    numbers = np.zeros((steps, workers), dtype=np.int64)
    for pack in falling[:, : turns * workers].T:
        worker = np.where(numbers < turns, loads, np.inf).argmin(axis=1)
        dealt[row, numbers[row, worker], worker] = pack
        loads[row, worker] += costs[row, pack]
        numbers[row, worker] += 1
    turn = np.arange(turns)
    mixed = np.stack([turn, turn[::-1]], axis=1).ravel()[:turns]
    return np.concatenate([dealt[:, mixed].reshape(steps, -1), falling[:, turns * workers :]], axis=1)
