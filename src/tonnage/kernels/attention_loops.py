"""Attention within documents on the CPU: loops over documents and heads, forward and backward.

A thread takes one part of a row (a document, a prefix that several share, or what follows such a prefix) and one head
of keys. Keys and values of the part and of the prefixes that it goes on from are read once, made fp32 and laid out for
``tiles``; queries come in blocks of rows that see keys as far as the last of them may, so nothing is computed that is
hidden but what fills up a tile. Weights are fp32 and are gone with their block: forward, the softmax of a row and its
normaliser (the log of the sum of exponentials) are found at once; backward, weights are made anew from that
(FlashAttention-2, Dao 2023, algorithm 2).

Gradients of keys are summed by the thread that has their part: over its own queries and over those of all that goes on
from it. No two threads write to one place, and the order of every sum is written down here.

Numbers come as bf16, as bits, or as fp32. A tensor is given as a flat array and three numbers: the index of its first
element, and the steps from token to token and from head to head; the numbers of a head lie side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from tonnage.kernels.bits import exponential, narrow, wide
from tonnage.kernels.loops import loop
from tonnage.kernels.tiles import COLUMNS, ROWS, add_product, largest, set_product, total, total_of_products, turn

BLOCK = 32
"""Rows of queries at a time; a multiple of ``ROWS``."""


# Reading and writing, by type. The bodies in Python are never run: numba takes the overloads.


def _number(stored: Any) -> Any:
    """The fp32 number that an element stands for."""
    raise NotImplementedError


@overload(_number, inline="always")
def _number_by_type(stored):  # numba compares signatures, annotations included
    if isinstance(stored, types.Float):
        return lambda stored: stored
    return lambda stored: wide(stored)


def _put(array: Any, index: Any, number: Any) -> None:
    """Store an fp32 number, rounded to the type of the array."""
    raise NotImplementedError


@overload(_put, inline="always")
def _put_by_type(array, index, number):
    if isinstance(array.dtype, types.Float):

        def put(array, index, number):
            array[index] = number
    else:

        def put(array, index, number):
            array[index] = narrow(number)

    return put


@njit(error_model="numpy")
def _read(rows, width, first, tensor, place, head, token, count, size, factor):
    """Rows ``first`` and on of a matrix, ``width`` apart: tokens of a head, times ``factor``."""
    step, begin = place[1], place[0] + head * place[2] + token * place[1]
    for i in range(count):
        source, target = begin + i * step, (first + i) * width
        for j in range(size):
            rows[np.uint64(target + j)] = factor * _number(tensor[np.uint64(source + j)])


@njit(error_model="numpy")
def _write(tensor, place, head, token, count, size, rows, width, factor):
    """The other way: tokens of a head from rows of a matrix, times ``factor``."""
    step, begin = place[1], place[0] + head * place[2] + token * place[1]
    for i in range(count):
        target, source = begin + i * step, i * width
        for j in range(size):
            _put(tensor, np.uint64(target + j), factor * rows[np.uint64(source + j)])


@njit(inline="always")
def _up(number, multiple):
    return (number + multiple - 1) // multiple * multiple


@njit(error_model="numpy")
def _softmax(weights, row, num_visible, columns):
    """Turn a row's scores into weights, all but the first ``num_visible`` zero; returns the row's normaliser."""
    for j in range(num_visible, columns):
        weights[row + j] = -np.float32(np.inf)
    most = largest(weights, row, columns)
    for j in range(columns):
        weights[np.uint64(row + j)] = exponential(weights[np.uint64(row + j)] - most)
    for j in range(num_visible, columns):
        weights[row + j] = np.float32(0.0)
    whole = total(weights, row, columns)
    inverse = np.float32(1.0) / whole
    for j in range(columns):
        weights[np.uint64(row + j)] *= inverse
    return most + np.log(whole)


@njit(error_model="numpy")
def _tokens_before(parts, part):
    """Tokens of the prefixes that a part goes on from."""
    num_tokens, prefix = 0, parts[part, 3]
    while prefix >= 0:
        num_tokens += parts[prefix, 1]
        prefix = parts[prefix, 3]
    return num_tokens


@njit(error_model="numpy")
def _read_seen(rows, width, parts, part, before, tensor, place, head, size):
    """All tokens of a head that a part may see: of the prefixes that it goes on from, and its own."""
    while part >= 0:
        _read(rows, width, before, tensor, place, head, parts[part, 0], parts[part, 1], size, np.float32(1.0))
        part = parts[part, 3]
        before -= parts[part, 1] if part >= 0 else 0


@loop
def forward(
    parts, query, at_query, key, at_key, value, at_value, output, at_output, normalisers, kv_heads, size, scale
):
    """Output and normalisers, fp32 (heads, tokens).

    ``parts``, int64 (parts, 4): first token and length of each part of the row, number of tokens that go on from it,
    and the part that it goes on from itself, -1 for none.
    """
    num_parts, group, unit_scale = len(parts), normalisers.shape[0] // kv_heads, np.float32(1.0)
    deep = _up(size, COLUMNS)
    for task in prange(num_parts * kv_heads):
        part, kv_head = task % num_parts, task // num_parts
        token, length, before = parts[part, 0], parts[part, 1], _tokens_before(parts, part)
        width = _up(before + length, COLUMNS)
        keys, values = np.empty(deep * width, np.float32), np.zeros(width * deep, np.float32)
        _read_seen(values, deep, parts, part, before, key, at_key, kv_head, size)
        turn(keys, width, values, deep, width, deep)
        _read_seen(values, deep, parts, part, before, value, at_value, kv_head, size)
        queries, outputs = np.zeros(BLOCK * deep, np.float32), np.empty(BLOCK * deep, np.float32)
        weights = np.empty(BLOCK * width, np.float32)
        for head in range(kv_head * group, (kv_head + 1) * group):
            for start in range(0, length, BLOCK):
                rows = min(BLOCK, length - start)
                columns = _up(before + start + rows, COLUMNS)
                _read(queries, deep, 0, query, at_query, head, token + start, rows, size, scale)
                set_product(weights, 0, width, queries, 0, deep, 1, keys, 0, width, rows, columns, size)
                for row in range(rows):
                    num_visible = before + start + row + 1
                    normalisers[head, token + start + row] = _softmax(weights, row * width, num_visible, columns)
                set_product(outputs, 0, deep, weights, 0, width, 1, values, 0, deep, rows, size, columns)
                _write(output, at_output, head, token + start, rows, size, outputs, deep, unit_scale)


@njit(error_model="numpy")
def _slopes(weights, slopes, row, num_visible, columns, normaliser, along):
    """Turn a row's scores into weights again, and the gradients of its weights (``slopes``) into those of its scores;
    ``along`` is the dot product of the row's output with its gradient."""
    for j in range(columns):
        at = np.uint64(row + j)
        weight = exponential(weights[at] - normaliser)
        weights[at] = weight
        slopes[at] = weight * (slopes[at] - along)
    for j in range(num_visible, columns):
        weights[row + j] = slopes[row + j] = np.float32(0.0)


@loop
def backward(
    parts,
    query,
    at_query,
    key,
    at_key,
    value,
    at_value,
    output,
    at_output,
    gradient,
    at_gradient,
    normalisers,
    to_query,
    at_to_query,
    to_key,
    at_to_key,
    to_value,
    at_to_value,
    kv_heads,
    size,
    scale,
):
    """Gradients of query, key and value; ``parts`` and ``normalisers`` as in ``forward``."""
    num_parts, group, unit_scale = len(parts), normalisers.shape[0] // kv_heads, np.float32(1.0)
    deep = _up(size, COLUMNS)
    for task in prange(num_parts * kv_heads):
        part, kv_head = task % num_parts, task // num_parts
        token, length, rest = parts[part, 0], parts[part, 1], parts[part, 2]
        before = _tokens_before(parts, part)
        width = _up(before + length, COLUMNS) + COLUMNS
        keys, keys_turned = np.zeros(width * deep, np.float32), np.empty(deep * width, np.float32)
        values_turned = np.empty(deep * width, np.float32)
        _read_seen(keys, deep, parts, part, before, value, at_value, kv_head, size)
        turn(values_turned, width, keys, deep, width, deep)
        _read_seen(keys, deep, parts, part, before, key, at_key, kv_head, size)
        turn(keys_turned, width, keys, deep, width, deep)
        queries, output_gradients = np.zeros(BLOCK * deep, np.float32), np.zeros(BLOCK * deep, np.float32)
        outputs, query_gradients = np.zeros(BLOCK * deep, np.float32), np.empty(BLOCK * deep, np.float32)
        weights, slopes = np.empty(BLOCK * width, np.float32), np.empty(BLOCK * width, np.float32)
        for_keys, for_values = (
            np.zeros(_up(length, ROWS) * deep, np.float32),
            np.zeros(_up(length, ROWS) * deep, np.float32),
        )
        for head in range(kv_head * group, (kv_head + 1) * group):
            # The part's own rows see its prefixes, and the part up to themselves. Rows of what goes on from it see all
            # of the part; of them, only the gradients of the part's keys and values are computed here.
            for start in range(0, _up(length, BLOCK) + rest, BLOCK):
                owns = start < length
                start = start if owns else start - _up(length, BLOCK) + length
                rows = min(BLOCK, (length if owns else length + rest) - start)
                num_visible = start + rows if owns else length
                first = 0 if owns else before
                columns = _up(before - first + _up(num_visible, ROWS), COLUMNS)
                _read(queries, deep, 0, query, at_query, head, token + start, rows, size, scale)
                _read(output_gradients, deep, 0, gradient, at_gradient, head, token + start, rows, size, unit_scale)
                _read(outputs, deep, 0, output, at_output, head, token + start, rows, size, unit_scale)
                set_product(weights, 0, width, queries, 0, deep, 1, keys_turned, first, width, rows, columns, size)
                set_product(
                    slopes, 0, width, output_gradients, 0, deep, 1, values_turned, first, width, rows, columns, size
                )
                for row in range(rows):
                    along = total_of_products(outputs, row * deep, output_gradients, row * deep, deep)
                    normaliser = normalisers[head, token + start + row]
                    last = before + start + row + 1 if owns else length
                    _slopes(weights, slopes, row * width, last, columns, normaliser, along)
                if owns:
                    set_product(query_gradients, 0, deep, slopes, 0, width, 1, keys, 0, deep, rows, size, columns)
                    _write(to_query, at_to_query, head, token + start, rows, size, query_gradients, deep, scale)
                own = before - first
                add_product(for_keys, 0, deep, slopes, own, 1, width, queries, 0, deep, num_visible, size, rows)
                add_product(
                    for_values, 0, deep, weights, own, 1, width, output_gradients, 0, deep, num_visible, size, rows
                )
        _write(to_key, at_to_key, kv_head, token, length, size, for_keys, deep, unit_scale)
        _write(to_value, at_to_value, kv_head, token, length, size, for_values, deep, unit_scale)
