"""Texts so long that their encoding would fill the memory, tokenised in pieces that give the tokens of the whole.

For tokenizers that encode word by word (``words`` says which) a text may be cut where no split pattern goes across:
before a space that follows another ASCII character, and behind a line break between two characters that are no white
space. What ends at such a place and what begins there are the same words alone as together. Each cut is tried out all
the same, on the characters around it, and left out where they say otherwise.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONG = 1 << 20
"""Characters of a text that is worth it."""
PIECE = 1 << 18
"""Characters of a piece at least; an encoding holds some 200 bytes for each token."""
AROUND = 256
"""Characters on both sides of a cut that are tokenised to try it out."""
_CUT = re.compile(r"(?<=[!-~])(?= )|(?<=\S\n)(?=\S)")

Ids = Callable[[str], list[int]]


def may_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether no token that is matched before words are cut could lie across a cut, or take white space along."""
    added = tokenizer.get_added_tokens_decoder().values()
    return not any(token.lstrip or token.rstrip or re.search(r"\s", token.content) for token in added)


def ids_in_pieces(text: str, ids: Ids) -> np.ndarray | None:
    """Tokens of a text, int32 (num_tokens,), of which one piece after another is tokenised; None where it has no place
    for a cut."""
    borders = [0]
    while (cut := _cut_after(text, borders[-1] + PIECE, ids)) is not None:
        borders.append(cut)
    if len(borders) == 1:
        return None
    borders.append(len(text))
    pieces = (text[start:stop] for start, stop in itertools.pairwise(borders))
    return np.concatenate([np.array(ids(piece), dtype=np.int32) for piece in pieces])


def _cut_after(text: str, start: int, ids: Ids) -> int | None:
    for match in _CUT.finditer(text, start, len(text) - 1) if start < len(text) else ():
        at = match.start()
        left, right = text[at - AROUND : at], text[at : at + AROUND]
        if ids(left) + ids(right) == ids(left + right):
            return at
    return None
