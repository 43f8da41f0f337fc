"""What a run measured, as a frame of pandas, which comes with ``datasets``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tonnage.config.changes import flat

if TYPE_CHECKING:
    import pandas


def frame_of(records: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Steps and evaluations, a row for each step; what is a dictionary in a record has columns such as
    ``memory.host_peak``. What was evaluated before the first step is no step's."""
    import pandas

    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        if record["step"] and ("loss" in record or "eval_loss" in record):
            measured = {name: value for name, value in record.items() if name not in ("step", "evaluation")}
            rows.setdefault(record["step"], {}).update(flat(measured))
    return pandas.DataFrame(list(rows.values()), index=pandas.Index(list(rows), name="step", dtype="int64"))
