"""What was measured in the steps of a run, as curves: long ones thinned, so that no peak is lost.

Steps are divided into stretches of equal number. Of each the page has the mean, which is drawn and smoothed, and the
least and the greatest value, between which a band is drawn. Numbers have five digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tonnage.rundir.records import is_step, peak_memory

STRETCHES = 1500
"""Of a run; of several in one report, together at most twice as many."""
FEWEST = 200

Record = Mapping[str, Any]


SERIES = ("loss", "reward_margin", "reward_accuracy", "lr", "grad_norm", "tokens_per_second", "memory", "loss_scale")
"""What is drawn of a step: fields of ``MetricsRecord``, of ``memory`` the peak."""


class Measured:
    """What was measured so far, as columns: of all records, or of those that were written since, taken in turn."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self._columns = {name: np.zeros(0) for name in ("step", "tokens", "hours", "skipped", *SERIES)}
        self._evaluations = {name: np.zeros(0) for name in ("step", "loss")}
        self.take(records)

    @property
    def num_steps(self) -> int:
        return len(self._columns["step"])

    def take(self, records: Sequence[Record]) -> None:
        """Add the records of further lines."""
        steps = [record for record in records if is_step(record)]
        evaluations = [record for record in records if "eval_loss" in record]
        if steps:
            tokens = np.cumsum(np.nan_to_num(_column(steps, "tokens")))
            hours = np.cumsum(np.nan_to_num(_column(steps, "step_seconds"))) / 3600
            new = {name: _column(steps, name) for name in ("step", *SERIES)} | {
                "tokens": tokens + (self._columns["tokens"][-1:].sum()),
                "hours": hours + (self._columns["hours"][-1:].sum()),
                "skipped": np.array([bool(record.get("skipped")) for record in steps]),
            }
            self._columns = {name: np.append(column, new[name]) for name, column in self._columns.items()}
        if evaluations:
            new = {"step": _column(evaluations, "step"), "loss": _column(evaluations, "eval_loss")}
            self._evaluations = {name: np.append(column, new[name]) for name, column in self._evaluations.items()}

    def thinned(self, stretches: int, since: int = 0) -> dict[str, Any]:
        """As ``curves``, of at most so many stretches, and of the steps after the first ``since``."""
        columns = {name: column[since:] for name, column in self._columns.items()}
        number, count = columns["step"], len(columns["step"])
        starts = np.linspace(0, count, min(stretches, count), endpoint=False).astype(np.int64)
        ends = np.append(starts[1:], count) - 1
        series = {name: _thinned(columns[name], starts) for name in SERIES if np.isfinite(columns[name]).any()}
        return {
            "x": {name: _plain(columns[name][ends]) if count else [] for name in ("step", "tokens", "hours")},
            "series": series,
            "evaluations": self._evaluated(),
            "skipped": _plain(number[columns["skipped"].astype(bool)][:1000]),
        }

    def _evaluated(self) -> dict[str, Any]:
        step, every = self._evaluations["step"], self._columns["step"]
        last = np.searchsorted(every, step, side="right") - 1
        axes = {
            name: np.where(last >= 0, self._columns[name][last], 0) if len(every) else step * 0
            for name in ("tokens", "hours")
        }
        columns = {"step": step, **axes, "loss": self._evaluations["loss"]}
        return {name: _plain(column) for name, column in columns.items()}


def curves(records: Sequence[Record], num_runs: int = 1) -> dict[str, Any]:
    """The curves of a run, in plain values that JSON can say.

    ``x`` has the steps, the tokens and the hours at the end of each stretch; ``series`` by name ``mean`` and, where a
    stretch is more than one step, ``least`` and ``most``, all as long as ``x``; None where nothing was finite.
    ``evaluations`` has step, tokens, hours and loss of each. ``num_runs``: how many share the page.
    """
    return Measured(records).thinned(max(FEWEST, min(STRETCHES, 2 * STRETCHES // max(1, num_runs))))


def _column(records: Sequence[Record], name: str) -> np.ndarray:
    """A number of each record, NaN where it has none: float64 (records,)."""
    values = [peak_memory(record) if name == "memory" else record.get(name) for record in records]
    return np.array([value if isinstance(value, int | float) else np.nan for value in values], dtype=np.float64)


def _thinned(values: np.ndarray, starts: np.ndarray) -> dict[str, list[float | None]]:
    if len(starts) == len(values):
        return {"mean": _plain(values)}
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(np.int64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, values, 0.0), starts) / counts
    least = np.minimum.reduceat(np.where(known, values, np.inf), starts)
    most = np.maximum.reduceat(np.where(known, values, -np.inf), starts)
    return {"mean": _plain(mean), "least": _plain(least), "most": _plain(most)}


def _plain(values: np.ndarray) -> list[float | None]:
    """Numbers for JSON, of five digits unless they are whole."""
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    if not np.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.5g}")
