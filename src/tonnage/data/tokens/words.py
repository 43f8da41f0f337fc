"""Text into the words that a tokenizer encodes one by one, and where a text may be cut without changing one.

Byte-level tokenizers with the split patterns of GPT-2, Llama 3 and Qwen first take their added tokens out of a text
(from left to right, the longest at each place, those that are matched before normalisation first), then cut what lies
between into words from left to right, and encode every word by itself. Two things follow:

    No pattern looks behind, and none looks further ahead than one character past the run of letters, digits, marks or
    white space that it stands in. A cut at character b, inside of no added token, can therefore only change the last
    few words before b (an apostrophe and a letter that were a contraction, a line break and the spaces after it), and
    none before the last added token. If the last ``WINDOW_WORDS`` words before b are the same with and without the
    text after b, all words before it are.

    The tokens of a text are those of its words, one after another, and each word's are the same wherever it stands.

The first is how ``tokens`` proves borders. The second lets it encode every different word once: a few words make up
most of a text. ``Scanner`` finds the words of ASCII itself, where letters, digits and white space are the same in every
library. In other text it cuts where a space follows another ASCII character, which no pattern goes across (a space is
only ever the first character of a word, or among other white space) and no normaliser; what lies between two such cuts
and is not all ASCII is left to the tokenizer, and counts as one word here.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WINDOW_WORDS = 5

_GPT_2 = r" ?[A-Za-z]++| ?[0-9]++|'(?:[stmd]|re|ve|ll)| ?[^\sA-Za-z0-9]++|\s+(?!\S)|\s+"
_LLAMA_3 = (
    r"'(?i:[stmd]|re|ve|ll)|[^\r\nA-Za-z0-9]?[A-Za-z]++|[0-9]{1,3}"
    r"| ?[^\sA-Za-z0-9]++[\r\n]*+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    # GPT-2, written out
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT_2,
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT_2,
    # cl100k, Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": _LLAMA_3,
    # Qwen 2
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": _LLAMA_3.replace("{1,3}", ""),
    # Qwen 3.5
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": _LLAMA_3.replace("{1,3}", ""),
}
"""Split pattern -> what it comes to on ASCII, for ``re`` with ``re.ASCII``."""

_FOREIGN = re.compile(r"[^\x00-\x7f]")
_CUT = re.compile(r"[!-~] ")
LONG_WORD = 256
"""Characters. Text with more than that between spaces is in a script that sets none, and left to the tokenizer."""
_PROBE = "".join(map("".join, itertools.product("asL7 \n\r\t'.", repeat=3))) + bytes(range(128)).decode()


def split_pattern(tokenizer: Tokenizer) -> str | None:
    """The pattern by which a tokenizer cuts words, as ASCII has it; ``None`` if what is said above does not hold for
    it."""

    def ascii_form(step: dict[str, Any] | None) -> str | None:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
                return _GPT_2
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                return PATTERNS.get(pattern)
            case {"type": "Sequence", "pretokenizers": [first]}:
                return ascii_form(first)
            case {
                "type": "Sequence",
                "pretokenizers": [first, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}],
            }:
                return ascii_form(first)
        return None

    if _described(tokenizer.normalizer) not in (None, {"type": "NFC"}):
        return None
    if any(token.single_word for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    return ascii_form(_described(tokenizer.pre_tokenizer))


def _described(step: Any) -> Any:
    """A step of a tokenizer as ``tokenizer.json`` has it."""
    return None if step is None else json.loads(step.__getstate__())


class Scanner:
    def __init__(self, pattern: str, before: Sequence[str], after: Sequence[str], composes: bool) -> None:
        """``before``, ``after``: the added tokens that are matched before normalisation and after it. ``composes``:
        whether the normaliser makes one character of several (NFC)."""
        self._ascii: Callable[[str, int, int], list[str]] = re.compile(pattern, re.ASCII).findall
        self._composes = composes
        self._splits = [_splitter(tokens) for tokens in (before, after) if tokens]

    @staticmethod
    def of(tokenizer: Tokenizer) -> Scanner | None:
        """The scanner for a tokenizer, or ``None`` where words must be left to it.

        The tokenizer is asked for the words of a text in which every kind of character stands beside every other.
        """
        pattern = split_pattern(tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        if pattern is None or any(token.lstrip or token.rstrip for token in added):
            return None
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(_PROBE)
        if Scanner(pattern, [], [], False).cut(_PROBE, []) != [[_PROBE[start:stop] for _, (start, stop) in pieces]]:
            return None
        after = [token.content for token in added if token.normalized]
        before = [token.content for token in added if not token.normalized]
        return Scanner(pattern, before, after, tokenizer.normalizer is not None)

    def cut(self, text: str, borders: Sequence[int]) -> list[list[str]] | None:
        """Words of a text, in one list for each stretch between borders (ascending, inside of the text).

        ``None`` when a border is not one (when the text before it, by itself, is not made of the first words of the
        whole), and for a text that must be left to the tokenizer as a whole.
        """
        find = self._ascii
        if not text.isascii():
            if not self._can_cut(text):
                return None
            find = self._mixed
        words: list[str] = []
        counts: list[int] = []  # words before each border
        waiting = [*borders, len(text) + 1]
        start = 0
        for number, section in enumerate(self._sections(text)):
            stop = start + len(section)
            while waiting[len(counts)] <= start:
                counts.append(len(words))
            if number % 2:
                if waiting[len(counts)] < stop:
                    return None
                words.append(section)
            elif waiting[len(counts)] >= stop:
                words += find(text, start, stop)
            else:
                first, at = len(words), start
                tails: list[tuple[int, list[str]]] = []
                while (border := waiting[len(counts)]) < stop:
                    words += find(text, at, border)
                    tail = words[max(first, len(words) - WINDOW_WORDS) :]
                    tails.append((len(words), tail))
                    counts.append(len(words))
                    del words[len(words) - len(tail) :]
                    at = border - sum(map(len, tail))
                words += find(text, at, stop)
                if any(words[count - len(tail) : count] != tail for count, tail in tails):
                    return None
            start = stop
        counts += [len(words)] * (len(borders) - len(counts))
        return [words[begin:end] for begin, end in zip([0, *counts], [*counts, len(words)], strict=True)]

    def _can_cut(self, text: str) -> bool:
        if self._composes and not unicodedata.is_normalized("NFC", text):
            return False
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
        return max(map(len, text.split(" "))) <= LONG_WORD

    def _mixed(self, text: str, start: int, stop: int) -> list[str]:
        words: list[str] = []
        while foreign := _FOREIGN.search(text, start, stop):
            begin = text.rfind(" ", start, foreign.start())
            while begin > start and not "!" <= text[begin - 1] <= "~":
                begin = text.rfind(" ", start, begin)
            cut = _CUT.search(text, foreign.end(), stop)
            begin, end = max(begin, start), cut.start() + 1 if cut else stop
            words += self._ascii(text, start, begin)
            words.append(text[begin:end])
            start = end
        return words + self._ascii(text, start, stop)

    def _sections(self, text: str) -> list[str]:
        """The text between added tokens and the tokens, in turn; the first and the last are text."""
        sections = [text]
        for split in self._splits:
            parts: list[str] = []
            for number, section in enumerate(sections):
                if number % 2:
                    parts.append(section)
                else:
                    parts += split(section)
            sections = parts
        return sections


def _splitter(tokens: Sequence[str]) -> Any:
    longest_first = sorted(set(tokens), key=lambda token: (-len(token), token))
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split
