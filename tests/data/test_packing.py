"""Packing against the one-by-one methods, written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.data.packs.packing import best_fit, next_fit


def one_by_one(lengths: list[int], capacity: int, order: list[int]) -> list[int]:
    """Best-fit decreasing as the textbook has it: rooms of the packs that come out, sorted."""
    rooms: list[int] = []
    for at in sorted(range(len(lengths)), key=lambda n: (-lengths[n], order[n])):
        fitting = [n for n, room in enumerate(rooms) if room >= lengths[at]]
        if fitting:
            rooms[min(fitting, key=lambda n: rooms[n])] -= lengths[at]
        else:
            rooms.append(capacity - lengths[at])
    return sorted(rooms)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 60), st.data())
def test_equals_the_textbook(capacity: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=80))
    order = list(range(len(lengths)))
    packs = best_fit(np.array(lengths, dtype=np.int32), capacity, np.array(order))
    used = np.bincount(packs, weights=lengths) if lengths else np.zeros(0)
    assert (used <= capacity).all()
    assert (used > 0).all(), "no pack is empty"
    assert sorted(capacity - used) == one_by_one(lengths, capacity, order)


def test_a_million_documents_take_seconds_and_fill_well() -> None:
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.lognormal(5, 1, 1_000_000).astype(np.int32) + 1, 2048)
    packs = best_fit(lengths, 2048, np.arange(len(lengths)))
    used = np.bincount(packs, weights=lengths)
    assert used.max() <= 2048
    assert lengths.sum() / (len(used) * 2048) > 0.999


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError):
        best_fit(np.array([5, 11]), 10, np.arange(2))


@given(st.lists(st.integers(1, 20), max_size=60))
def test_next_fit_opens_a_pack_only_where_a_document_does_not_fit(lengths: list[int]) -> None:
    packs = next_fit(np.array(lengths, dtype=np.int64), 20).tolist()
    number, room, expected = -1, 0, []
    for length in lengths:
        if length > room:
            number, room = number + 1, 20
        room -= length
        expected.append(number)
    assert packs == expected


def test_next_fit_refuses_what_no_pack_holds() -> None:
    with pytest.raises(ValueError, match="holds 1 to 4"):
        next_fit(np.array([3, 5]), 4)
