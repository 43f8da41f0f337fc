"""Records as a frame: a row for each step, with the evaluation that followed it."""

from __future__ import annotations

import math
from typing import Any

from tonnage.api.steps import frame_of


def test_a_row_for_each_step() -> None:
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0, "skipped": False, "memory": {"device_peak": 0, "host_peak": 9}},
        {"step": 2, "loss": None, "skipped": True, "memory": {"device_peak": 0, "host_peak": 8}},
        {"step": 2, "eval_loss": 1.5},
        {"step": 2, "checkpoint_bytes": 7},
        {"step": 2, "memory_phases": []},
    ]
    frame = frame_of(records)
    assert (frame.index.name, list(frame.index)) == ("step", [1, 2])
    assert list(frame.columns) == ["loss", "skipped", "memory.device_peak", "memory.host_peak", "eval_loss"]
    assert frame["loss"].dtype == frame["eval_loss"].dtype == "float64"
    assert frame["loss"][1] == 2.0
    assert math.isnan(frame["loss"][2])
    assert frame["eval_loss"][2] == 1.5
    assert list(frame["skipped"]) == [False, True]


def test_before_the_first_step() -> None:
    assert frame_of([]).empty
