"""From texts with borders to tokens with weights, and the proof that the borders fall between tokens.

A text is tokenised once, whole. A border at character b is sound when the text before b, tokenised alone, gives
exactly the tokens that the whole has before b: then a model that is given the beginning at inference sees what it was
trained on. Tokenising every beginning again would double the work, so it is done on a window where that is enough:

    Byte-level tokenizers with the split patterns of GPT-2, Llama 3 and Qwen cut a text into words from left to right.
    No pattern looks behind, and none looks further ahead than one character past the run of letters, digits, marks or
    white space that it stands in. A cut at b can therefore only change the last few words before b, and words are
    encoded independently of each other. It is enough that the last ``WINDOW_WORDS`` words before b, tokenised alone,
    give the same tokens; those windows are mostly the template's own headers, so they are remembered.

Every other tokenizer, and every border at which a normaliser could join two characters, takes the full comparison. In
both cases a border that does not hold refuses the row and names the place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tonnage.data.conversation import RowError
from tonnage.data.masks import Span

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

WINDOW_WORDS = 5
_KNOWN_PATTERNS = {
    # GPT-2, written out
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # cl100k, Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Qwen 2
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def plain_json(tokenizer_json: str) -> str:
    """The tokenizer without what must not touch training text: truncation, padding, dropout, added ends, trimmed
    offsets."""
    described = json.loads(tokenizer_json)
    described["truncation"] = described["padding"] = described["post_processor"] = None
    if described["model"].get("dropout"):
        described["model"]["dropout"] = None
    return json.dumps(described, ensure_ascii=False)


def works_by_word(described: dict[str, Any]) -> bool:
    """Whether the window argument above holds for this tokenizer (its JSON, parsed)."""

    def splits(step: dict[str, Any] | None) -> bool | None:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(regex)}:
                return regex
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                return True if pattern in _KNOWN_PATTERNS else None
            case {"type": "Sequence", "pretokenizers": [*steps]}:
                found = [splits(inner) for inner in steps]
                return None if None in found or found.count(True) != 1 else True
        return None

    normalizer = described.get("normalizer")
    return (
        (normalizer is None or normalizer.get("type") == "NFC")
        and splits(described.get("pre_tokenizer")) is True
        and not any(token["single_word"] for token in described["added_tokens"])
    )


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its tokens, and the spans of them that are trained on."""

    tokens: list[int]
    spans: list[Span]
    """In tokens: first, one past the last, weight. The document's first token is in none of them."""


class Encoder:
    """Tokenises texts with borders. Not shared between threads."""

    def __init__(self, tokenizer_json: str) -> None:
        from tokenizers import Tokenizer

        described = json.loads(tokenizer_json)
        self._by_word = works_by_word(described)
        self._tokenizer: Tokenizer = Tokenizer.from_str(tokenizer_json)
        # NFC leaves ASCII as it is, so ASCII is not put through it: a sixth of the time.
        normalizer = described.get("normalizer")
        self._composes = (
            normalizer is not None
            and normalizer.get("type") == "NFC"
            and all(token["content"].isascii() for token in described["added_tokens"])
        )
        self._ascii: Tokenizer = self._tokenizer
        if self._composes:
            described["normalizer"] = None
            self._ascii = Tokenizer.from_str(json.dumps(described, ensure_ascii=False))
        self._normalises = normalizer is not None
        self._windows: dict[str, list[int]] = {}

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding | RowError]:
        """Encodings of whole texts; a text that is not valid Unicode gives a ``RowError`` in its place."""
        try:
            if not self._composes:
                return list(self._tokenizer.encode_batch(list(texts), add_special_tokens=False))
            plain = [text.isascii() for text in texts]
            found = {
                flag: iter(tokenizer.encode_batch(chosen, add_special_tokens=False))
                for flag, tokenizer in ((True, self._ascii), (False, self._tokenizer))
                if (chosen := [text for text, is_plain in zip(texts, plain, strict=True) if is_plain is flag])
            }
            return [next(found[flag]) for flag in plain]
        except Exception:
            return [self._one(text) for text in texts]

    def _one(self, text: str) -> Encoding | RowError:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return RowError(
                "invalid_utf8", f"character {error.start} of the text is not valid Unicode ({text[error.start]!r})"
            )
        return self._tokenizer.encode(text, add_special_tokens=False)

    def ids(self, text: str) -> list[int]:
        """Tokens of one text."""
        tokenizer = self._ascii if text.isascii() else self._tokenizer
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def place(self, text: str, encoding: Encoding, spans: Sequence[Span]) -> Document:
        """Spans of characters as spans of tokens, each border proven. Raises ``RowError``."""
        ids: list[int] = encoding.ids
        placed: list[Span] = []
        for start, stop, weight in spans:
            first = self._border(text, encoding, ids, start) if start else 0
            if stop == len(text):
                last = len(ids)
            else:
                # A closing token may take the white space after it along; it ends the span all the same.
                token = encoding.char_to_token(stop - 1)
                last = token + 1 if token is not None else self._border(text, encoding, ids, stop)
            first = max(first, 1)
            if last > first:
                placed.append((first, last, weight))
        return Document(ids, placed)

    def _border(self, text: str, encoding: Encoding, ids: list[int], at: int) -> int:
        """Number of tokens before character ``at``."""
        token = encoding.char_to_token(at) if at < len(text) else len(ids)
        if token is not None and self._by_word and self._window_holds(text, encoding, ids, at, token):
            return token
        alone = self.ids(text[:at])
        if ids[: len(alone)] == alone:
            return len(alone)
        parted = next(
            (n for n, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b), min(len(alone), len(ids))
        )
        place = encoding.token_to_chars(parted)
        where = place[0] if place else at
        raise RowError(
            "border",
            f"the text before the answer, tokenised alone, is not how the whole begins: they part at token {parted} "
            f"(character {where}): {self._show(alone, parted)} alone, {self._show(ids, parted)} in the whole",
        )

    def _show(self, ids: list[int], at: int) -> str:
        return repr([self._tokenizer.id_to_token(token) for token in ids[at : at + 3]])

    def _window_holds(self, text: str, encoding: Encoding, ids: list[int], at: int, token: int) -> bool:
        if token < len(ids):
            place = encoding.token_to_chars(token)
            if place is None or place[0] != at:
                return False
            if self._normalises and not text[at].isascii():
                return False
        first, words = token, 0
        while first > 0 and words < WINDOW_WORDS:
            first -= 1
            while first > 0 and encoding.token_to_word(first) == encoding.token_to_word(first - 1):
                first -= 1
            words += 1
        place = encoding.token_to_chars(first) if first < len(ids) else None
        if first and (place is None or (self._normalises and not text[place[0]].isascii())):
            return False
        window = text[place[0] if first and place else 0 : at]
        known = self._windows.get(window)
        if known is None:
            if len(self._windows) > 50_000:
                self._windows.clear()
            known = self._windows[window] = self.ids(window)
        return ids[first:token] == known


def supervised_count(spans: Sequence[Span]) -> int:
    """Tokens with a weight above zero."""
    return sum(stop - start for start, stop, weight in spans if weight > 0)


def content_key(tokens: np.ndarray, spans: Sequence[Span]) -> int:
    """64 bits that stand for a document's tokens and weights: equal for equal documents."""
    import hashlib

    state = hashlib.blake2b(tokens.tobytes(), digest_size=8)
    state.update(repr(spans).encode())
    return int.from_bytes(state.digest(), "little")
