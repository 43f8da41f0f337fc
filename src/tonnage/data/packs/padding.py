"""Which documents of a step go through the model together, each in a row of its own that is padded at the right.

A forward computes as many tokens as it has rows, times the longest of them. Documents are sorted by length and cut into
forwards so that the least is computed; every forward costs as much as ``FORWARD_TOKENS`` more. This changes neither
the documents of a step nor its loss.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

Lengths = TypeVar("Lengths", int, np.ndarray)
FORWARD_TOKENS = 128
"""What a forward costs whatever it computes, in tokens: weights are read once, and operations called."""


def in_chunks(lengths: Lengths, chunk: int) -> Lengths:
    """Numbers of tokens, each as a multiple of ``chunk``."""
    return -(-lengths // chunk) * chunk


def of_pairs(lengths: np.ndarray, forks: np.ndarray, chunk: int = 1) -> np.ndarray:
    """Tokens of two rows of their own for the answers of every pair, each with its prompt, the shorter one padded:
    int64 (pairs,). ``lengths`` (pairs,); ``forks`` (pairs, 2), as of a ``Pack``."""
    shared, second = forks[:, 0], forks[:, 1]
    longer: np.ndarray = np.maximum(second, shared + lengths - second).astype(np.int64)
    return 2 * in_chunks(longer, chunk)


def forwards(lengths: np.ndarray, most_tokens: int) -> list[np.ndarray]:
    """Cut documents of some ``lengths``, (documents,), into forwards of at most ``most_tokens``, padding included.

    Returns indices of documents, for each forward; the longest come first. Of documents that are as long, those that
    come first stay first.

    Raises:
        ValueError: a document counts for more than ``most_tokens``.
    """
    order = np.argsort(-lengths, kind="stable")
    sizes = lengths[order].astype(np.int64)
    number = len(sizes)
    if number and sizes[0] > most_tokens:
        raise ValueError(f"a document of {lengths[order[0]]:,} tokens, forwards of {most_tokens:,} at most")
    least = np.zeros(number + 1, dtype=np.int64)  # tokens, from each document on
    ends = np.zeros(number + 1, dtype=np.int64)
    for first in range(number - 1, -1, -1):
        most = min(number, first + most_tokens // int(sizes[first]))
        stops = np.arange(first + 1, most + 1)
        costs = sizes[first] * (stops - first) + FORWARD_TOKENS + least[first + 1 : most + 1]
        best = int(np.argmin(costs))
        least[first], ends[first] = costs[best], stops[best]
    batches, first = [], 0
    while first < number:
        batches.append(order[first : ends[first]])
        first = int(ends[first])
    return batches
