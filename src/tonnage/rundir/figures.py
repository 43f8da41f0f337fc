"""Figures with 95% intervals, from sums over rows; and what an evaluation tells, as it lies in ``metrics.jsonl``.

* A share of rows (exact match): Wilson's score interval (E. B. Wilson, 1927), which is right near 0 and 1 too.
* A mean over tokens (loss, token accuracy): a ratio of two sums over rows, since tokens of a row are not independent:
  the normal approximation with the residuals of rows (W. G. Cochran, Sampling Techniques, 1977, chapter 6).
* A mean over rows of scores that are not 0 or 1: the normal approximation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

Z = 1.959963984540054
"""Of a normal distribution, 95% lie within so many standard deviations."""
METHODS = "95% intervals: Wilson for shares of rows, else the normal approximation over rows"


@dataclass(frozen=True)
class Figure:
    """A figure and the interval in which it lies with 95% confidence; NaN where that cannot be said."""

    value: float
    low: float
    high: float

    def through(self, function: Any) -> Figure:
        """That of an increasing function of it."""
        return Figure(function(self.value), function(self.low), function(self.high))

    def within(self, least: float, most: float) -> Figure:
        """With an interval that does not go beyond what is possible."""
        return Figure(self.value, max(least, self.low), min(most, self.high))

    def to_json(self) -> list[float | None]:
        """Value, low, high; None for what is no number."""
        return [finite(number) for number in (self.value, self.low, self.high)]

    @staticmethod
    def of_json(value: Any) -> Figure:
        """Back from ``to_json``."""
        return Figure(*(math.nan if one is None else float(one) for one in value))


NO_FIGURE = Figure(math.nan, math.nan, math.nan)


def finite(number: float) -> float | None:
    """A number for JSON; None for what is none."""
    return number if math.isfinite(number) else None


def wilson(successes: float, rows: float) -> Figure:
    """A share of rows."""
    if not rows:
        return NO_FIGURE
    share, square = successes / rows, Z * Z
    middle = (share + square / (2 * rows)) / (1 + square / rows)
    half = Z / (1 + square / rows) * math.sqrt(share * (1 - share) / rows + square / (4 * rows * rows))
    low = 0.0 if successes == 0 else middle - half
    return Figure(share, low, 1.0 if successes == rows else middle + half)


@dataclass(frozen=True)
class RatioSums:
    """Of rows with two numbers each, a part x and a whole y: sums, from which the ratio of x to y follows."""

    rows: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def __add__(self, other: RatioSums) -> RatioSums:
        return RatioSums(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    @property
    def figure(self) -> Figure:
        if not self.y:
            return NO_FIGURE
        ratio = self.x / self.y
        if self.rows < 2:
            return Figure(ratio, math.nan, math.nan)
        squares = max(0.0, self.xx - 2 * ratio * self.xy + ratio * ratio * self.yy)
        half = Z * math.sqrt(squares * self.rows / (self.rows - 1)) / self.y
        return Figure(ratio, ratio - half, ratio + half)


def mean_of(scores: Sequence[float]) -> Figure:
    """The mean of scores of rows: a share where all are 0 or 1."""
    if all(score in (0.0, 1.0) for score in scores):
        return wilson(sum(scores), len(scores))
    sums = RatioSums(len(scores), sum(scores), len(scores), sum(one * one for one in scores), sum(scores), len(scores))
    return sums.figure


@dataclass(frozen=True)
class Told:
    """Rows of one source, or of all."""

    rows: int
    tokens: int
    """That are supervised."""
    loss: Figure
    """Nats a supervised token."""
    token_accuracy: Figure
    """Share of the supervised tokens that the model finds likeliest."""
    divergence: Figure | None = None
    """From a teacher, nats a supervised token, where there is one."""

    @property
    def perplexity(self) -> Figure:
        return self.loss.through(lambda loss: math.exp(min(loss, 700.0)))

    def to_json(self) -> dict[str, Any]:
        loss, token_accuracy = self.loss.to_json(), self.token_accuracy.to_json()
        divergence = {} if self.divergence is None else {"divergence": self.divergence.to_json()}
        return {"rows": self.rows, "tokens": self.tokens, "loss": loss, "token_accuracy": token_accuracy, **divergence}

    @staticmethod
    def of_json(value: Mapping[str, Any]) -> Told:
        """Back from ``to_json``."""
        loss, token_accuracy = (Figure.of_json(value[name]) for name in ("loss", "token_accuracy"))
        divergence = Figure.of_json(value["divergence"]) if "divergence" in value else None
        return Told(int(value["rows"]), int(value["tokens"]), loss, token_accuracy, divergence)


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation tells: the key ``evaluation`` of its record."""

    rows: Told | None = None
    """The validation rows; None if there are none."""
    sources: Mapping[str, Told] = field(default_factory=dict)
    """The same by source, where there are several."""
    general: Told | None = None
    """Rows that are not trained on."""
    scores: Mapping[str, Figure] = field(default_factory=dict)
    """Of answers, by the name of the scorer."""
    answers: int = 0
    """How many were scored."""
    pairs: int = 0
    """Validation pairs, or answers with a label, where answers are preferred; there are no ``rows`` then."""
    pair_figures: Mapping[str, Figure] = field(default_factory=dict)
    """Their loss, rewards and the margin between these, and of pairs how often the preferred answer has the higher
    one."""
    unquantized: Told | None = None
    """The validation rows without fake quantisation, where ``rows`` are with it."""

    def figures(self, before: Evaluated | None = None) -> dict[str, Figure]:
        """By the names that gates have; what the model forgot since ``before`` as well."""
        figures_by_name: dict[str, Figure] = {}
        if self.rows is not None:
            figures_by_name |= {"eval_loss": self.rows.loss, "perplexity": self.rows.perplexity}
            figures_by_name["token_accuracy"] = self.rows.token_accuracy
            if self.rows.divergence is not None:
                figures_by_name["eval_kl"] = self.rows.divergence
        if self.unquantized is not None:
            figures_by_name["unquantized_loss"] = self.unquantized.loss
        figures_by_name |= {**self.pair_figures, **self.scores}
        if self.general is not None and before is not None and before.general is not None:
            rose = self.general.loss.value - before.general.loss.value
            figures_by_name["forgets"] = Figure(rose, math.nan, math.nan)
        return figures_by_name

    def to_json(self) -> dict[str, Any]:
        """Plain values, without what is not there."""
        plain: dict[str, Any] = {}
        if self.rows is not None:
            plain["rows"] = self.rows.to_json()
        if len(self.sources) > 1:
            plain["sources"] = {name: one.to_json() for name, one in self.sources.items()}
        if self.unquantized is not None:
            plain["unquantized"] = self.unquantized.to_json()
        if self.general is not None:
            plain["general"] = self.general.to_json()
        if self.pairs:
            plain["pairs"] = self.pairs
            plain["pair_figures"] = {name: figure.to_json() for name, figure in self.pair_figures.items()}
        if self.scores:
            plain["scores"] = {name: one.to_json() for name, one in self.scores.items()}
            plain["answers"] = self.answers
        return plain

    @staticmethod
    def of_json(value: Mapping[str, Any]) -> Evaluated:
        """Back from ``to_json``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for what no run writes."""
        rows, general, unquantized = value.get("rows"), value.get("general"), value.get("unquantized")
        return Evaluated(
            None if rows is None else Told.of_json(rows),
            {name: Told.of_json(one) for name, one in value.get("sources", {}).items()},
            None if general is None else Told.of_json(general),
            {name: Figure.of_json(one) for name, one in value.get("scores", {}).items()},
            int(value.get("answers", 0)),
            int(value.get("pairs", 0)),
            {name: Figure.of_json(figure) for name, figure in value.get("pair_figures", {}).items()},
            None if unquantized is None else Told.of_json(unquantized),
        )
