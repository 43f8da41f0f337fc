"""Columns that say whether an answer is a good one: data made for KTO and its like, of which every answer, the rejected
ones too, would be trained as if it were to be learned.

One row says little: ``label: 1`` may be a verdict or the second of nine topics. ``Values`` therefore keeps which values
a column has, as long as they are few and short, and ``verdict_of`` looks at those of a whole source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MOST_VALUES = 12
"""Of a column: a verdict has two, each perhaps spelt in several ways."""
LONGEST_VALUE = 24
LONGEST_NAME = 120
LONGEST_OBJECT = 2000
"""As JSON text, which CSV and Parquet have in the place of objects."""
MOST_COLUMNS = 200
OTHER = ""
"""Stands for all values that are too long, too many or not plain."""

_GOOD = frozenset(
    (
        *("desirable", "good", "correct", "right", "accept", "accepted", "acceptable", "approve", "approved", "chosen"),
        *("prefer", "preferred", "like", "liked", "upvote", "upvoted", "helpful", "useful", "satisfied"),
        *("thumbsup", "thumbup", "\N{THUMBS UP SIGN}", "\N{WHITE HEAVY CHECK MARK}", "\N{HEAVY CHECK MARK}"),
        *("satisfactory", "\N{CHECK MARK}", "pass", "passed", "valid", "safe", "harmless"),
    )
)
_BAD = frozenset(
    (
        *("bad", "poor", "wrong", "reject", "rejected", "refused", "declined", "denied", "useless"),
        *("downvote", "downvoted", "harmful", "fail", "failed", "thumbsdown", "thumbdown", "\N{THUMBS DOWN SIGN}"),
        *("\N{CROSS MARK}", "\N{HEAVY BALLOT X}", "\N{BALLOT X}", "\N{HEAVY MULTIPLICATION X}"),
    )
)
_NEGATIONS = ("un", "in", "not", "non", "dis", "no")
"""What an approval begins with when it is none: undesirable, incorrect, not good, disliked."""
_YES = frozenset(
    ("1", "true", "yes", "y", "t", "up", "positive", "pos", "high", "+", "ok", "okay", "win", "won", "better")
)
_NO = frozenset(
    ("0", "-1", "false", "no", "n", "f", "down", "negative", "neg", "low", "-", "lose", "loss", "lost", "worse")
)
"""Words that are a verdict in a column whose name says so."""
_NOTHING = frozenset(("none", "null", "nan", "na", "n/a"))
_SKIN = re.compile("[\ufe0e\ufe0f\U0001f3fb-\U0001f3ff]")

_APPROVALS = frozenset(
    (
        *("label", "labels", "kto", "feedback", "thumb", "thumbs", "thumbsup", "thumbup", "rating", "ratings", "rated"),
        *("score", "scores", "reward", "rewards", "verdict", "correct", "correctness", "good", "accept", "accepted"),
        *("acceptable", "acceptance", "approve", "approved", "approval", "prefer", "preferred", "preference"),
        *("desirable", "like", "liked", "vote", "votes", "upvote", "upvoted", "helpful", "helpfulness", "quality"),
        *("judge", "judged", "judgement", "judgment", "grade", "graded", "pass", "passed", "passes", "success"),
        *("successful", "valid", "chosen", "harmless", "harmlessness", "safe", "satisfied", "satisfaction", "outcome"),
        *("result", "evaluation", "assessment", "useful", "usable", "solved", "resolved", "ok", "okay", "win", "best"),
        *("match", "faithful", "truthful", "keep"),
    )
)
_OBJECTIONS = frozenset(
    (
        *("bad", "undesirable", "dislike", "disliked", "downvote", "downvoted", "reject", "rejected", "wrong"),
        *("incorrect", "harmful", "unsafe", "unhelpful", "flagged", "hallucinated", "hallucination", "error", "errors"),
    )
)
"""Words in a column's name by which its values are verdicts: where yes is good, and where yes is bad."""
_NO_JUDGES = frozenset(("count", "counts", "num", "number", "code", "gold", "truth", "target"))
"""Words by which it counts, or says what the answer has to be: ``like_count``, ``gold_label``."""
_LABELS = ("label", "kto_tag", "kto_label")
"""Columns that are verdicts even where all answers have the same one, if the value is sure:"""
_SURE = frozenset(("1", "0", "-1", "true", "false", "yes", "no"))


class Values:
    """The values of columns that nobody reads, with how many rows have each."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, int]] = {}
        """Column -> value as JSON -> rows. ``OTHER`` in it: no verdict."""

    def note(self, name: str, value: object, answer: str) -> None:
        """Count a value of a row. One that the ``answer`` begins with is the task's own, and no verdict on it."""
        if isinstance(value, str) and value.startswith("{") and len(value) <= LONGEST_OBJECT:
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        if isinstance(value, list) and len(value) == 1:
            name, value = f"{name}[]", value[0]
        if isinstance(value, dict):
            for field, content in value.items():
                self.note(f"{name}.{field}", content, answer)
            return
        if value is None or value in ("", []):
            return
        name = name[:LONGEST_NAME]
        if name not in self.seen and len(self.seen) >= MOST_COLUMNS:
            return
        counts = self.seen.setdefault(name, {})
        if OTHER in counts:
            return
        key = OTHER
        if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= LONGEST_VALUE):
            if isinstance(value, str) and answer.lstrip().lower().startswith(value.strip().lower()):
                return
            key = json.dumps(value)
        if key not in counts and len(counts) >= MOST_VALUES:
            key = OTHER
        counts[key] = counts.get(key, 0) + 1


@dataclass(frozen=True)
class Verdict:
    """A column that says of answers whether they are good."""

    column: str
    good: Mapping[str, int]
    """Values, as JSON, of good answers -> rows that have them."""
    bad: Mapping[str, int]

    @property
    def found(self) -> str:
        counts = ", ".join(f"{value} in {count:,}" for value, count in {**self.good, **self.bad}.items())
        return f"a field {self.column!r} that says whether the answer is a good one ({counts} rows)"

    @property
    def change(self) -> str:
        good = f"whose {self.column} is {' or '.join(self.good)}" if self.good else "of good answers"
        return (
            f"learn from both kinds: objective: kto, with label: true or false in every row; or write the rows {good} "
            "to a file of their own, without that field. If it says something else, take it out of the rows"
        )


def verdict_of(column: str, values: Mapping[str, int], plain_text: bool = False) -> Verdict | None:
    """The verdict that a column is, by its name and all of its values. ``plain_text``: whether its rows have no
    answers, only a text, of which a label of 0 and 1 says what it is about."""
    words = {key: _word(json.loads(key)) if key != OTHER else OTHER for key in values}
    words = {key: word for key, word in words.items() if word not in _NOTHING}
    if {"1", "-1"} <= set(words.values()):  # between thumbs up and thumbs down there is a zero
        words = {key: word for key, word in words.items() if word != "0"}
    sides = {key: _side(word) for key, word in words.items()}
    if not sides or None in sides.values():
        return None
    good = {key: values[key] for key, side in sides.items() if side}
    bad = {key: values[key] for key, side in sides.items() if not side}
    says_so = all(word not in _YES and word not in _NO for word in words.values())
    names = set(re.findall(r"[A-Z]?[a-z]+|[A-Z]+", column)) if not says_so else set()
    names = {name.lower() for name in names}
    is_about_text = plain_text and names <= {"label", "labels"}
    if {"correct", "answer"} <= names and "is" not in names:
        return None
    if not says_so and (is_about_text or names & _NO_JUDGES or not names & (_APPROVALS | _OBJECTIONS)):
        return None
    is_label = column.strip().lower() in _LABELS and (says_so or _SURE.issuperset(words.values()))
    if not (good and bad) and not (is_label or (bad and says_so)):
        return None
    return Verdict(column, bad, good) if not says_so and names & _OBJECTIONS else Verdict(column, good, bad)


def _word(value: Any) -> str:
    """A value in the one spelling that the lists above know: ``Thumbs_Up `` is ``thumbsup``, 1.0 is 1."""
    text = _SKIN.sub("", str(value)).strip(" \t\r\n.!:;'\"()[]").lower()
    try:
        number = float(text)
        return str(int(number)) if number == int(number) else text
    except (ValueError, OverflowError):
        return text if len(text) == 1 else re.sub(r"[\s_-]+", "", text)


def _side(word: str) -> bool | None:
    """Whether a word approves or disapproves; ``None`` for any other."""
    if word in _GOOD or word in _YES:
        return True
    if word in _BAD or word in _NO:
        return False
    return False if any(word.startswith(no) and word.removeprefix(no) in _GOOD for no in _NEGATIONS) else None
