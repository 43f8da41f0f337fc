"""Which tiles of tokens attention computes together: all that see each other, and no two at a time in one place."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tonnage.kernels.attention_tiles import EVERYTHING, TILE, Tile, cut, in_waves

ROWS = {
    "one": ((5000,), (0,), (-1,)),
    "several": ((TILE, 1, TILE + 1, 7), (0, 0, 0, 0), (-1, -1, -1, -1)),
    "a prefix": ((1000, 10, 900, 20), (0, 1000, 1000, 1000), (-1, 0, 0, 0)),
    "a prefix within a prefix": ((500, 30, 400, 2, 3), (0, 500, 500, 900, 500), (-1, 0, 0, 2, 0)),
}
WINDOWS = (EVERYTHING, 1, 2, TILE, 1000)


def documents(row: str) -> list[list[tuple[int, int]]]:
    """Of each part, its tokens: their places in the document and their numbers in the row."""
    lengths, _, parents = ROWS[row]
    starts = [sum(lengths[:part]) for part in range(len(lengths))]
    tokens = list[list[int]]()
    for start, length, parent in zip(starts, lengths, parents, strict=True):
        tokens.append([*(tokens[parent] if parent >= 0 else []), *range(start, start + length)])
    return [
        [(place, token) for place, token in enumerate(all_of_it) if token >= start]
        for start, all_of_it in zip(starts, tokens, strict=True)
    ]


@pytest.mark.parametrize("row", ROWS)
def test_tiles_cover_a_row_once(row: str) -> None:
    tiles = cut(*ROWS[row])
    covered = [(tile.place + i, tile.token + i) for tile in tiles for i in range(tile.length)]
    assert covered == [token for part in documents(row) for token in part]
    assert all(0 < tile.length <= TILE for tile in tiles)
    for number, tile in enumerate(tiles):
        assert (tile.before == -1) == (tile.place == 0)
        if tile.before >= 0:
            assert tile.before < number
            assert tiles[tile.before].place + tiles[tile.before].length == tile.place


def before(tiles: list[Tile], number: int) -> list[int]:
    """A tile and those before it in its document."""
    return [number, *(before(tiles, tiles[number].before) if tiles[number].before >= 0 else [])]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("row", ROWS)
def test_waves_hold_all_that_is_seen_once_and_nothing_twice(row: str, window: int) -> None:
    tiles = cut(*ROWS[row])
    pairs, starts = in_waves(tiles, window)
    wanted = {
        (queries, keys)
        for queries in range(len(tiles))
        for keys in before(tiles, queries)
        if keys == queries or tiles[queries].place - (tiles[keys].place + tiles[keys].length - 1) < window
    }
    assert len(pairs) == len(wanted)
    assert {(pair.queries, pair.keys) for pair in pairs} == wanted
    assert (starts[0], starts[-1]) == (0, len(pairs))
    for start, end in pairwise(starts):
        for side in ("queries", "keys"):
            assert len({getattr(pair, side) for pair in pairs[start:end]}) == end - start > 0
    for number, tile in enumerate(tiles):  # is first in its pair with itself, and last in one that says so
        for side, ends in (("queries", "ends_queries"), ("keys", "ends_keys")):
            of_tile = [pair for pair in pairs if getattr(pair, side) == number]
            assert (of_tile[0].queries, of_tile[0].keys) == (number, number), tile
            assert [getattr(pair, ends) for pair in of_tile] == [*[False] * (len(of_tile) - 1), True]
