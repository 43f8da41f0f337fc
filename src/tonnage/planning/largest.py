"""Solving backwards: the largest value of a key for which a plan fits.

What a plan needs grows with the value, so the value is found by bisection: over indices of the values that may be, 1 to
a number. Where a guess is at hand, the search goes out from it in growing strides, and asks little more than twice if
the guess is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tonnage.planning.plan import Plan


@dataclass(frozen=True)
class Largest:
    """The largest value of a key for which a plan fits."""

    key: str
    """Dotted, as a config has it."""
    value: int
    plan: Plan
    limit: int
    """The largest value that may be, whatever fits."""
    whose_limit: str
    """What sets it, in words."""
    next_value: int | None
    """One step up; None at the limit."""
    next_plan: Plan | None
    """The smallest with it, which does not fit."""
    evaluations: int
    """Plans that were made to find it."""

    @property
    def override(self) -> str:
        """For the command line."""
        return f"{self.key}={self.value}"


def last_that_fits(
    number: int, fits: Callable[[int], bool], *, guess: int | None = None, falls: Sequence[int] = ()
) -> int:
    """The last of the indices 1 to ``number`` that ``fits``, 0 if none does.

    It is taken that what fits is followed by what does not, and by nothing that fits; but where ``falls`` are given, at
    which what is needed falls before it grows again, each stretch that one of them begins is looked at by itself.
    ``guess`` is where to look first.
    """
    low, high = 0, number + 1
    for start in sorted(falls, reverse=True):
        if low < start < high:
            if fits(start):
                low = start
                break
            high = start
    at, stride = guess, 1
    while high - low > 1:
        if at is None or not low < at < high:
            at = (low + high) // 2
        if fits(at):
            low, step = at, stride
        else:
            high, step = at, -stride
        at = None if guess is None else at + step
        stride *= 2
    return low
