"""What documents begin with alike: the header of a template, a system prompt, a passage that many questions are about.

What follows does not change what was before, so documents that begin with the same tokens have the same hidden states
there, and a row of them needs to compute these once. Which beginnings are worth looking for is found once, over all
documents, so that a plan knows how long rows will be before there are any. A prefix may go on in longer ones:

    header ─┬─ system prompt a ─┬─ passage 1
            │                   └─ passage 2
            └─ system prompt b
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from tonnage.data.tokens.documents import Lists

LEAST = 16
"""Tokens that a prefix has beyond the one that it goes on from: what is shorter is not worth computing apart."""
MOST = 64
"""Prefixes that are found at most."""
RARE = 128
"""What less than one of so many documents begins with is hardly ever twice in a row."""


@dataclass(frozen=True)
class Prefix:
    """What some documents begin with, each going on after it."""

    length: int
    """Tokens, from the first on."""
    parent: int
    """Number of the prefix that it goes on from; -1 if there is none."""


def chain(prefixes: Sequence[Prefix], number: int) -> tuple[int, ...]:
    """A prefix and those that it goes on from, the shortest first; nothing for -1."""
    numbers: list[int] = []
    while number >= 0:
        numbers.append(number)
        number = prefixes[number].parent
    return tuple(reversed(numbers))


def within(prefixes: Sequence[Prefix], numbers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Of documents cut to ``lengths``, the longest prefixes of theirs after which they still go on."""
    length, parent = (
        np.array([*(prefix.length for prefix in prefixes), 0]),
        [*(prefix.parent for prefix in prefixes), -1],
    )
    result = numbers.copy()
    while (short := length[result] >= lengths).any():
        result[short] = np.array(parent, dtype=result.dtype)[result[short]]
    return result


class _Corpus:
    """All documents, a batch at a time."""

    def __init__(self, batches: Iterable[Lists]) -> None:
        self._batches = list(batches)
        self._ends = np.cumsum([len(batch.offsets) - 1 for batch in self._batches])
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(batch.offsets) for batch in self._batches)])

    def tokens(self, documents: np.ndarray, begin: int, end: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Tokens from ``begin`` to ``end`` of documents that have so many, in order: of which of them, and
        (those, end - begin)."""
        borders = np.searchsorted(documents, self._ends)
        first = 0
        for batch, start, stop in zip(self._batches, [0, *borders], borders, strict=False):
            if stop > start:
                places = batch.offsets[documents[start:stop] - first]
                yield slice(start, stop), batch.values[places[:, None] + np.arange(begin, end)]
            first += len(batch.offsets) - 1


def find_prefixes(batches: Iterable[Lists]) -> tuple[tuple[Prefix, ...], np.ndarray]:
    """The prefixes that documents have in common, and of every document the longest of them: int16, -1 for none.

    Documents belong together if they have the same ``LEAST`` tokens next, and share what all of these go on with.
    """
    corpus, prefixes = _Corpus(batches), list[Prefix]()
    prefix_of = np.full(len(corpus.lengths), -1, dtype=np.int16)
    fewest = max(2, -(-len(prefix_of) // RARE))
    waiting = [(-len(prefix_of), 0, -1)]  # the largest first: its documents, what they share, which prefix that is
    while waiting and len(prefixes) < MOST:
        _, shared, parent = heappop(waiting)
        documents = np.flatnonzero((prefix_of == parent) & (corpus.lengths > shared + LEAST))
        for members in _alike(corpus, documents, shared, fewest)[: MOST - len(prefixes)]:
            length = shared + _in_common(corpus, members, shared)
            if length < shared + LEAST:  # keys were equal by chance
                continue
            prefix_of[members] = len(prefixes)
            heappush(waiting, (-len(members), length, len(prefixes)))
            prefixes.append(Prefix(length, parent))
    return tuple(prefixes), prefix_of


def _alike(corpus: _Corpus, documents: np.ndarray, begin: int, fewest: int) -> list[np.ndarray]:
    """The documents by their next ``LEAST`` tokens, where at least ``fewest`` have the same; the most first."""
    keys = np.zeros(len(documents), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for some, tokens in corpus.tokens(documents, begin, begin + LEAST):
            key = keys[some]
            for column in tokens.astype(np.uint64).T:
                key = (key ^ column) * np.uint64(0x9E3779B97F4A7C15)
                key ^= key >> np.uint64(29)
            keys[some] = key
    contents, counts = np.unique(keys, return_counts=True)
    many = np.flatnonzero(counts >= fewest)
    return [documents[keys == contents[at]] for at in many[np.argsort(-counts[many], kind="stable")]]


def _in_common(corpus: _Corpus, documents: np.ndarray, begin: int) -> int:
    """How many tokens all documents have alike from ``begin`` on, each going on after them."""
    end = int(corpus.lengths[documents].min()) - 1
    (_, first), *_ = corpus.tokens(documents[:1], begin, end)
    for some in (documents[-1:], documents):  # hardly more than what they share is read of all of them
        for _, tokens in corpus.tokens(some, begin, begin + first.shape[1]):
            differ = (tokens[:, : first.shape[1]] != first).any(axis=0)
            first = first[:, : int(differ.argmax())] if differ.any() else first
    return int(first.shape[1])
