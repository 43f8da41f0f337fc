"""Figures of an evaluation by their names, and bounds of them, as ``>= 0.6``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Scored = Literal["exact_match", "number", "choice", "contains", "json", "regex"]
"""Ways to score an answer by the one that its row has (``training.scorers``)."""
SCORERS: tuple[str, ...] = ("none", *get_args(Scored))
OfPairs = Literal["eval_reward_accuracy", "eval_reward_margin"]
"""Figures of pairs of answers, where the objective prefers one."""
Best = Literal["none", "eval_loss", "token_accuracy", OfPairs, Scored, "score"]
"""Figures by which steps can be compared; ``score`` is that of a function of the user's."""
Gated = Literal["eval_loss", "perplexity", "forgets", "token_accuracy", OfPairs, Scored, "score"]
"""Figures that can be asked to be within bounds."""
LOWER = ("eval_loss", "perplexity", "forgets")
"""Those of which less is better."""
FIGURES: tuple[str, ...] = tuple(name for name in get_args(Gated) if name not in LOWER)
"""Those of which more is better."""

_BOUND = re.compile(r"\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Bound:
    """A comparison with a number."""

    sign: str
    number: float

    @staticmethod
    def of(text: str) -> Bound:
        """As it is written, ``<= 0.02``. Raises ``ValueError``."""
        found = _BOUND.fullmatch(text)
        if found is None or not math.isfinite(float(found[2])):
            raise ValueError(text)
        return Bound(found[1], float(found[2]))

    def holds(self, value: float) -> bool:
        """Whether a figure is within it; one that is no number never is."""
        return _COMPARE[self.sign](value, self.number)

    def __str__(self) -> str:
        return f"{self.sign} {self.number:g}"


def figure_of(scorer: str) -> str | None:
    """Under which name the figure of a scorer is told; None of ``none``."""
    if scorer == "none":
        return None
    return scorer if scorer in SCORERS else "score"


def is_better(name: str, value: float, than: float | None) -> bool:
    """Whether a figure is better than another; what is no number never is, and every number than none at all."""
    if not math.isfinite(value):
        return False
    if than is None or not math.isfinite(than):
        return True
    return value < than if name in LOWER else value > than
