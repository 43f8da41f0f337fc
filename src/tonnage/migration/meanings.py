"""What words of other programs come to: ``tables/meanings.yaml``, by the quantity that they are values of."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from tonnage.migration.yaml_files import read_data


@dataclass(frozen=True)
class Meaning:
    """What a word comes to."""

    outcome: str
    """A key of ours, ``needless``, ``refused`` or ``unknown``."""
    value: Any
    """Of that key, or a sentence; ``{word}`` stands for the word as it is written."""
    note: str = ""
    """What there is to say besides."""


def _read_meanings() -> dict[str, dict[str, Meaning]]:
    """By quantity, then by word, or by the pattern of several, of which the first counts."""
    meanings: dict[str, dict[str, Meaning]] = {}
    for quantity, rows in read_data("meanings").items():
        meanings[quantity] = {}
        for patterns, row in rows.items():
            ((outcome, value),) = [(name, value) for name, value in row.items() if name != "note"]
            meanings[quantity] |= dict.fromkeys(patterns.split(), Meaning(outcome, value, row.get("note", "")))
    return meanings


_MEANINGS = _read_meanings()


def meaning_of(quantity: str, word: str) -> Meaning:
    """What a word comes to as the value of a quantity."""
    return next(meaning for pattern, meaning in _MEANINGS[quantity].items() if fnmatchcase(word, pattern))
