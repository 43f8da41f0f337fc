"""What is said of values that contradict one another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Contradiction:
    """A problem, and the dotted keys it comes from."""

    keys: tuple[str, ...]
    found: str
    needed: str
    change: str = ""


def did_you_mean(names: Iterable[str]) -> str:
    """A hint that offers names, empty if there are none."""
    listed = " or ".join(names)
    return f"did you mean {listed}?" if listed else ""
