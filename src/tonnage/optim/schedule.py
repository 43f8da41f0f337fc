"""The learning rate as a pure function of the step: warm-up, then constant, linear or cosine decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """Learning rate of every step of a run."""

    peak: float
    num_steps: int
    warmup_steps: int = 0
    shape: Literal["cosine", "linear", "constant"] = "cosine"
    final: float = 0.0
    """Fraction of the peak that the decay ends at."""
    from_zero: bool = False
    """Whether the first step of warm-up has no rate, as transformers' has none."""
    rise: Literal["linear", "quadratic"] = "linear"
    """Whether the rate rises evenly in warm-up, or with the square of the step."""

    def lr(self, step: int) -> float:
        """Learning rate of ``step`` (the first step is 1).

        Warm-up rises from a first rate above zero or from zero (``from_zero``), and reaches the peak at step
        ``warmup_steps + 1``. The decay would reach ``final`` one step after the last, so that no step is wasted at
        zero.
        """
        done = step - 1
        if done < self.warmup_steps:
            risen, whole = (done, self.warmup_steps) if self.from_zero else (done + 1, self.warmup_steps + 1)
            return self.peak * risen / whole if self.rise == "linear" else self.peak * (risen / whole) ** 2
        progress = (done - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        progress = min(1.0, progress)
        match self.shape:
            case "constant":
                return self.peak
            case "linear":
                factor = 1.0 - progress
            case "cosine":
                factor = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.final + (1.0 - self.final) * factor)
