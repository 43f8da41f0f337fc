"""How a worker's own watchdog counts seconds: those in which nothing happened, whatever the time of day."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.training.watchdog import Watchdog

TIMEOUT = 1.0


def ends_within(seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, clock_jumps: float) -> bool:
    """Whether a worker that gets nowhere is ended so soon, where the time of day jumps once it has begun."""
    ends = list[float]()
    monkeypatch.setattr(Watchdog, "_end", lambda watchdog: ends.append(time.monotonic()))
    run = RunDirectory(tmp_path)
    position, now = PositionFile(run.worker_position(0)), time.time
    position.update(phase="forward", step=1)
    with Watchdog(run, position, 0, 1, TIMEOUT):
        monkeypatch.setattr(time, "time", lambda: now() + clock_jumps)
        time.sleep(seconds)
    return bool(ends)


def test_a_clock_that_is_set_forward_or_a_machine_that_slept_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not ends_within(TIMEOUT / 2, tmp_path, monkeypatch, clock_jumps=3600)


@pytest.mark.parametrize("jumps", [0, -3600])
def test_what_gets_nowhere_ends_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jumps: float
) -> None:
    assert ends_within(1.5 * TIMEOUT, tmp_path, monkeypatch, clock_jumps=jumps)
