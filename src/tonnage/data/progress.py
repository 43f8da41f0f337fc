"""How far a preparation is, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)``: the stage by name and how much of it is done, in the stage's own unit."""


def silent(what: str, done: int, total: int) -> None:
    """A progress that shows nothing."""
