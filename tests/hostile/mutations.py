"""Values, texts and files that are not what anybody expects, by chance."""

from __future__ import annotations

import copy
import json
import random
import string
from collections.abc import Callable
from typing import Any

from hostile.strings import LINES, MARKUP, SHELL, TERMINAL

NUMBERS: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 7, 1000, 10**6, 10**9, 10**12, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.5, -0.5, 1e-320, 1e10, 1e100, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    "",
    " ",
    "x",
    "auto",
    "none",
    "null",
    "true",
    "0",
    "1e5",
    "../..",
    "/",
    "/etc/passwd",
    "/dev/zero",
    "~",
    "\0",
    "é" * 99,
)
SHAPES: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, {"a": {"b": [1]}}, [1, "a", {}])


def text(chance: random.Random) -> str:
    """A text: hostile, long, or any."""
    kind = chance.randrange(8)
    if kind < 4:
        return chance.choice((*SHELL, *LINES, *TERMINAL, *MARKUP, *TEXTS))
    if kind == 4:
        return "x" * chance.choice((255, 256, 300, 5000, 70_000))
    if kind == 5:
        return "".join(chr(chance.choice((chance.randrange(1, 0xD800), chance.randrange(128)))) for _ in range(9))
    return "".join(chance.choices(string.printable, k=chance.randrange(1, 40)))


def value(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = chance.randrange(12)
    if kind < 5:
        return chance.choice(NUMBERS)
    if kind < 8:
        return text(chance)
    if kind < 10 or depth > 2:
        return copy.deepcopy(chance.choice(SHAPES))
    if kind == 10:
        return [value(chance, depth + 1) for _ in range(chance.choice((1, 2, 30)))]
    return {text(chance)[:40]: value(chance, depth + 1) for _ in range(3)}


def deep(chance: random.Random) -> str:
    """JSON of many levels."""
    levels = chance.choice((50, 500, 5000, 100_000))
    return chance.choice(("[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels, "[" * levels))


def changed(chance: random.Random, given: Any, times: int = 1) -> Any:
    """A JSON value with something in it taken out, put in, doubled or replaced."""
    found = copy.deepcopy(given)
    for _ in range(times):
        places = list(_places(found))
        if not places:
            return value(chance)
        holder, key = chance.choice(places)
        kind = chance.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[text(chance)[:60]] = holder[key]
        elif kind == 1:
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind == 2 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = chance.choice(
                (-holder[key], holder[key] * 2, holder[key] + 1, holder[key] * 10**9, str(holder[key]))
            )
        elif kind == 2:
            holder[key] = [holder[key]]
        else:
            holder[key] = value(chance)
    return found


def _places(given: Any) -> list[tuple[Any, Any]]:
    """Every container and key in a value."""
    found: list[tuple[Any, Any]] = []
    waiting = [given]
    while waiting:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else list(range(len(one))) if isinstance(one, list) else []
        found += [(one, key) for key in keys]
        waiting += [one[key] for key in keys]
    return found


def content(chance: random.Random, given: bytes) -> bytes:
    """The bytes of a file with something done to them."""
    if not given:
        return b"\0"
    at, to = sorted(chance.randrange(len(given) + 1) for _ in range(2))
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: given[:at],
        lambda: given[:at] + given[to:],
        lambda: given[:at] + bytes([chance.randrange(256)]) + given[at + 1 :],
        lambda: given[:at] + chance.randbytes(chance.choice((1, 8, 100))) + given[at:],
        lambda: given + given,
        lambda: b"",
        lambda: given[:at] + b"\0" * (to - at) + given[to:],
        lambda: b"\xff\xfe" + given,
        lambda: chance.randbytes(200),
        lambda: deep(chance).encode(),
        lambda: json.dumps(value(chance)).encode("utf-8", "surrogatepass"),
    )
    return chance.choice(ways)()


def misspelt(chance: random.Random, word: str) -> str:
    """A word with a letter too many."""
    at = chance.randrange(len(word) + 1)
    return word[:at] + chance.choice(string.ascii_lowercase) + word[at:]
