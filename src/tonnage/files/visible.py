"""Text of strangers on its way to a terminal: what would command the terminal is shown instead.

File names, rows, tokens, answers of a model and errors of others may hold escape sequences that move the cursor, rename
the window or hide text, and characters that turn the direction of writing. All of them are shown as Python would write
them in quotes: ``\\x1b[31m``, ``\\u202e``.
"""

from __future__ import annotations

import re

_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but the line break and the tab, marks that turn the direction of writing, and halves of pairs of
UTF-16, which stand for bytes of file names that are not UTF-8."""

LONGEST_SHOWN = 60
"""Characters of a value or a name that a message repeats."""


def visible(text: str) -> str:
    """A text that is safe to print: what is no line break, no tab and not to be seen is written out."""
    return _COMMANDS.sub(_written_out, text)


def as_json_text(text: str) -> str:
    """JSON in which everything that ``visible`` writes out is escaped as JSON does it: the same values, safe to print.

    In JSON such characters stand inside of strings only.
    """
    return _COMMANDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def shortened(text: str, longest: int = LONGEST_SHOWN) -> str:
    """What was written, for a message: no more than its beginning."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _written_out(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "surrogatepass").decode("ascii")
