"""Tokens into text that can be sent at once: whole characters, and nothing that may become a stop word."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT_TOKENS = 64
"""Of a prompt that are decoded with what goes on from it."""
_HALF = "\ufffd"
"""Stands where the bytes of a character are not all there."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token that is one byte, where characters without a token are written in bytes."""


@dataclass(frozen=True)
class Token:
    id: int
    logprob: float | None = None
    """Natural logarithm of its probability, at temperature 1; ``None`` where nobody asked."""
    likeliest: tuple[tuple[int, float], ...] = ()
    """Tokens that were the likeliest there, with the logarithms of their probabilities."""


@dataclass
class Pieces:
    """The text of an answer as it grows."""

    decode: Callable[[Sequence[int]], str]
    """Tokens -> text, without special tokens."""
    stops: Sequence[str] = ()
    """Words before which the answer ends."""
    is_byte: Callable[[int], bool] = lambda token: False
    """Whether a token is one byte of a text."""
    tokens: list[Token] = field(default_factory=list)
    stopped: bool = False
    """Whether a stop word came."""
    whole: str = ""
    """The text of all tokens, decoded at once, up to a stop word."""
    text: str = ""
    """What was sent, as the decoder has it now."""
    _waiting: list[tuple[Token, int]] = field(default_factory=list)
    """Tokens that were not sent, with the length of the text that was settled before each."""
    _settled: int = 0
    """Length of the text that further tokens leave as it is."""

    def add(self, token: Token) -> tuple[str, list[Token]]:
        """Take a token; returns text that can be sent now, which may be none, and the tokens that it came from."""
        self.tokens.append(token)
        self._waiting.append((token, self._settled))
        self.whole = self.decode([one.id for one in self.tokens])
        if not self.is_byte(token.id):  # one byte that fits nowhere makes replacements of all those around it
            self._settled = len(self.whole.rstrip(_HALF))
        places = [at for stop in self.stops if (at := self.whole.find(stop)) >= 0]
        if places:
            self.stopped = True
            self.whole = self.whole[: min(places)]
            return self._sent(self.whole)
        settled = self.whole[: self._settled]
        return self._sent(settled[: len(settled) - self._begun(settled)])

    def end(self) -> tuple[str, list[Token]]:
        """The rest of the text, where no more tokens come."""
        if self.stopped:
            return "", []
        waiting = [token for token, _ in self._waiting]
        return self._sent(self.whole)[0], waiting

    def _begun(self, settled: str) -> int:
        """Characters at the end that may turn out to be the beginning of a stop word."""
        return max(
            (size for stop in self.stops for size in range(1, len(stop)) if settled.endswith(stop[:size])), default=0
        )

    def _sent(self, ready: str) -> tuple[str, list[Token]]:
        new = _beyond(self.text, ready)
        if not new:
            return "", []
        self.text = ready
        sent = [token for token, before in self._waiting if before < len(ready)]
        self._waiting = [one for one in self._waiting if one[1] >= len(ready)]
        return new, sent


def pieces_of(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = (), after: Sequence[int] = ()) -> Pieces:
    """For an answer in tokens of ``tokenizer``; one that goes on from a text has the text of its last tokens before it,
    ``after``."""
    context = after[-CONTEXT_TOKENS:]

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    return Pieces(
        lambda tokens: text_after(decode, context, tokens),
        stops,
        lambda token: _BYTE.fullmatch(str(tokenizer.convert_ids_to_tokens(token))) is not None,
    )


def text_after(decode: Callable[[Sequence[int]], str], before: Sequence[int], tokens: Sequence[int]) -> str:
    """What ``tokens`` add to the text of those ``before``: alone, many a decoder strips the space that they begin
    with."""
    return _beyond(decode(before), decode([*before, *tokens]))


def _beyond(text: str, longer: str) -> str:
    """What one text has more than another; from where they part, if it does not begin with that."""
    if longer.startswith(text):
        return longer[len(text) :]
    parted = (at for at, (old, new) in enumerate(zip(text, longer, strict=False)) if old != new)
    return longer[next(parted, len(longer)) :]
