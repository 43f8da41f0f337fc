"""Values as other programs write them: each function reads one kind, and raises ``ValueError`` for what is none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

LARGEST = 2**53
"""Whole numbers are below it: they may be written as ``1e9``, so they pass through floating point."""


def text(value: Any) -> str:
    """A value that is words."""
    if isinstance(value, list | dict | bool) or value is None or not str(value).strip():
        raise ValueError("is no name")
    return str(value).strip()


def texts(value: Any) -> list[str]:
    """One value or several that are words."""
    if value == []:
        raise ValueError("is no name")
    return [text(item) for item in value] if isinstance(value, list) else [text(value)]


def words(value: Any) -> list[str]:
    """Words of a list, or between commas."""
    return [name.strip() for one in texts(value) for name in one.split(",") if name.strip()]


def number(value: Any) -> float:
    """A number."""
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
    """Several numbers."""
    items: Iterable[Any] = value if isinstance(value, list) else str(value).strip("[]()").replace(",", " ").split()
    return [number(item) for item in items]


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
