"""Loops over rows of numbers in vectors, against numpy's in fp64; products of words, against exact ones."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numba import njit

from tonnage.kernels import tiles, vectors
from tonnage.kernels.scratch import LARGE_PAGE, kept_memory

COUNT = 1 << 14


exponentials: Any = njit(lambda x, first, count, factor, shift: vectors.exponentials(x, first, count, factor, shift))
largest: Any = njit(lambda x, first, count: vectors.largest(x, first, count))


def _in_place(scores, gradients, count, numbers):  # type: ignore[no-untyped-def]
    factor, shift, along = numbers
    vectors.weights_and_slopes(scores, gradients, 0, count, factor, shift, along)


weights_and_slopes: Any = njit(_in_place)


def test_powers_of_two_are_those_of_numpy() -> None:
    exponents = np.linspace(-126, 20, COUNT, dtype=np.float32)
    numbers = np.concatenate([np.full(16, 7, np.float32), exponents, np.full(16, 7, np.float32)])
    total = exponentials(numbers, 16, COUNT, np.float32(1), np.float32(0))
    exact = np.exp2(exponents.astype(np.float64))
    assert np.abs(numbers[16:-16] / exact - 1).max() < 1.7e-7
    assert abs(total / exact.sum() - 1) < 1e-6
    assert (numbers[:16] == 7).all()
    assert (numbers[-16:] == 7).all()


def test_what_is_too_small_is_zero_and_what_is_no_number_stays_none() -> None:
    numbers = np.full(16, -np.inf, np.float32)
    numbers[1:5] = -1e30, -300, -127.1, 0
    assert exponentials(numbers, 0, 16, np.float32(1), np.float32(0)) == 1
    assert numbers.tolist() == [0, 0, 0, 0, 1, *[0] * 11]
    numbers[3] = np.nan
    assert np.isnan(exponentials(numbers, 0, 16, np.float32(1), np.float32(0)))
    assert np.isnan(numbers[3])
    numbers[4] = 5
    assert largest(numbers, 0, 16) == 5


def test_weights_and_gradients_of_scores() -> None:
    chance = np.random.default_rng(0)
    scores, gradients = (chance.normal(size=320).astype(np.float32) for _ in range(2))
    factor, shift, along = np.float32(0.7), np.float32(1.3), np.float32(0.4)
    weights = np.exp2(factor * scores.astype(np.float64) - shift)
    slopes = weights * (gradients.astype(np.float64) - along)
    weights_and_slopes(scores, gradients, 320, (factor, shift, along))
    np.testing.assert_allclose(scores, weights, rtol=5e-7)
    np.testing.assert_allclose(gradients, slopes, rtol=5e-7, atol=1e-7)


def _multiply(c, a, b, rows, columns, depth):  # type: ignore[no-untyped-def]
    tiles.set_product(c, 0, columns, a, 0, depth, 1, b, 0, columns, rows, columns, depth)


def _to_words(words, numbers, across):  # type: ignore[no-untyped-def]
    if across:
        tiles.pair_across(words, 0, numbers, 0, 16)
    else:
        tiles.pair_beside(words, 0, numbers, 0, 16)


multiply: Any = njit(_multiply)
to_words: Any = njit(_to_words)


def rounded(numbers: np.ndarray) -> np.ndarray:
    """Bits of numbers in bf16, rounded half to even."""
    bits = numbers.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint32)


@pytest.mark.skipif(not tiles.PAIRS, reason="a processor that does not multiply pairs of bf16 numbers")
def test_products_of_words_are_exact_but_for_their_sums() -> None:
    chance, rows, columns, depth = np.random.default_rng(0), 2 * tiles.ROWS, 2 * tiles.COLUMNS, 40
    left, right = (rounded(chance.normal(size=shape).astype(np.float32)) for shape in ((rows, depth), (depth, columns)))
    of_left, of_right = left[:, 0::2] | left[:, 1::2] << 16, right[0::2] | right[1::2] << 16
    result = np.zeros(rows * columns, np.float32)
    words = (np.ascontiguousarray(operand).ravel().astype(np.uint32) for operand in (of_left, of_right))
    multiply(result, *words, rows, columns, depth // 2)
    exact = [(bits << 16).astype(np.uint32).view(np.float32).astype(np.float64) for bits in (left, right)]
    np.testing.assert_allclose(result.reshape(rows, columns), exact[0] @ exact[1], atol=2e-5)


@pytest.mark.skipif(not tiles.PAIRS, reason="a processor that does not multiply pairs of bf16 numbers")
def test_numbers_become_words_in_order() -> None:
    numbers, words = np.random.default_rng(0).normal(size=32).astype(np.float32), np.zeros(16, np.uint32)
    bits = rounded(numbers)
    to_words(words, numbers, False)
    assert (words == (bits[0::2] | bits[1::2] << 16)).all()
    to_words(words, numbers, True)
    assert (words == (bits[:16] | bits[16:] << 16)).all()


def test_kept_memory_is_a_threads_own_and_begins_at_a_large_page() -> None:
    memory = kept_memory(1000)
    assert memory.shape == (1000,)
    assert memory.ctypes.data % LARGE_PAGE == 0
    memory[:] = 5
    assert (kept_memory(900) == 5).all()
    of_another = list[int]()
    thread = threading.Thread(target=lambda: of_another.append(int(kept_memory(1000).sum())))
    thread.start()
    thread.join()
    assert of_another == [0]
    assert kept_memory(2 * LARGE_PAGE + 1).shape == (2 * LARGE_PAGE + 1,)
