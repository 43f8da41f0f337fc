"""Regular expressions over names of layers, as the patterns of a config, with ``*`` and ``?``.

Only expressions that mean a few plain names are turned: letters, alternatives, optional parts, and repetitions of
anything. A dot stands for a dot, as everybody means who writes ``model.layers``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants, _parser  # type: ignore[attr-defined]  # what re itself parses with
from typing import Any

MOST_PATTERNS = 64
"""That one expression may come to."""
LONGEST_EXPRESSION = 500


def patterns_of(expression: str, *, whole: bool) -> list[str]:
    """Patterns for the names that an expression matches, from their beginning; to their end too if ``whole``.

    Raises ``ValueError`` for an expression that says more than patterns can.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError("is too long an expression")
    try:
        parsed = _parser.parse(expression)
    except (re.error, RecursionError, OverflowError):
        raise ValueError("is no regular expression") from None
    names = _of_sequence(list(parsed))
    closed = [name.removesuffix("$") for name in names]
    ends = ["" if whole or name.endswith("$") else "*" for name in names]
    patterns = [re.sub(r"\*+", "*", name + end) for name, end in zip(closed, ends, strict=True)]
    return list(dict.fromkeys(patterns))


def _of_sequence(nodes: Iterable[Any]) -> list[str]:
    names = [""]
    for code, argument in nodes:
        names = [before + name for before in names for name in _of_node(code, argument)]
        if len(names) > MOST_PATTERNS:
            raise ValueError(f"means more than {MOST_PATTERNS} names")
    return names


def _of_node(code: Any, argument: Any) -> list[str]:
    match code:
        case _constants.LITERAL if chr(argument) not in "*?[]$":
            return [chr(argument)]
        case _constants.ANY:
            return ["."]
        case _constants.AT:
            return ["$"] if argument in (_constants.AT_END, _constants.AT_END_STRING) else [""]
        case _constants.SUBPATTERN:
            return _of_sequence(argument[3])
        case _constants.BRANCH:
            return [name for branch in argument[1] for name in _of_sequence(branch)]
        case _constants.IN:
            return _of_class(argument)
        case _constants.MAX_REPEAT | _constants.MIN_REPEAT:
            least, most, inner = argument
            if (least, most) == (0, 1):
                return ["", *_of_sequence(inner)]
            if len(inner) == 1 and inner[0][0] in (_constants.ANY, _constants.IN):
                letters = ["?"] if inner[0][0] is _constants.ANY else _of_class(inner[0][1])
                few = letters != ["?"] and len(letters) < 10  # of a number's digits: no model has a thousand layers
                return letters if few and least == 1 else ["*"]
    raise ValueError("says more than a pattern can")


def _of_class(members: Any) -> list[str]:
    """One letter of several: each of a few, else any."""
    letters: list[str] = []
    for code, argument in members:
        if code is _constants.LITERAL:
            letters.append(chr(argument))
        elif code is _constants.RANGE and argument[1] - argument[0] < 10:
            letters += map(chr, range(argument[0], argument[1] + 1))
        else:
            return ["?"]
    if not all(letter.isalnum() or letter in "._-" for letter in letters):
        raise ValueError("says more than a pattern can")
    return letters
