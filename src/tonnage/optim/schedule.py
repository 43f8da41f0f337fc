"""The learning rate as a pure function of the step: warm-up, then a shape. Those with names of transformers' have its
rates.

With ``x`` from 0 after warm-up to 1 one step after the last, and the ``final`` fraction ``f`` of the peak that each
decays to, the rates are fractions ``f + (1 - f) y`` of the peak:

==================== =========================================================================================
constant             1
linear               ``y = 1 - x``
cosine               ``y = (1 + cos(pi x)) / 2``
cosine_with_restarts that cosine ``cycles`` times over
polynomial           ``y = (1 - x) ** power``
wsd                  1, and over the last ``decay_steps`` from 1 to ``f``; warm-up begins at ``f``
                     (warmup-stable-decay, arXiv 2404.06395)
inverse_sqrt         ``sqrt(T / (T + n))`` after ``n`` steps, ``T`` being ``timescale`` (arXiv 2106.04560)
==================== =========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Shape = Literal["cosine", "linear", "constant", "wsd", "polynomial", "cosine_with_restarts", "inverse_sqrt"]
DecayShape = Literal["cosine", "linear", "1-sqrt"]

DEFAULT_TIMESCALE = 10_000
"""Steps, where a run without warm-up has no timescale of its own, as in transformers."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate of every step of a run."""

    peak: float
    num_steps: int
    warmup_steps: int = 0
    shape: Shape = "cosine"
    final: float = 0.0
    """Fraction of the peak that the decay ends at."""
    from_zero: bool = False
    """Whether the first step of warm-up has no rate, as transformers' has none."""
    rise: Literal["linear", "quadratic"] = "linear"
    """Whether the rate rises evenly in warm-up, or with the square of the step."""
    decay_steps: int = 0
    """Of ``wsd``: the last steps, in which it decays."""
    decay_shape: DecayShape = "cosine"
    """Of ``wsd``: how it decays in them."""
    power: float = 1.0
    """Of ``polynomial``."""
    cycles: int = 1
    """Of ``cosine_with_restarts``: how often it begins at the peak."""
    timescale: int | None = None
    """Of ``inverse_sqrt``: steps after which the rate is down to 71%; None is ``warmup_steps`` or, without any,
    ``DEFAULT_TIMESCALE``."""

    @staticmethod
    def of(settings: Mapping[str, Any], num_steps: int, warmup_steps: int, decay_steps: int) -> Schedule:
        """The schedule that keys of ``optimizer`` ask for; runs that are older than a key do not have it."""
        own = {key: settings[key] for key in ("decay_shape", "power", "cycles", "timescale") if key in settings}
        return Schedule(
            settings["lr"],
            num_steps,
            warmup_steps,
            settings["schedule"],
            settings["final"],
            from_zero=settings.get("warmup_from") == "zero",
            rise=settings.get("warmup_shape", "linear"),
            decay_steps=decay_steps,
            **own,
        )

    def lr(self, step: int) -> float:
        """Learning rate of ``step`` (the first step is 1).

        Warm-up rises from a first rate above zero or from zero (``from_zero``), and reaches the peak at step
        ``warmup_steps + 1``. The decay would reach ``final`` one step after the last, so that no step is wasted at
        zero.
        """
        done = step - 1
        if done < self.warmup_steps:
            return self.peak * self._warmup_factor(done)
        if self.shape == "constant":
            return self.peak
        if self.shape == "inverse_sqrt":
            timescale = self.timescale or self.warmup_steps or DEFAULT_TIMESCALE
            return self.peak * math.sqrt(timescale / (timescale + done - self.warmup_steps))
        return self.peak * (self.final + (1.0 - self.final) * self._decay_factor(done))

    def _warmup_factor(self, done: int) -> float:
        risen, whole = (done, self.warmup_steps) if self.from_zero else (done + 1, self.warmup_steps + 1)
        factor = risen / whole if self.rise == "linear" else (risen / whole) ** 2
        return self.final + (1.0 - self.final) * factor if self.shape == "wsd" else factor

    def _decay_factor(self, done: int) -> float:
        """What is left, after ``done`` steps, of the way from the peak to ``final``."""
        first = self.warmup_steps
        if self.shape == "wsd":
            first = max(first, self.num_steps - self.decay_steps)
        progress = min(1.0, max(0, done - first) / max(1, self.num_steps - first))
        match self.decay_shape if self.shape == "wsd" else self.shape:
            case "linear":
                return 1.0 - progress
            case "polynomial":
                return math.pow(1.0 - progress, self.power)
            case "1-sqrt":
                return 1.0 - math.sqrt(progress)
            case "cosine_with_restarts" if progress < 1.0:
                progress = self.cycles * progress % 1.0
        return 0.5 * (1.0 + math.cos(math.pi * progress))
