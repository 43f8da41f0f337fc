"""Steps of a run, as its ``metrics.jsonl`` tells them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tonnage.config.changes import flat
from tonnage.rundir.records import is_step

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Step:
    """One update of the weights, as ``metrics.jsonl`` tells it; NaN and 0 for what an old run does not."""

    step: int
    """From 1."""
    epoch: float
    """Passes over the data that are done."""
    loss: float
    """Mean over the supervised tokens of the step, in nats; not finite in a step that was skipped."""
    grad_norm: float
    """Of all gradients together, before clipping."""
    lr: float
    tokens: int
    """Trained on in the step, padding left out, over all workers."""
    supervised_tokens: int
    """Those of them whose loss counts."""
    tokens_per_second: float
    step_seconds: float
    memory: Mapping[str, float] = field(repr=False)
    """Bytes: ``device_peak`` and ``host_peak`` of the worker that took most."""
    skipped: bool
    """Whether loss or gradient were not finite, so that nothing was changed."""
    record: Mapping[str, Any] = field(repr=False, compare=False)
    """All that the run wrote of it."""

    @staticmethod
    def of(record: Mapping[str, Any]) -> Step | None:
        """The step of a record; None where it tells of something else."""
        if not is_step(record):
            return None

        def number(name: str) -> float:
            value = record.get(name)
            return math.nan if value is None else float(value)

        return Step(
            step=int(record["step"]),
            epoch=number("epoch"),
            loss=number("loss"),
            grad_norm=number("grad_norm"),
            lr=number("lr"),
            tokens=int(record.get("tokens") or 0),
            supervised_tokens=int(record.get("supervised_tokens") or 0),
            tokens_per_second=number("tokens_per_second"),
            step_seconds=number("step_seconds"),
            memory=record.get("memory") or {},
            skipped=bool(record.get("skipped")),
            record=record,
        )


def frame_of(records: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Steps and evaluations as a frame of pandas, which comes with ``datasets``: a row for each step; what is a
    dictionary in a record has columns such as ``memory.host_peak``. What was evaluated before the first step is no
    step's."""
    import pandas

    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        if record["step"] and ("loss" in record or "eval_loss" in record):
            measured = {name: value for name, value in record.items() if name not in ("step", "evaluation")}
            rows.setdefault(record["step"], {}).update(flat(measured))
    return pandas.DataFrame(list(rows.values()), index=pandas.Index(list(rows), name="step", dtype="int64"))
