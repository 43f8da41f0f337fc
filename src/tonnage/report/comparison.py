"""What a run made of the rows it was evaluated on: before, after, and whether that is what was asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tonnage.config import Config, read_config
from tonnage.config.bounds import Bound, is_better
from tonnage.errors import user_error
from tonnage.files.writing import write_json
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.figures import METHODS, NO_FIGURE, Evaluated, Figure, Told, finite

NOTHING = "Nothing was evaluated: there are no validation rows. To have some: data.validation=0.02, or a file of them."
DIGITS = 4


@dataclass(frozen=True)
class Requirement:
    """A figure that must be within a bound."""

    figure: str
    bound: str
    value: float | None
    """None where nothing told it."""
    holds: bool


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of some rows, before and after."""

    rows: str
    """Whose: ``validation``, the name of a source, ``general``, ``answers``."""
    figure: str
    before: Figure | None
    after: Figure

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Rows, figure, before, after, and the 95% interval of after."""
        shown = f"{self.after.low:.{DIGITS}f} to {self.after.high:.{DIGITS}f}"
        return (
            self.rows,
            self.figure.replace("_", " "),
            "" if self.before is None else f"{self.before.value:.{DIGITS}f}",
            f"{self.after.value:.{DIGITS}f}",
            shown if math.isfinite(self.after.low) else "",
        )


@dataclass(frozen=True)
class Comparison:
    """An evaluation of a run beside the one before its first step."""

    step: int
    """After which the run was evaluated."""
    before: Evaluated | None
    after: Evaluated | None
    """None where nothing was evaluated."""
    gate: Sequence[Requirement] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        """Whether all is within the bounds of ``evaluate.gate``."""
        return all(asked.holds for asked in self.gate)

    def figures(self) -> dict[str, Figure]:
        """Those of after, by the names that gates have."""
        return {} if self.after is None else self.after.figures(self.before)

    def lines(self) -> list[ComparedFigure]:
        if self.after is None:
            return []
        before = self.before or Evaluated()
        lines = list(_told("validation", before.rows, self.after.rows))
        lines += _told("validation, not rounded", before.unquantized, self.after.unquantized)
        for name, figures in self.after.sources.items():
            lines += _told(name, before.sources.get(name), figures)
        noun = "pairs" if "eval_reward_accuracy" in self.after.pair_figures else "answers with a label"
        lines += [
            ComparedFigure(
                f"{self.after.pairs:,} {noun}", name.removeprefix("eval_"), before.pair_figures.get(name), figure
            )
            for name, figure in self.after.pair_figures.items()
        ]
        lines += [
            ComparedFigure(f"{self.after.answers:,} answers", name, before.scores.get(name), figure)
            for name, figure in self.after.scores.items()
        ]
        lines += _told("general", before.general, self.after.general)
        if (forgets := self.figures().get("forgets")) is not None:
            lines.append(ComparedFigure("general", "forgets", None, forgets))
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "before": None if self.before is None else self.before.to_json(),
            "after": None if self.after is None else self.after.to_json(),
            "figures": {name: finite(one.value) for name, one in self.figures().items()},
            "gate": {one.figure: {"bound": one.bound, "value": one.value, "holds": one.holds} for one in self.gate},
            "passed": self.passed,
            "intervals": METHODS,
        }


def compare(run: RunDirectory, step: int | None = None, every: Iterable[Mapping[str, Any]] | None = None) -> Comparison:
    """Compare what a run was evaluated as before its first step with the newest evaluation up to ``step``, by default
    that of the model that it exports, as far as its records tell: ``every`` of them, where they were read already.

    Raises:
        UserError: there is no run, or a record that no run writes.
    """
    config = read_config(run.config, check_files=False)
    every = run.read_metrics() if every is None else every
    records = [record for record in every if "evaluation" in record or "eval_loss" in record]
    by_step = {int(record["step"]): _evaluated(record, run) for record in records}
    after = {number: one for number, one in by_step.items() if number and (step is None or number <= step)}
    if not after:
        return Comparison(step or 0, by_step.get(0), None, _asked(config, {}))
    last = _best(config, records) if step is None else None
    chosen = last if last in after else max(after)
    comparison = Comparison(chosen, by_step.get(0), after[chosen])
    return Comparison(chosen, comparison.before, comparison.after, _asked(config, comparison.figures()))


def leave_comparison(run: RunDirectory, step: int | None = None) -> Comparison:
    """As ``compare``, which is put into the run's directory as well. Raises ``UserError``."""
    found = compare(run, step)
    write_json(run.evaluation, found.to_json())
    return found


def _best(config: Config, records: Iterable[Mapping[str, Any]]) -> int | None:
    """The step that is best by ``checkpoint.best``."""
    figure, best, value = config.checkpoint.best, None, None
    for record in records if figure != "none" else ():
        new = record.get(figure)
        if record["step"] and new is not None and is_better(figure, new, value):
            best, value = int(record["step"]), new
    return best


def _evaluated(record: Mapping[str, Any], run: RunDirectory) -> Evaluated:
    try:
        evaluated = Evaluated.of_json(record.get("evaluation") or {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        found_there = f"evaluation of step {record['step']}: {error!r}"
        raise user_error(found_there, "what a run writes", where=str(run.metrics)) from error
    loss = record.get("eval_loss")
    tells_nothing = evaluated.rows is None and not evaluated.pairs  # a loss of the user's own, or an older run
    if tells_nothing and isinstance(loss, int | float):
        figures = Told(0, 0, Figure(float(loss), math.nan, math.nan), NO_FIGURE)
        return Evaluated(figures, general=evaluated.general, scores=evaluated.scores, answers=evaluated.answers)
    return evaluated


def _asked(config: Config, figures: Mapping[str, Figure]) -> tuple[Requirement, ...]:
    found = []
    for name, bound in config.evaluate.gate.items():
        value = figures[name].value if name in figures else math.nan
        found.append(Requirement(name, str(Bound.of(bound)), finite(value), Bound.of(bound).holds(value)))
    return tuple(found)


def _told(rows: str, before: Told | None, after: Told | None) -> Iterable[ComparedFigure]:
    if after is None:
        return
    for name in ("loss", "perplexity", "token_accuracy"):
        figure: Figure = getattr(after, name)
        if math.isfinite(figure.value):
            yield ComparedFigure(rows, name, None if before is None else getattr(before, name), figure)
