"""Values as other programs write them: each function reads one kind, and raises ``ValueError`` for what is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST = 2**53
"""Whole numbers are below it: they may be written as ``1e9``, so they pass through floating point."""


def text(value: Any) -> str:
    if isinstance(value, list | dict | bool) or value is None or not str(value).strip():
        raise ValueError("is no name")
    return str(value).strip()


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def optional(parse: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """What reads values that may also say ``none``, which is None."""
    return lambda value: None if value is None or str(value).lower() in ("none", "null") else parse(value)


def texts(value: Any) -> list[str]:
    if value == []:
        raise ValueError("is no name")
    return [text(part) for part in listed(value)]


def words(value: Any) -> list[str]:
    """Words of a list, or between commas."""
    return [name.strip() for one in texts(value) for name in one.split(",") if name.strip()]


def number(value: Any) -> float:
    if isinstance(value, bool | list | dict) or value is None:
        raise ValueError("is not a number")
    try:
        as_float = float(value)
    except (ValueError, OverflowError):
        raise ValueError("is not a number") from None
    if not math.isfinite(as_float):
        raise ValueError("is not a finite number")
    return as_float


def whole(value: Any) -> int:
    """A whole number, also as ``1e9``."""
    parsed = number(value)
    if parsed != int(parsed):
        raise ValueError("is not a whole number")
    if abs(parsed) >= LARGEST:
        raise ValueError("is too large")
    return int(parsed)


def numbers(value: Any) -> list[float]:
    parts: Iterable[Any] = value if isinstance(value, list) else str(value).strip("[]()").replace(",", " ").split()
    return [number(part) for part in parts]


def flag(value: Any) -> bool:
    """True or false, in any of the words that the other programs take."""
    word = str(value).strip().lower()
    if word in ("true", "yes", "y", "1", "on", "t"):
        return True
    if word in ("false", "no", "n", "0", "off", "f", "none"):
        return False
    raise ValueError("is neither true nor false")


def occasion(value: Any) -> str:
    """``no``, ``steps`` or ``epoch``: when something happens."""
    return "no" if value in (False, None) else text(value).lower().rpartition(".")[2]
