"""Where the pieces of a document begin that is longer than a pack (``over_length: split``).

A piece is some tokens of the document that are its own and, before them, up to ``overlap`` tokens of the piece before:
context that it sees and that is not trained a second time. So each supervised token is supervised once, and with an
overlap has something before it wherever a cut falls.

A piece ends at the last border of the best kind in the later half of its room: a turn's end where turns are asked for,
else a paragraph's, else a line's or a sentence's; where there is none, its room is filled. What ends a line or a
sentence is read off the tokens themselves: a token that ends in a line break; one that ends in a mark such as a full
stop, before a token that begins with white space. An abbreviation counts as a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tonnage.data.text.masks import Span

SplitAt = Literal["tokens", "sentences", "turns"]
MARKS, WIDE_MARKS = ".!?…", "。！？｡"
"""That end a sentence before white space, and by themselves."""
CLOSING = "\"'”’»)]}*_`」』）"
"""Characters that may stand behind such a mark."""
SPACES = ("Ġ", "▁", "Ċ")
"""With which tokens begin that stand for white space in vocabularies of bytes and of SentencePiece."""
BREAK, TWO_BREAKS, MARK, WIDE_MARK, CLOSES, SPACE, STARTS_BREAK = (1 << bit for bit in range(7))


class Piece(NamedTuple):
    """Some tokens of a document."""

    start: int
    """The first that it sees."""
    own: int
    """The first that is its own."""
    stop: int


def pieces(length: int, room: int, overlap: int, borders: Sequence[np.ndarray]) -> list[Piece]:
    """The pieces of a document of ``length`` tokens, each of at most ``room``; ``borders``: by kind, the best first,
    where a piece may end, ascending."""
    assert 0 <= overlap < room
    cut = [Piece(0, 0, _end(0, min(room, length), length, borders))]
    while (own := cut[-1].stop) < length:
        start = max(own - overlap, 0)
        cut.append(Piece(start, own, _end(own, min(start + room, length), length, borders)))
    return cut


def _end(own: int, limit: int, length: int, borders: Sequence[np.ndarray]) -> int:
    if limit == length:
        return limit
    for places in borders:
        at = int(np.searchsorted(places, limit, side="right")) - 1
        if at >= 0 and places[at] > own + (limit - own) // 2:
            return int(places[at])
    return limit


class Borders:
    """Finds where pieces of documents may end, in tokens of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, at: SplitAt) -> None:
        self._at = at
        self._kinds = _kinds(tokenizer) if at != "tokens" else np.zeros(0, dtype=np.uint8)

    def find(self, tokens: np.ndarray, spans: Sequence[Span]) -> list[np.ndarray]:
        """By kind, the best first: the numbers of tokens after which a piece may end, ascending."""
        if self._at == "tokens":
            return []
        kinds = np.zeros(len(tokens) + 1, dtype=np.uint8)
        is_token = tokens < len(self._kinds)
        kinds[:-1][is_token] = self._kinds[tokens[is_token]]
        this, after = kinds[:-1], kinds[1:]
        breaks = (this & BREAK > 0) & (after & STARTS_BREAK == 0)
        before = np.concatenate([[0], this[:-1]])
        paragraphs = breaks & ((this & TWO_BREAKS > 0) | (before & BREAK > 0))
        mark, wide, closes = (this & kind > 0 for kind in (MARK, WIDE_MARK, CLOSES))
        for _ in range(2):  # closing characters may be tokens of their own
            mark[1:] |= closes[1:] & mark[:-1]
            wide[1:] |= closes[1:] & wide[:-1]
        sentences = (wide & ~np.append(closes[1:], False)) | (mark & (after & SPACE > 0))
        borders = [np.flatnonzero(paragraphs) + 1, np.flatnonzero(breaks | sentences) + 1]
        if self._at == "turns":
            borders.insert(0, np.array(sorted({stop for _, stop, _ in spans}), dtype=np.int64))
        return borders


def _kinds(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Of every token of a vocabulary what its text begins and ends with: uint8 (tokens,)."""
    size = max(tokenizer.get_vocab().values()) + 1
    names = tokenizer.convert_ids_to_tokens(list(range(size)))
    texts = tokenizer.batch_decode([[number] for number in range(size)], clean_up_tokenization_spaces=False)
    kinds = np.zeros(size, dtype=np.uint8)
    for number, (name, text) in enumerate(zip(names, texts, strict=True)):
        closed = text.rstrip(CLOSING)
        kinds[number] = (
            BREAK * text.endswith("\n")
            + TWO_BREAKS * text.endswith("\n\n")
            + MARK * closed.endswith(tuple(MARKS))
            + WIDE_MARK * closed.endswith(tuple(WIDE_MARKS))
            + CLOSES * (text != "" and not closed)
            + SPACE * (text[:1].isspace() or (name or "").startswith(SPACES))
            + STARTS_BREAK * text.startswith("\n")
        )
    return kinds
