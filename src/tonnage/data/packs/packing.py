"""Packing: whole documents into packs of at most ``capacity`` tokens, as few as a greedy method gets, or in order.

Best-fit decreasing: documents from the longest to the shortest, each into the fullest pack that still has room for it
(Johnson, 1973; at most 11/9 of the best possible number of packs, in practice within a fraction of a percent for
documents much shorter than a pack). What makes it fast here is that documents of equal length are interchangeable:
packs are kept in groups of equal room, and a group takes as many documents of one length as fit in one go. The result
is that of the one-by-one method; time is O(n log n), memory a few integers per document, and nothing depends on the
number of processes or ranks. Where documents are to be trained in the order in which they were given, the next-fit
method leaves them in it.
"""

from __future__ import annotations

import bisect

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int, order: np.ndarray) -> np.ndarray:
    """Pack of every document: int64 (num_documents,), packs numbered from 0.

    ``lengths``: int (num_documents,), each from 1 to ``capacity``. ``order``: a key per document; among documents of
    equal length those with smaller keys are placed first.
    """
    if len(lengths) == 0:
        return np.zeros(0, dtype=np.int64)
    if int(lengths.max()) > capacity or int(lengths.min()) < 1:
        raise ValueError(f"a document has {int(lengths.max())} tokens; a pack holds 1 to {capacity}")
    ranked = np.lexsort((order, -lengths.astype(np.int64)))
    sorted_lengths = lengths[ranked]
    starts = np.flatnonzero(np.r_[True, sorted_lengths[1:] != sorted_lengths[:-1]])
    stops = np.r_[starts[1:], len(ranked)]

    packs = np.zeros(len(lengths), dtype=np.int64)
    num_packs = 0
    rooms: list[int] = []  # the distinct rooms left, ascending
    groups: dict[int, list[np.ndarray]] = {}  # room -> packs with that room

    def put(room: int, members: np.ndarray) -> None:
        if len(members) == 0 or room == 0:
            return
        if room in groups:
            groups[room].append(members)
        else:
            groups[room] = [members]
            bisect.insort(rooms, room)

    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        length = int(sorted_lengths[start])
        at = start
        while at < stop:
            left = stop - at
            place = bisect.bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms.pop(place)
                arrays = groups.pop(room)
                members = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            else:
                room = capacity
                members = np.arange(num_packs, num_packs - (-left // (capacity // length)), dtype=np.int64)
                num_packs += len(members)
            each = room // length
            used = min(len(members), -(-left // each))
            put(room, members[used:])
            full = min(used, left // each)
            packs[ranked[at : at + full * each]] = np.repeat(members[:full], each)
            at += full * each
            put(room - each * length, members[:full])
            if full < used:
                rest = left - full * each
                packs[ranked[at:stop]] = members[full]
                at = stop
                put(room - rest * length, members[full:used])
    return packs


def next_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Pack of every document, int64 (num_documents,), where documents keep their order: each into the last pack if that
    has room for it, else into a new one.

    ``lengths``: int (num_documents,), each from 1 to ``capacity``.
    """
    if len(lengths) and (int(lengths.max()) > capacity or int(lengths.min()) < 1):
        raise ValueError(f"a document has {int(lengths.max())} tokens; a pack holds 1 to {capacity}")
    ends = np.cumsum(lengths, dtype=np.int64)
    packs = np.zeros(len(lengths), dtype=np.int64)
    at = number = 0
    while at < len(lengths):
        before = int(ends[at - 1]) if at else 0
        stop = int(np.searchsorted(ends, before + capacity, side="right"))
        packs[at:stop] = number
        at, number = stop, number + 1
    return packs
