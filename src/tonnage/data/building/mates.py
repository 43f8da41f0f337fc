"""Answers to other prompts: what a document of an answer with a label (KTO) has beside its own.

Their likelihood, of a prompt and an answer that do not belong together, tells how far a model has moved in all (z0 of
``training.kto``). A row's mate is the next of its part with another prompt, or for the last ones the one before, so
that rows to the same prompt, which often follow one another, are not taken for mismatched. Both answers are one
document that parts, as a pair's: ``prompt | own answer | the mate's answer``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from tonnage.data.tokens.encoder import Document, Fork
from tonnage.forms.conversation import RowError

LABEL = "desirable"
"""Name of the number that goes with such a document: 1 if its own answer is desirable, else 0."""
Result = tuple[int, Document | RowError]


def with_mates(results: Iterable[Result]) -> Iterator[Result]:
    """Documents of a part, each with its mate's answer; an error where no other row has another prompt."""
    waiting: list[tuple[int, Document]] = []
    before: Document | None = None
    for row, result in results:
        if isinstance(result, RowError):
            yield row, result
            continue
        if waiting and not np.array_equal(_prompt(waiting[0][1]), _prompt(result)):
            yield from ((number, mated(document, result)) for number, document in waiting)
            before, waiting = waiting[-1][1], []
        waiting.append((row, result))
    for row, document in waiting:
        yield row, _without_mate() if before is None else mated(document, before)


def mated(document: Document, mate: Document) -> Document:
    """A document with the answer of another one behind its own."""
    own_start, _, weight = document.spans[0]
    mate_start = mate.spans[0][0]
    fork = Fork(own_start, len(document.tokens))
    shift = fork.second - mate_start
    spans = [*document.spans, *((start + shift, stop + shift, weight) for start, stop, _ in mate.spans)]
    tokens = np.concatenate([document.tokens, mate.tokens[mate_start:]])
    return replace(document, tokens=tokens, spans=spans, fork=fork, has_mate=True)


def _prompt(document: Document) -> np.ndarray:
    return document.tokens[: document.spans[0][0]]


def _without_mate() -> RowError:
    return RowError(
        "no_mate",
        "no other row of its part of the file has another prompt, whose answer could be compared with its own",
        "add rows with other prompts to the file, or leave such rows out: data.on_bad_row: skip",
    )
