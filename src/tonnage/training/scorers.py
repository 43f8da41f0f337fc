"""Scores of answers by the ones that rows have: each scorer takes out of both what counts, and compares that.

exact_match   all of the text, white space at both ends aside
number        the number behind ####, as in gsm8k, or the last one; 42, 42.0 and $42 are one
choice        the letter that is chosen: B, (B), "B. Paris", "The answer is B"
contains      whether the row's answer is part of the answer, whatever the case and white space
json          the value of the JSON that it is or has in it; the order of keys does not matter
regex         the first group of a pattern, or all that it matches; of several matches the last one
M:F           function F of module M: F(answer, expected), two texts, gives a number from 0 to 1
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from tonnage.errors import Problem, UserError

Scorer = Callable[[str, str], float]
"""``scorer(answer, expected)``, from 0 to 1."""
MOST_TOLD = 5
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
_SAID = re.compile(r"answer\s*(?:is|:)?\s*:?\s*[*(\[]*([A-J])(?![A-Za-z])", re.IGNORECASE)
_AT_FIRST = re.compile(r"[\s*(\[]*([A-Ja-j])(?:\s*$|[).:,\]*])")
_ALONE = re.compile(r"(?<![A-Za-z'])([A-J])(?![A-Za-z'])")
_FENCED = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)


def scorer_of(name: str, pattern: str | None = None) -> Scorer:
    """The scorer that a config names.

    Raises:
        UserError: a function that cannot be imported, or takes no two texts.
    """
    if name == "contains":
        return lambda answer, expected: float(_plain(expected) in _plain(answer))
    if ":" in name:
        return _checked(_imported(name), name)
    key = _key_of(name, pattern)

    def score(answer: str, expected: str) -> float:
        wanted = key(expected)
        return float(wanted is not None and key(answer) == wanted)

    return score


def check_expected(name: str, pattern: str | None, expected: Sequence[tuple[str, str]]) -> None:
    """Refuse rows whose own answers hold nothing to compare with; each is where it stands, and its answer.

    Raises:
        UserError: names the first of them.
    """
    if ":" in name or name in ("contains", "exact_match"):
        return
    key = _key_of(name, pattern)
    bad = [(where, text) for where, text in expected if key(text) is None]
    if bad:
        what = {"number": "a number", "choice": "a letter that is chosen", "json": "JSON"}.get(name, "a match")
        raise UserError(
            *(
                Problem(
                    f"an answer without {what}: {text[-60:]!r}",
                    f"rows that can be scored ({len(bad):,} of {len(expected):,} cannot)",
                    "another evaluate.scorer, exact_match for instance",
                    where,
                )
                for where, text in bad[:MOST_TOLD]
            )
        )


def _key_of(name: str, pattern: str | None) -> Callable[[str], Any]:
    """What counts of a text; None if that is not in it."""
    match name:
        case "exact_match":
            return str.strip
        case "number":
            return _number
        case "choice":
            return _choice
        case "json":
            return _json
        case "regex":
            assert pattern is not None, "config.check_evaluate sees to it"
            compiled = re.compile(pattern)
            return lambda text: _match(compiled, text)
    raise UserError(Problem(f"scorer {name!r}", "a known one, or module:function", where="evaluate.scorer"))


def _number(text: str) -> Decimal | None:
    _, marked, rest = text.rpartition("####")
    found = _NUMBER.findall(rest if marked else text)
    if not found:
        return None
    with suppress(InvalidOperation):
        return Decimal((found[0] if marked else found[-1]).replace(",", ""))
    return None


def _choice(text: str) -> str | None:
    said = _SAID.findall(text)
    if said:
        return str(said[-1]).upper()
    if (first := _AT_FIRST.match(text)) is not None:
        return first[1].upper()
    alone = _ALONE.findall(text)
    return alone[-1] if alone else None


def _json(text: str) -> str | None:
    """The JSON in a text, written in one way: what is equal is equal, and 1 is not true."""
    fenced = _FENCED.search(text)
    body = (fenced[1] if fenced else text).strip()
    decoder = json.JSONDecoder()
    starts = [0, *(place for place, letter in enumerate(body) if letter in "{[")][:100]
    for start in starts:
        with suppress(ValueError, RecursionError):
            value, end = decoder.raw_decode(body, start)
            if start or end == len(body):
                return json.dumps(value, sort_keys=True)
    return None


def _match(pattern: re.Pattern[str], text: str) -> str | None:
    last = None
    for last in pattern.finditer(text):  # noqa: B007
        pass
    if last is None:
        return None
    found = last[1] if pattern.groups else last[0]
    return None if found is None else found.strip()


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _imported(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
        parameters = list(inspect.signature(function).parameters.values())
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            Problem(
                f"{name} cannot be imported ({error})", "a function that this Python finds", where="evaluate.scorer"
            )
        ) from error
    needed = [one for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    if [one.name for one in parameters[:2]] != ["answer", "expected"] or len(needed) > 2:
        raise UserError(
            Problem(
                f"{name}{inspect.signature(function)}",
                "a function of an answer and what the row says, that gives a number from 0 to 1",
                "def score(answer, expected): ...",
                "evaluate.scorer",
            )
        )
    found: Callable[..., Any] = function
    return found


def _checked(function: Callable[..., Any], name: str) -> Scorer:
    def score(answer: str, expected: str) -> float:
        given = function(answer, expected)
        try:
            value = float(given)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value <= 1:
            raise UserError(Problem(f"{name} gave {given!r}"[:200], "a number from 0 to 1", where="evaluate.scorer"))
        return value

    return score
