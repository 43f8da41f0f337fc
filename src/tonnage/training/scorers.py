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

import inspect
import json
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from tonnage.errors import Problem, UserError, user_error

Scorer = Callable[[str, str], float]
"""``scorer(answer, expected)``, from 0 to 1."""
MOST_TOLD = 5
_NUMBER = re.compile(r"(?:(?<!\d)[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)")  # of 2020-2021 the last is 2021
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
        right = key(expected)
        return float(right is not None and key(answer) == right)

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
        lacking = {"number": "a number", "choice": "a letter that is chosen", "json": "JSON"}.get(name, "a match")
        needed = f"rows that can be scored ({len(bad):,} of {len(expected):,} cannot)"
        change = "another evaluate.scorer, exact_match for instance"
        shown = [(f"an answer without {lacking}: {text[-60:]!r}", where) for where, text in bad[:MOST_TOLD]]
        raise UserError(*(Problem(observed, needed, change, where) for observed, where in shown))


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
    raise user_error(f"scorer {name!r}", "a known one, or module:function", where="evaluate.scorer")


def _number(text: str) -> Decimal | None:
    _, marked, rest = text.rpartition("####")
    numbers = _NUMBER.findall(rest if marked else text)
    if not numbers:
        return None
    with suppress(InvalidOperation):
        return Decimal((numbers[0] if marked else numbers[-1]).replace(",", ""))
    return None


def _choice(text: str) -> str | None:
    stated = _SAID.findall(text)
    if stated:
        return str(stated[-1]).upper()
    if (first := _AT_FIRST.match(text)) is not None:
        return first[1].upper()
    alone = _ALONE.findall(text)
    others = [letter for letter in alone if letter != "I"]  # a word in "C, I guess"
    return (others or alone)[-1] if alone else None


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
    """The first group of the last match, or all of it where there is no group."""
    last = deque(pattern.finditer(text), maxlen=1)
    group: str | None = last[0][1 if pattern.groups else 0] if last else None
    return None if group is None else group.strip()


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _imported(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    try:
        function: Callable[..., Any] = attrgetter(path)(import_module(module))
        signature = inspect.signature(function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        observed, needed = f"{name} cannot be imported ({error})", "a function that this Python finds"
        raise user_error(observed, needed, where="evaluate.scorer") from error
    names, parameters = list(signature.parameters), signature.parameters.values()
    required = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    if names[:2] != ["answer", "expected"] or len(required) > 2:
        needed = "a function of an answer and what the row says, that gives a number from 0 to 1"
        raise user_error(f"{name}{signature}", needed, "def score(answer, expected): ...", "evaluate.scorer")
    return function


def _checked(function: Callable[..., Any], name: str) -> Scorer:
    def score(answer: str, expected: str) -> float:
        result = function(answer, expected)
        try:
            number = float(result)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number <= 1:
            raise user_error(f"{name} gave {result!r}"[:200], "a number from 0 to 1", where="evaluate.scorer")
        return number

    return score
