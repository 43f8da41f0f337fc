"""Which tiles of tokens attention on the CPU computes together, and in which order (``attention_loops``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TILE = 384
"""Tokens of a tile at most: a multiple of every ``tiles.BLOCK``. Keys, values and sums of their gradients are in a
core's cache."""
EVERYTHING = 1 << 62
"""A window that hides nothing."""
_STEP = 64
"""Tiles of a part are a multiple of so many tokens, but for the last."""


class Tile(NamedTuple):
    """Tokens of one part of a row that lie side by side."""

    token: int
    """Its first one's number in the row."""
    length: int
    place: int
    """Of its first token in the document."""
    before: int
    """Number of the tile that comes before it in its document, -1 of the first."""


class Pair(NamedTuple):
    """A tile of queries and one of keys, of which a token of the first sees one of the second."""

    queries: int
    keys: int
    ends_queries: bool
    """Whether it is the last pair with this tile of queries. The first one is the tile with itself."""
    ends_keys: bool
    """Whether it is the last pair with this tile of keys."""


def cut(lengths: Sequence[int], places: Sequence[int], parents: Sequence[int]) -> list[Tile]:
    """Tiles of all parts of a row, in its order.

    Of each part: tokens, the place of the first one in its documents, and the part that it goes on from, -1 for none.
    """
    tiles, last_tiles, token = list[Tile](), list[int](), 0
    for length, place, parent in zip(lengths, places, parents, strict=True):
        num_tiles = -(-length // TILE)
        step = -(-length // (num_tiles * _STEP)) * _STEP
        before = last_tiles[parent] if parent >= 0 else -1
        for start in range(0, length, step):
            tiles.append(Tile(token + start, min(step, length - start), place + start, before))
            before = len(tiles) - 1
        last_tiles.append(before)
        token += length
    return tiles


def in_waves(tiles: Sequence[Tile], window: int) -> tuple[list[Pair], list[int]]:
    """All pairs, wave by wave, and the number of the first pair of each wave, with that of all pairs at the end.

    No two pairs of a wave have a tile of queries or one of keys in common; the largest of a wave come first.
    ``window``: tokens that a token sees, itself among them.
    """
    waves = list[list[tuple[int, int]]]()
    of_queries, of_keys = [0] * len(tiles), [0] * len(tiles)  # the first wave in which nothing has the tile
    going = [(number, number) for number in range(len(tiles))]
    while going:
        for queries, keys in going:
            number = max(of_queries[queries], of_keys[keys])
            of_queries[queries] = of_keys[keys] = number + 1
            waves.extend([] for _ in range(number + 1 - len(waves)))
            waves[number].append((queries, keys))
        next_keys = ((queries, tiles[keys].before) for queries, keys in going)
        going = [
            (queries, keys)
            for queries, keys in next_keys
            if keys >= 0 and tiles[keys].place + tiles[keys].length > tiles[queries].place - window + 1
        ]
    starts = [0]
    for wave in waves:
        wave.sort(key=lambda pair: -tiles[pair[0]].length * tiles[pair[1]].length)
        starts.append(starts[-1] + len(wave))
    pairs = [pair for wave in waves for pair in wave]
    last_of_queries = {queries: number for number, (queries, _) in enumerate(pairs)}
    last_of_keys = {keys: number for number, (_, keys) in enumerate(pairs)}
    return [
        Pair(queries, keys, last_of_queries[queries] == number, last_of_keys[keys] == number)
        for number, (queries, keys) in enumerate(pairs)
    ], starts
