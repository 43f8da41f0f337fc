"""Lines of ``#SBATCH``: how sbatch takes them apart, and how a value is written so that it arrives as it is.

sbatch has rules of its own (``_get_argument`` in its source): words are separated by white space, both kinds of quotes
hold words together, a backslash takes the next character as it is, inside of quotes as well, and nothing is expanded.
What would end the line cannot be written at all.
"""

from __future__ import annotations

import re

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_BREAKS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def fits_on_a_line(text: str) -> bool:
    """Whether a text has neither line breaks of any kind nor control characters."""
    return _BREAKS.search(text) is None


def quoted(word: str) -> str:
    """A word as a line of ``#SBATCH`` takes it. Raises ``ValueError`` for one that would end the line."""
    if not fits_on_a_line(word):
        raise ValueError(f"{word!r} does not fit on a line")
    if _PLAIN.fullmatch(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def words(text: str) -> list[str]:
    """The words of a line. A ``#`` begins a comment where it begins a word.

    Raises:
        ValueError: a quote is not closed, or the line ends in a backslash.
    """
    complete: list[str] = []
    word: str | None = None
    quote, is_escaped = "", False
    for letter in text:
        if is_escaped:
            word, is_escaped = (word or "") + letter, False
        elif letter == "\\":
            word, is_escaped = word or "", True
        elif quote:
            quote, word = ("", word) if letter == quote else (quote, (word or "") + letter)
        elif letter in "\"'":
            quote, word = letter, word or ""
        elif letter.isspace():
            if word is not None:
                complete.append(word)
            word = None
        elif letter == "#" and word is None:
            break
        else:
            word = (word or "") + letter
    if quote or is_escaped:
        raise ValueError("a quote that is not closed" if quote else "a backslash at the end")
    return [*complete, word] if word is not None else complete
