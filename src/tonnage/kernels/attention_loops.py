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

Products multiply fp32, or words of two bf16 numbers where the processor does (``attention_operands``): then weights and
gradients of scores are rounded to bf16 before they are multiplied, as torch's are. Scores, what makes weights of them,
and all sums are fp32 in any case.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from tonnage.kernels.attention_operands import (
    WIDTH,
    add_to_rows,
    as_operand,
    cut_off,
    elements_of,
    read_columns,
    read_right,
    read_rows,
    rounded_columns,
    rounded_rows,
    up_to,
    write_rows,
)
from tonnage.kernels.attention_tiles import TILE
from tonnage.kernels.bits import LOG2_E, exponential
from tonnage.kernels.loops import inner, loop
from tonnage.kernels.tile_registers import begin_tiles, end_tiles
from tonnage.kernels.tiles import BLOCK, add_product, set_product
from tonnage.kernels.vectors import LANES, exponentials, largest, weights_and_slopes


def scratch_numbers(size: int) -> int:
    """How many fp32 numbers of memory loops need for each of their threads, with heads of such a ``size``."""
    deep = -(-size // 32) * 32 + 16
    return 3 * TILE * deep + 2 * deep * WIDTH + 3 * BLOCK * deep + 3 * BLOCK * WIDTH + 16 * LANES


@inner
def _bring(gradients, head, token, count, size, rows, width, factor, is_first, is_last):
    """What a pair has of the gradients of so many tokens of a head: rows of a matrix, ``width`` apart, times
    ``factor``. The first pair that has any begins sums in fp32, the last stores them as results, rounded; what is fp32
    has no other sums than its results."""
    sums, place, results, result_place = gradients
    if not is_first:
        add_to_rows(rows, width, (sums, place), head, token, count, size, factor)
        factor = np.float32(1.0)
    if is_last:
        write_rows((results, result_place), head, token, count, size, rows, width, factor)
    else:
        write_rows((sums, place), head, token, count, size, rows, width, factor)


@inner
def _visible(place, key_place, count, window):
    """From and to which of ``count`` keys, the first of them in place ``key_place``, a token in ``place`` sees."""
    return max(0, min(count, place - window + 1 - key_place)), max(0, min(count, place + 1 - key_place))


@inner(fastmath={"contract"})
def _capped(scores, row, columns, scale, cap):
    """Squash scores, times ``scale``, to (-cap, cap): cap times the hyperbolic tangent of their part of it."""
    for j in range(columns):
        at = np.uint64(row + j)
        x = scale * scores[at] / cap
        shrunk = exponential(np.float32(-2.0) * abs(x))
        squashed = (np.float32(1.0) - shrunk) / (np.float32(1.0) + shrunk)
        scores[at] = cap * (squashed if x >= np.float32(0.0) else -squashed)


@inner
def _columns(tiles, pair, start, window):
    """Rows of the block of queries that begins at ``start`` of its tile, and from and to which of the other tile's keys
    they see any, in whole blocks."""
    rows = min(BLOCK, tiles[pair[0], 1] - start)
    place, key_place, count = tiles[pair[0], 2] + start, tiles[pair[1], 2], tiles[pair[1], 1]
    first, _ = _visible(place, key_place, count, window)
    _, last = _visible(place + rows - 1, key_place, count, window)
    return rows, first // BLOCK * BLOCK, up_to(last, BLOCK) if last > first else first // BLOCK * BLOCK


@inner
def _attend_pair(tiles, pair, numbers, operands, results):
    """Add the values of a tile of keys to what a tile of queries has of those before."""
    size, deep, scale, window, cap = numbers
    queries, keys, values, weights, words = operands
    outputs, most, whole = results
    depth, factor = elements_of(queries, size), np.float32(LOG2_E)
    if cap == np.float32(0.0):
        factor *= scale
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
        left, right = rounded_rows(words, weights, rows, columns), elements_of(values, first) * deep
        add_product(outputs, at, deep, left, 0, WIDTH, 1, values, right, deep, rows, size, elements_of(values, columns))


@loop
def forward(tiles, query, key, value, output, sinks, normalisers, kv_heads, size, scale, window, cap, scratch):
    """Output and normalisers, fp32 (heads, tokens).

    ``tiles``: int64 (tiles, 4), of each a ``Tile``. ``sinks``: fp32 (heads,), -inf for none. ``window``: tokens that
    one sees, itself among them. ``cap``: what scores are squashed to, fp32, 0 for none.
    ``scratch``: fp32 (threads, ``scratch_numbers``), for as many threads as there are (numba cannot keep a loop that
    asks).
    """
    heads, deep = normalisers.shape[0], up_to(size, 32) + 16
    numbers, threads = (size, deep, scale, window, cap), len(scratch)
    for thread in prange(threads):
        scratch[thread, :] = np.float32(0.0)
        outputs, rest = cut_off(scratch[thread], TILE * deep)
        weights, rest = cut_off(rest, BLOCK * WIDTH)
        queries, elements = cut_off(as_operand(query[0][0], rest), TILE * deep)
        values, elements = cut_off(elements, TILE * deep)
        words, elements = cut_off(elements, BLOCK * WIDTH)
        keys, _ = cut_off(elements, deep * WIDTH)
        most, whole = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
        begin_tiles()
        # A thread takes every n-th task, beginning with the ends of documents, which see most.
        for task in range(thread, len(tiles) * heads, threads):
            tile, head = len(tiles) - 1 - task // heads, task % heads
            token, length, place, kv_head = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], head // (heads // kv_heads)
            read_rows(queries, deep, query, head, token, length, size)
            outputs[: up_to(length, BLOCK) * deep] = np.float32(0.0)
            most[:], whole[:] = -np.float32(np.inf), np.float32(0.0)
            key_tile = tile
            while key_tile >= 0 and tiles[key_tile, 2] + tiles[key_tile, 1] > place - window + 1:
                key_token, count = tiles[key_tile, 0], tiles[key_tile, 1]
                read_columns(keys, key, kv_head, key_token, count, size, values, deep)
                read_right(values, deep, value, kv_head, key_token, count, size)
                operands, results = (queries, keys, values, weights, words), (outputs, most, whole)
                _attend_pair(tiles, (tile, key_tile), numbers, operands, results)
                key_tile = tiles[key_tile, 3]
            sink = np.float32(LOG2_E) * sinks[head]
            for row in range(length):
                shrink = np.float32(1.0)
                if sink > most[row]:
                    shrink = np.exp2(most[row] - sink)
                    most[row], whole[row] = sink, whole[row] * shrink + np.float32(1.0)
                elif sink > -np.float32(np.inf):
                    whole[row] += np.exp2(sink - most[row])
                normalisers[head, token + row] = (most[row] + np.log2(whole[row])) / np.float32(LOG2_E)
                shrink /= whole[row]
                for j in range(size):
                    outputs[np.uint64(row * deep + j)] *= shrink
            write_rows(output, head, token, length, size, outputs, deep, np.float32(1.0))
        end_tiles()


@inner(fastmath={"contract"})
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


@inner
def _pair_gradients(tiles, pair, head, numbers, tensors, operands, results):
    """Add what a head's queries of one tile and keys of another have of gradients: those of queries to their tensor,
    those of keys and values to the first two of ``results``."""
    size, deep, scale, window, cap = numbers
    query, gradient, normalisers, along, to_query = tensors
    keys, keys_turned, values_turned, queries, gradients, words = operands
    key_gradients, value_gradients, query_gradients, weights, slopes = results
    place, key_place, count = tiles[pair[0], 2], tiles[pair[1], 2], tiles[pair[1], 1]
    depth = elements_of(queries, size)
    for start in range(0, tiles[pair[0], 1], BLOCK):
        rows, first, last = _columns(tiles, pair, start, window)
        columns, token, at = last - first, tiles[pair[0], 0] + start, first * deep
        if columns == 0:
            if pair[2]:
                query_gradients[:] = np.float32(0.0)
                _bring(to_query, head, token, rows, size, query_gradients, deep, scale, False, True)
            continue
        read_rows(queries, deep, query, head, token, rows, size)
        read_rows(gradients, deep, gradient, head, token, rows, size)
        set_product(weights, 0, WIDTH, queries, 0, deep, 1, keys_turned, first, WIDTH, rows, columns, depth)
        set_product(slopes, 0, WIDTH, gradients, 0, deep, 1, values_turned, first, WIDTH, rows, columns, depth)
        for row in range(rows):
            own = _visible(place + start + row, key_place, count, window)
            own, of_row = (own[0] - first, own[1] - first), (normalisers[head, token + row], along[head, token + row])
            _slopes(weights, slopes, row * WIDTH, own, columns, of_row, scale, cap)
        left, right = rounded_rows(words, slopes, rows, columns), elements_of(keys, first) * deep
        of_columns = elements_of(keys, columns)
        set_product(query_gradients, 0, deep, left, 0, WIDTH, 1, keys, right, deep, rows, size, of_columns)
        is_first, is_last = pair[0] == pair[1], pair[2] != 0
        _bring(to_query, head, token, rows, size, query_gradients, deep, scale, is_first, is_last)
        read_right(queries, deep, query, head, token, rows, size)
        left, step, beside, of_rows = rounded_columns(words, slopes, rows, columns)
        add_product(key_gradients, at, deep, left, 0, step, beside, queries, 0, deep, columns, size, of_rows)
        read_right(gradients, deep, gradient, head, token, rows, size)
        left, step, beside, of_rows = rounded_columns(words, weights, rows, columns)
        add_product(value_gradients, at, deep, left, 0, step, beside, gradients, 0, deep, columns, size, of_rows)


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
    scratch,
):
    """Gradients of query, key and value: of each a tensor of sums in fp32 and one of results, which are the same where
    results are fp32. ``pairs``, int64 (pairs, 4), and ``waves``, int64 (waves + 1,), are those of ``in_waves``.
    ``along``, fp32 (heads, tokens): the dot products of outputs with their gradients, which is all that is needed of
    outputs. The others as in ``forward``."""
    group, deep = normalisers.shape[0] // kv_heads, up_to(size, 32) + 16
    numbers, threads = (size, deep, scale, window, cap), len(scratch)
    for wave in range(len(waves) - 1):
        for thread in prange(threads):
            if wave == 0:
                scratch[thread, :] = np.float32(0.0)
            tensors = (query, gradient, normalisers, along, to_query)
            key_gradients, rest = cut_off(scratch[thread], TILE * deep)
            value_gradients, rest = cut_off(rest, TILE * deep)
            query_gradients, rest = cut_off(rest, BLOCK * deep)
            weights, rest = cut_off(rest, BLOCK * WIDTH)
            slopes, rest = cut_off(rest, BLOCK * WIDTH)
            keys, elements = cut_off(as_operand(query[0][0], rest), TILE * deep)
            keys_turned, elements = cut_off(elements, deep * WIDTH)
            values_turned, elements = cut_off(elements, deep * WIDTH)
            queries, elements = cut_off(elements, BLOCK * deep)
            gradients, elements = cut_off(elements, BLOCK * deep)
            words, _ = cut_off(elements, BLOCK * WIDTH)
            operands = (keys, keys_turned, values_turned, queries, gradients, words)
            results = (key_gradients, value_gradients, query_gradients, weights, slopes)
            begin_tiles()
            for task in range(thread, (waves[wave + 1] - waves[wave]) * kv_heads, threads):
                pair, kv_head = pairs[waves[wave] + task // kv_heads], task % kv_heads
                token, count = tiles[pair[1], 0], tiles[pair[1], 1]
                read_columns(values_turned, value, kv_head, token, count, size, keys, deep)
                read_columns(keys_turned, key, kv_head, token, count, size, keys, deep)
                read_right(keys, deep, key, kv_head, token, count, size)
                used = up_to(count, BLOCK) * deep
                key_gradients[:used], value_gradients[:used] = np.float32(0.0), np.float32(0.0)
                for head in range(kv_head * group, (kv_head + 1) * group):
                    _pair_gradients(tiles, pair, head, numbers, tensors, operands, results)
                is_first, is_last, as_it_is = pair[0] == pair[1], pair[3] != 0, np.float32(1.0)
                _bring(to_key, kv_head, token, count, size, key_gradients, deep, scale, is_first, is_last)
                _bring(to_value, kv_head, token, count, size, value_gradients, deep, as_it_is, is_first, is_last)
            end_tiles()
