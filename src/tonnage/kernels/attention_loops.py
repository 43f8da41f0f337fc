"""Attention within documents on the CPU: loops over tiles of tokens and heads, forward and backward.

A row is cut into tiles of at most ``TILE`` tokens, none of which reaches into two parts (a document, a prefix that
several share, or what follows such a prefix). A tile of queries sees its own tokens, and those of the tiles that come
before it in its document, one by one (``before``), as far as a window reaches; ``attention_tiles`` lists them:

                 tiles of keys
                  0   1   2   3
    tiles of 0  [ 0           ]     in the backward pass pairs of tiles are computed in waves, of which no two pairs
    queries  1  [ 1   0       ]     have a tile of queries or of keys in common; here, of one document of four tiles,
             2  [ 2   1   0   ]     the number of the wave stands in each
             3  [ 3   2   1   0 ]

Forward, a task is a tile of queries and a head: the softmax of its rows goes on from tile to tile of keys, with the
largest score so far and the sum of exponentials, and at last both are kept as one number, the row's normaliser.
Backward, a task is a pair of tiles and a head of keys: weights are made anew from normalisers (FlashAttention-2, Dao
2023, algorithms 1 and 2), and what the pair adds to gradients of queries, keys and values is added to sums in fp32. As
no two tasks of a wave write to one place, the order of every sum is written down here, whatever the number of threads.

Within a pair, queries come in blocks of rows, and see no keys but those that one of the block's rows may see. Keys and
values of a tile are read once for the task and laid out for ``tiles``. Nothing is ever as large as a document but
inputs, outputs and sums.

Numbers come as bf16, as bits, or as fp32. Operands of products are fp32, but for bf16 on a processor that multiplies
words of two such numbers (``tiles.PAIRS``) they are words: then weights and gradients of scores are rounded to bf16
before they are multiplied, as torch's are. Sums, scores and what makes weights of them are fp32 in any case. A tensor is given as a flat array and three numbers, in a tuple: the index of
its first element, and the steps from token to token and from head to head; the numbers of a head lie side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from tonnage.kernels.attention_tiles import TILE
from tonnage.kernels.bits import exponential, narrow, wide
from tonnage.kernels.loops import loop
from tonnage.kernels.tiles import (
    BLOCK,
    PAIRS,
    add_product,
    copy_across,
    copy_beside,
    pair_across,
    pair_beside,
    set_product,
    turn,
)
from tonnage.kernels.vectors import LOG2_E, exponentials, largest, weights_and_slopes

WIDTH = TILE + 16
"""Numbers from row to row of a matrix with a column for each key of a tile. Were they a multiple of 128 bytes apart,
columns would lie in few sets of a cache."""
LINE = 16
"""Numbers in a line of the cache."""

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


# Operands, by the type of their elements: fp32, or words of two numbers that lie side by side along a product's depth.


@njit(error_model="numpy")
def _aligned(count):
    """So many zeros that begin at a line of the cache. Elsewhere each vector of 16 numbers would lie in two lines."""
    memory = np.zeros(count + LINE, np.float32)
    start = -(memory.ctypes.data // memory.itemsize) % LINE
    return memory[start : start + count]


def _operand(stored: Any, memory: Any) -> Any:
    """fp32 memory as elements of operands that are made of such a stored number."""
    raise NotImplementedError


@overload(_operand, inline="always")
def _operand_by_type(stored, memory):
    if isinstance(stored, types.Float) or not PAIRS:
        return lambda stored, memory: memory
    return lambda stored, memory: memory.view(np.uint32)


def _elements(operand: Any, numbers: Any) -> Any:
    """How many elements hold so many numbers."""
    raise NotImplementedError


@overload(_elements, inline="always")
def _elements_by_type(operand, numbers):
    if isinstance(operand.dtype, types.Float):
        return lambda operand, numbers: numbers
    return lambda operand, numbers: (numbers + 1) // 2


def _read(rows: Any, width: Any, tensor: Any, head: Any, token: Any, count: Any, size: Any) -> Any:
    """Tokens of a head become rows of a matrix, ``width`` apart; what fills up a block is zero."""
    raise NotImplementedError


@overload(_read)
def _read_by_type(rows, width, tensor, head, token, count, size):
    if isinstance(rows.dtype, types.Float):

        def read(rows, width, tensor, head, token, count, size):
            memory, place = tensor
            step, begin = place[1], place[0] + head * place[2] + token * place[1]
            for i in range(count):
                source, target = begin + i * step, i * width
                for j in range(size):
                    rows[np.uint64(target + j)] = _number(memory[np.uint64(source + j)])
            rows[count * width : _up(count, BLOCK) * width] = 0
    else:

        def read(rows, width, tensor, head, token, count, size):
            memory, place = tensor
            step, begin = place[1], place[0] + head * place[2] + token * place[1]
            for i in range(count):
                source, target = begin + i * step, i * width
                for j in range(0, size - LINE + 1, LINE):
                    copy_beside(rows, target + j // 2, memory, source + j)
                for j in range(size // LINE * LINE, size, 2):
                    high = memory[source + j + 1] if j + 1 < size else np.uint16(0)
                    rows[target + j // 2] = _word(memory[source + j], high)
            rows[count * width : _up(count, BLOCK) * width] = 0

    return read


@njit(inline="always")
def _word(low, high):
    return np.uint32(np.uint32(low) | np.uint32(np.uint32(high) << np.uint32(16)))


def _read_right(rows: Any, width: Any, tensor: Any, head: Any, token: Any, count: Any, size: Any) -> Any:
    """The same for a right operand whose depth is the tokens'."""
    raise NotImplementedError


@overload(_read_right)
def _read_right_by_type(rows, width, tensor, head, token, count, size):
    if isinstance(rows.dtype, types.Float):
        return lambda rows, width, tensor, head, token, count, size: _read(rows, width, tensor, head, token, count, size)

    def read(rows, width, tensor, head, token, count, size):
        memory, place = tensor
        step, begin = place[1], place[0] + head * place[2] + token * place[1]
        for i in range(count // 2):
            source, target = begin + 2 * i * step, i * width
            for j in range(0, size - LINE + 1, LINE):
                copy_across(rows, target + j, memory, source + j, source + step + j)
            for j in range(size // LINE * LINE, size):
                rows[target + j] = _word(memory[source + j], memory[source + step + j])
        if count % 2:
            source, target = begin + (count - 1) * step, count // 2 * width
            for j in range(size):
                rows[np.uint64(target + j)] = memory[np.uint64(source + j)]
        rows[(count + 1) // 2 * width : _up(count, BLOCK) // 2 * width] = 0

    return read


def _rounded(words: Any, numbers: Any, count: Any, columns: Any) -> Any:
    """So many rows of numbers, ``WIDTH`` apart, as a left operand: ``words``, or themselves where those are numbers."""
    raise NotImplementedError


@overload(_rounded)
def _rounded_by_type(words, numbers, count, columns):
    if isinstance(words.dtype, types.Float):
        return lambda words, numbers, count, columns: numbers

    def rounded(words, numbers, count, columns):
        for row in range(count):
            for j in range(0, columns, 2 * LINE):
                low = row * WIDTH + j
                pair_beside(words, row * WIDTH + j // 2, numbers, low, low + LINE)
        return words

    return rounded


def _rounded_turned(words: Any, numbers: Any, count: Any, columns: Any) -> Any:
    """The same as a left operand whose depth is the rows': its columns are what has a row for each."""
    raise NotImplementedError


@overload(_rounded_turned)
def _rounded_turned_by_type(words, numbers, count, columns):
    if isinstance(words.dtype, types.Float):
        return lambda words, numbers, count, columns: numbers

    def rounded(words, numbers, count, columns):
        if count % 2:
            numbers[count * WIDTH : count * WIDTH + columns] = np.float32(0.0)
        for row in range(0, count, 2):
            for j in range(0, columns, LINE):
                low = row * WIDTH + j
                pair_across(words, row // 2 * WIDTH + j, numbers, low, low + WIDTH)
        return words

    return rounded


@njit(error_model="numpy")
def _write(tensor, head, token, count, size, rows, width, factor):
    """The other way: tokens of a head from rows of numbers, ``width`` apart, times ``factor``."""
    memory, place = tensor
    step, begin = place[1], place[0] + head * place[2] + token * place[1]
    for i in range(count):
        target, source = begin + i * step, i * width
        for j in range(size):
            _put(memory, np.uint64(target + j), factor * rows[np.uint64(source + j)])


@njit(error_model="numpy")
def _add(tensor, head, token, count, size, rows, width, factor):
    """Add rows of a matrix, ``width`` apart, to tokens of a head, times ``factor``."""
    memory, place = tensor
    step, begin = place[1], place[0] + head * place[2] + token * place[1]
    for i in range(count):
        target, source = begin + i * step, i * width
        for j in range(size):
            memory[np.uint64(target + j)] += factor * rows[np.uint64(source + j)]


@njit(error_model="numpy")
def _bring(gradients, head, token, count, size, rows, width, factor, is_first, is_last):
    """What a pair has of the gradients of so many tokens of a head: rows of a matrix, ``width`` apart, times
    ``factor``. The first pair that has any begins sums in fp32, the last stores them as results, rounded; what is fp32
    has no other sums than its results."""
    sums, place, results, result_place = gradients
    if is_first and is_last:
        _write((results, result_place), head, token, count, size, rows, width, factor)
    elif is_first:
        _write((sums, place), head, token, count, size, rows, width, factor)
    else:
        _add((sums, place), head, token, count, size, rows, width, factor)
        if is_last and results.itemsize < sums.itemsize:
            _read(rows, width, (sums, place), head, token, count, size)
            _write((results, result_place), head, token, count, size, rows, width, np.float32(1.0))


@njit(inline="always")
def _up(number, multiple):
    return (number + multiple - 1) // multiple * multiple


@njit(error_model="numpy")
def _visible(place, key_place, count, window):
    """From and to which of ``count`` keys, the first of them in place ``key_place``, a token in ``place`` sees."""
    return max(0, min(count, place - window + 1 - key_place)), max(0, min(count, place + 1 - key_place))


@njit(error_model="numpy", fastmath={"contract"})
def _capped(scores, row, columns, scale, cap):
    """Squash scores, times ``scale``, to (-cap, cap): cap times the hyperbolic tangent of their part of it."""
    for j in range(columns):
        at = np.uint64(row + j)
        x = scale * scores[at] / cap
        shrunk = exponential(np.float32(-2.0) * abs(x))
        squashed = (np.float32(1.0) - shrunk) / (np.float32(1.0) + shrunk)
        scores[at] = cap * (squashed if x >= np.float32(0.0) else -squashed)


@njit(error_model="numpy")
def _turn(turned, tensor, head, token, count, size, rows, deep):
    """Tokens of a head become columns of a matrix; ``rows`` has them as rows afterwards."""
    _read(rows, deep, tensor, head, token, count, size)
    turn(turned, WIDTH, rows, deep, _up(count, BLOCK), _up(_elements(rows, size), 16))


@njit(error_model="numpy")
def _columns(tiles, pair, start, window):
    """Rows of the block of queries that begins at ``start`` of its tile, and from and to which of the other tile's keys
    they see any, in whole blocks."""
    rows = min(BLOCK, tiles[pair[0], 1] - start)
    place, key_place, count = tiles[pair[0], 2] + start, tiles[pair[1], 2], tiles[pair[1], 1]
    first, _ = _visible(place, key_place, count, window)
    _, last = _visible(place + rows - 1, key_place, count, window)
    return rows, first // BLOCK * BLOCK, _up(last, BLOCK) if last > first else first // BLOCK * BLOCK


@njit(error_model="numpy")
def _attend_pair(tiles, pair, numbers, operands, results):
    """Add the values of a tile of keys to what a tile of queries has of those before."""
    size, deep, scale, window, cap = numbers
    queries, keys, values, weights, words = operands
    outputs, most, whole = results
    depth, factor = _elements(queries, size), np.float32(LOG2_E) * (scale if cap == np.float32(0.0) else np.float32(1.0))
    place, key_place, count = tiles[pair[0], 2], tiles[pair[1], 2], tiles[pair[1], 1]
    for start in range(0, tiles[pair[0], 1], BLOCK):
        rows, first, last = _columns(tiles, pair, start, window)
        if last == first:
            continue
        columns, at = last - first, start * deep
        set_product(weights, 0, WIDTH, queries, at, deep, 1, keys, first, WIDTH, rows, columns, depth)
        for row in range(rows):
            own = _visible(place + start + row, key_place, count, window)
            i, before, at_row = start + row, most[start + row], row * WIDTH
            if cap > np.float32(0.0):
                _capped(weights, at_row, columns, scale, cap)
            weights[at_row : at_row + own[0] - first] = -np.float32(np.inf)
            weights[at_row + own[1] - first : at_row + columns] = -np.float32(np.inf)
            most[i] = max(before, factor * largest(weights, at_row, columns))
            if most[i] != before and before != -np.float32(np.inf):
                shrink = np.exp2(before - most[i])
                whole[i] *= shrink
                for j in range(size):
                    outputs[np.uint64(i * deep + j)] *= shrink
            whole[i] += exponentials(weights, at_row, columns, factor, most[i])
        left, right, depth_of_keys = _rounded(words, weights, rows, columns), _elements(values, first), _elements(values, columns)
        add_product(outputs, at, deep, left, 0, WIDTH, 1, values, right * deep, deep, rows, size, depth_of_keys)


@loop
def forward(tiles, query, key, value, output, sinks, normalisers, kv_heads, size, scale, window, cap, threads):
    """Output and normalisers, fp32 (heads, tokens).

    ``tiles``: int64 (tiles, 4), of each a ``Tile``. ``sinks``: fp32 (heads,), -inf for none. ``window``: tokens that
    one sees, itself among them. ``cap``: what scores are squashed to, fp32, 0 for none.
    ``threads``: how many there are (numba cannot keep a loop that asks).
    """
    heads, deep = normalisers.shape[0], _up(size, 32) + 16
    numbers, stored = (size, deep, scale, window, cap), query[0][0]
    for thread in prange(threads):
        outputs, weights = _aligned(TILE * deep), _aligned(BLOCK * WIDTH)
        queries, values = _operand(stored, _aligned(TILE * deep)), _operand(stored, _aligned(TILE * deep))
        keys, words = _operand(stored, _aligned(deep * WIDTH)), _operand(stored, _aligned(BLOCK * WIDTH))
        most, whole = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
        # A thread takes every n-th task, beginning with the ends of documents, which see most.
        for task in range(thread, len(tiles) * heads, threads):
            tile, head = len(tiles) - 1 - task // heads, task % heads
            token, length, place, kv_head = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], head // (heads // kv_heads)
            _read(queries, deep, query, head, token, length, size)
            outputs[: _up(length, BLOCK) * deep] = np.float32(0.0)
            most[:], whole[:] = -np.float32(np.inf), np.float32(0.0)
            key_tile = tile
            while key_tile >= 0 and tiles[key_tile, 2] + tiles[key_tile, 1] > place - window + 1:
                key_token, count = tiles[key_tile, 0], tiles[key_tile, 1]
                _turn(keys, key, kv_head, key_token, count, size, values, deep)
                _read_right(values, deep, value, kv_head, key_token, count, size)
                operands, results = (queries, keys, values, weights, words), (outputs, most, whole)
                _attend_pair(tiles, (tile, key_tile), numbers, operands, results)
                key_tile = tiles[key_tile, 3]
            sink = np.float32(LOG2_E) * sinks[head]
            for row in range(length):
                before, most[row] = most[row], max(most[row], sink)
                shrink = np.exp2(before - most[row])
                all_of_row = whole[row] * shrink + np.exp2(sink - most[row])
                normalisers[head, token + row] = (most[row] + np.log2(all_of_row)) / np.float32(LOG2_E)
                for j in range(size):
                    outputs[np.uint64(row * deep + j)] *= shrink / all_of_row
            _write(output, head, token, length, size, outputs, deep, np.float32(1.0))


@njit(error_model="numpy", fastmath={"contract"})
def _slopes(weights, slopes, row, own, columns, of_row, scale, cap):
    """Turn a row's scores into weights again, and the gradients of its weights (``slopes``) into those of its scores;
    ``of_row``: its normaliser, and the dot product of its output with its gradient; ``own``: the columns it sees."""
    normaliser, along = of_row
    if cap > np.float32(0.0):
        _capped(weights, row, columns, scale, cap)
        for j in range(columns):
            at = np.uint64(row + j)
            part = weights[at] / cap
            weight = exponential(weights[at] - normaliser)
            weights[at] = weight
            slopes[at] = weight * (slopes[at] - along) * (np.float32(1.0) - part * part)
    else:
        factor, shift = np.float32(LOG2_E) * scale, np.float32(LOG2_E) * normaliser
        weights_and_slopes(weights, slopes, row, columns, factor, shift, along)
    for j in range(own[0]):
        weights[row + j] = slopes[row + j] = np.float32(0.0)
    for j in range(own[1], columns):
        weights[row + j] = slopes[row + j] = np.float32(0.0)


@njit(error_model="numpy")
def _pair_gradients(tiles, pair, head, numbers, tensors, operands, results):
    """Add what a head's queries of one tile and keys of another have of gradients: to those of queries in their tensor,
    to those of keys and values in ``of_keys``."""
    size, deep, scale, window, cap = numbers
    query, gradient, normalisers, along, to_query = tensors
    keys, keys_turned, values_turned, queries, gradients, words = operands
    key_gradients, value_gradients, query_gradients, weights, slopes = results
    place, key_place, count = tiles[pair[0], 2], tiles[pair[1], 2], tiles[pair[1], 1]
    depth = _elements(queries, size)
    for start in range(0, tiles[pair[0], 1], BLOCK):
        rows, first, last = _columns(tiles, pair, start, window)
        columns, token, at = last - first, tiles[pair[0], 0] + start, first * deep
        if columns == 0:
            if pair[2]:
                query_gradients[:] = np.float32(0.0)
                _bring(to_query, head, token, rows, size, query_gradients, deep, scale, False, True)  # noqa: FBT003
            continue
        _read(queries, deep, query, head, token, rows, size)
        _read(gradients, deep, gradient, head, token, rows, size)
        set_product(weights, 0, WIDTH, queries, 0, deep, 1, keys_turned, first, WIDTH, rows, columns, depth)
        set_product(slopes, 0, WIDTH, gradients, 0, deep, 1, values_turned, first, WIDTH, rows, columns, depth)
        for row in range(rows):
            own = _visible(place + start + row, key_place, count, window)
            own, of_row = (own[0] - first, own[1] - first), (normalisers[head, token + row], along[head, token + row])
            _slopes(weights, slopes, row * WIDTH, own, columns, of_row, scale, cap)
        left, right, of_columns = _rounded(words, slopes, rows, columns), _elements(keys, first), _elements(keys, columns)
        set_product(query_gradients, 0, deep, left, 0, WIDTH, 1, keys, right * deep, deep, rows, size, of_columns)
        is_first, is_last = pair[0] == pair[1], pair[2] != 0
        _bring(to_query, head, token, rows, size, query_gradients, deep, scale, is_first, is_last)
        of_rows = _elements(queries, rows)
        _read_right(queries, deep, query, head, token, rows, size)
        left = _rounded_turned(words, slopes, rows, columns)
        add_product(key_gradients, at, deep, left, 0, 1, WIDTH, queries, 0, deep, columns, size, of_rows)
        _read_right(gradients, deep, gradient, head, token, rows, size)
        left = _rounded_turned(words, weights, rows, columns)
        add_product(value_gradients, at, deep, left, 0, 1, WIDTH, gradients, 0, deep, columns, size, of_rows)


@loop
def backward(
    tiles,
    pairs,
    waves,
    query,
    key,
    value,
    gradient,
    normalisers,
    along,
    to_query,
    to_key,
    to_value,
    kv_heads,
    size,
    scale,
    window,
    cap,
    threads,
):
    """Gradients of query, key and value, of each a tensor of sums in fp32 and that of results, which are the same where
    those are fp32. ``pairs``, int64 (pairs, 4), and ``waves``, int64 (waves + 1,), are those of ``in_waves``. ``along``, fp32 (heads, tokens): the dot products of outputs with their
    gradients, which is all that is needed of outputs. The others as in ``forward``."""
    group, deep = normalisers.shape[0] // kv_heads, _up(size, 32) + 16
    numbers, stored = (size, deep, scale, window, cap), query[0][0]
    key_rows = _operand(stored, _aligned(threads * TILE * deep)).reshape(threads, TILE * deep)
    turned = _operand(stored, _aligned(threads * 2 * deep * WIDTH)).reshape(threads, 2, deep * WIDTH)
    read = _operand(stored, _aligned(threads * 2 * BLOCK * deep)).reshape(threads, 2, BLOCK * deep)
    narrow = _operand(stored, _aligned(threads * BLOCK * WIDTH)).reshape(threads, BLOCK * WIDTH)
    of_keys = _aligned(threads * 2 * TILE * deep).reshape(threads, 2, TILE * deep)
    of_queries = _aligned(threads * BLOCK * deep).reshape(threads, BLOCK * deep)
    scores = _aligned(threads * 2 * BLOCK * WIDTH).reshape(threads, 2, BLOCK * WIDTH)
    for wave in range(len(waves) - 1):
        for thread in prange(threads):
            tensors = (query, gradient, normalisers, along, to_query)
            keys, keys_turned, values_turned = key_rows[thread], turned[thread, 0], turned[thread, 1]
            key_gradients, value_gradients = of_keys[thread, 0], of_keys[thread, 1]
            operands = (keys, keys_turned, values_turned, read[thread, 0], read[thread, 1], narrow[thread])
            results = (key_gradients, value_gradients, of_queries[thread], scores[thread, 0], scores[thread, 1])
            for task in range(thread, (waves[wave + 1] - waves[wave]) * kv_heads, threads):
                pair, kv_head = pairs[waves[wave] + task // kv_heads], task % kv_heads
                token, count = tiles[pair[1], 0], tiles[pair[1], 1]
                _turn(values_turned, value, kv_head, token, count, size, keys, deep)
                _turn(keys_turned, key, kv_head, token, count, size, keys, deep)
                _read_right(keys, deep, key, kv_head, token, count, size)
                used = _up(count, BLOCK) * deep
                key_gradients[:used], value_gradients[:used] = np.float32(0.0), np.float32(0.0)
                for head in range(kv_head * group, (kv_head + 1) * group):
                    _pair_gradients(tiles, pair, head, numbers, tensors, operands, results)
                is_first, is_last, one = pair[0] == pair[1], pair[3] != 0, np.float32(1.0)
                _bring(to_key, kv_head, token, count, size, key_gradients, deep, scale, is_first, is_last)
                _bring(to_value, kv_head, token, count, size, value_gradients, deep, one, is_first, is_last)
