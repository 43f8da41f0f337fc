"""What was measured in the steps of a run, as curves: long ones thinned, so that no peak is lost.

Steps are divided into stretches of equal number. Of each the page has the mean, which is drawn and smoothed, and the
least and the greatest value, between which a band is drawn. Numbers have five digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tonnage.rundir.records import is_step, peak_memory

STRETCHES = 1500
"""Of a run; of several in one report, together at most twice as many."""
FEWEST = 200

Record = Mapping[str, Any]


SERIES: dict[str, Callable[[Record], float | None]] = {
    "loss": lambda record: record.get("loss"),
    "reward_margin": lambda record: record.get("reward_margin"),
    "reward_accuracy": lambda record: record.get("reward_accuracy"),
    "lr": lambda record: record.get("lr"),
    "grad_norm": lambda record: record.get("grad_norm"),
    "tokens_per_second": lambda record: record.get("tokens_per_second"),
    "memory": peak_memory,
    "loss_scale": lambda record: record.get("loss_scale"),
}
"""What is drawn of a step."""


def curves(records: Sequence[Record], num_runs: int = 1) -> dict[str, Any]:
    """The curves of a run, in plain values that JSON can say.

    ``x`` has the steps, the tokens and the hours at the end of each stretch; ``series`` by name ``mean`` and, where a
    stretch is more than one step, ``least`` and ``most``, all as long as ``x``; None where nothing was finite.
    ``evaluations`` has step, tokens, hours and loss of each. ``num_runs``: how many share the page.
    """
    steps = [record for record in records if is_step(record)]
    most = max(FEWEST, min(STRETCHES, 2 * STRETCHES // max(1, num_runs)))
    starts = np.unique(np.linspace(0, len(steps), min(most, len(steps)), endpoint=False).astype(np.int64))
    ends = np.append(starts[1:], len(steps)) - 1
    number = _column(steps, lambda record: record["step"])
    tokens = np.cumsum(np.nan_to_num(_column(steps, lambda record: record.get("tokens"))))
    hours = np.cumsum(np.nan_to_num(_column(steps, lambda record: record.get("step_seconds")))) / 3600
    axes = {"step": number, "tokens": tokens, "hours": hours}
    series = {}
    for name, of in SERIES.items():
        values = _column(steps, of)
        if np.isfinite(values).any():
            series[name] = _thinned(values, starts)
    evaluations = [record for record in records if "eval_loss" in record]
    evaluated = _column(evaluations, lambda record: record["step"])
    last = np.searchsorted(number, evaluated, side="right") - 1
    return {
        "x": {name: _plain(axis[ends]) if steps else [] for name, axis in axes.items()},
        "series": series,
        "evaluations": {
            "step": _plain(evaluated),
            "tokens": _plain(np.where(last >= 0, tokens[last], 0) if steps else evaluated * 0),
            "hours": _plain(np.where(last >= 0, hours[last], 0) if steps else evaluated * 0),
            "loss": _plain(_column(evaluations, lambda record: record["eval_loss"])),
        },
        "skipped": _plain(number[[bool(record.get("skipped")) for record in steps]][:1000]) if steps else [],
    }


def _column(records: Sequence[Record], of: Callable[[Record], Any]) -> np.ndarray:
    """A number of each record, NaN where it has none: float64 (records,)."""
    found = [value if isinstance(value := of(record), int | float) else np.nan for record in records]
    return np.array(found, dtype=np.float64)


def _thinned(values: np.ndarray, starts: np.ndarray) -> dict[str, list[float | None]]:
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(np.int64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, values, 0.0), starts) / counts
    if len(starts) == len(values):
        return {"mean": _plain(mean)}
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
