"""Tokens into text that can be sent at once: whole characters, and nothing that may become a stop word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tonnage.inference.tokens import Token

_HALF = "\ufffd"
"""Stands where the bytes of a character are not all there."""


@dataclass
class Pieces:
    """The text of an answer as it grows."""

    decode: Callable[[Sequence[int]], str]
    """Tokens -> text, without special tokens."""
    stops: Sequence[str] = ()
    """Words before which the answer ends."""
    tokens: list[Token] = field(default_factory=list)
    stopped: bool = False
    """Whether a stop word came."""
    text: str = ""
    """What was sent."""
    _waiting: list[tuple[Token, int]] = field(default_factory=list)
    """Tokens that were not sent, with the length of the text before each."""
    _length: int = 0
    """Of the text of all tokens."""

    def add(self, token: Token) -> tuple[str, list[Token]]:
        """Take a token; returns text that can be sent now, which may be none, and the tokens that it came from."""
        self.tokens.append(token)
        self._waiting.append((token, self._length))
        whole = self.decode([one.id for one in self.tokens])
        self._length = len(whole)
        found = [at for stop in self.stops if (at := whole.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._sent(whole[: min(found)])
        return self._sent(whole[: len(whole) - self._held_back(whole)], whole)

    def end(self) -> tuple[str, list[Token]]:
        """The rest of the text, where no more tokens come."""
        if self.stopped:
            return "", []
        return self._sent(self.decode([one.id for one in self.tokens]))

    def _held_back(self, whole: str) -> int:
        """Characters at the end that may turn out to be another one, or the beginning of a stop word."""
        halves = len(whole) - len(whole.rstrip(_HALF))
        kept = whole[: len(whole) - halves]
        begun = (size for stop in self.stops for size in range(1, len(stop)) if kept.endswith(stop[:size]))
        return halves + max(begun, default=0)

    def _sent(self, ready: str, whole: str | None = None) -> tuple[str, list[Token]]:
        if not ready.startswith(self.text):  # a decoder that changes what it said: the rest waits until it agrees
            return "", []
        new = ready[len(self.text) :]
        if whole is not None and not new:
            return "", []
        self.text = ready
        sent = [token for token, before in self._waiting if before < len(ready)]
        self._waiting = [one for one in self._waiting if one[1] >= len(ready)]
        return new, sent
