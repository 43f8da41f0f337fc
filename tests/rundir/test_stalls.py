"""A run whose workers all stand still is noticed by whoever started it, and only such a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tonnage.errors import WorkerFailed
from tonnage.launch.local import run_workers
from tonnage.rundir import stalls
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.rundir.stalls import StallWatchdog

TIMEOUT = 20.0


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stalls, "time", clock)
    monkeypatch.setattr("tonnage.rundir.positions.time", clock)
    return clock


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def watched(
    watchdog: StallWatchdog, clock: Clock, seconds: float, processes: list[int | None], each: float = 1.0
) -> tuple[str, float]:
    """What the watchdog says within some seconds, and after how many it says it."""
    began = clock.now
    while clock.now < began + seconds:
        clock.now += each
        if message := watchdog.stalled(processes):
            return message, clock.now - began
    return "", seconds


def test_workers_that_all_stand_still(run: RunDirectory, clock: Clock) -> None:
    positions = [PositionFile(run.worker_position(rank)) for rank in range(2)]
    for position in positions:
        position.update(phase="forward", step=7)
    message, seconds = watched(StallWatchdog(run, 2, TIMEOUT), clock, 100, [None, None])
    assert TIMEOUT <= seconds <= TIMEOUT + 3
    assert message.startswith(
        f"no progress for {TIMEOUT:g} s (launch.timeout); worker 0 (forward, step 7), worker 1 (forward, step 7) are "
        "not running: stopped, swapped out, or their machine is gone"
    )


def test_one_heart_that_beats_is_enough(run: RunDirectory, clock: Clock) -> None:
    """Its own watchdog will say what holds it up."""
    positions = [PositionFile(run.worker_position(rank)) for rank in range(2)]
    watchdog = StallWatchdog(run, 2, TIMEOUT)
    for _ in range(100):
        clock.now += 1
        positions[1].beat()
        positions[1].update(phase="forward")
        assert watchdog.stalled([None, None]) == ""


def test_phases_without_heartbeats_are_waited_for(run: RunDirectory, clock: Clock) -> None:
    position = PositionFile(run.worker_position(0))
    for phase in ("import", "compile"):
        position.update(phase=phase)
        assert watched(StallWatchdog(run, 1, TIMEOUT), clock, 200, [None])[0] == ""
    position.update(phase="done")
    assert watched(StallWatchdog(run, 1, TIMEOUT), clock, 200, [None])[0] == ""
    run.worker_position(0).unlink()  # it has not begun
    assert watched(StallWatchdog(run, 1, TIMEOUT), clock, 200, [None])[0] == ""


@pytest.mark.parametrize("away", [TIMEOUT, 3600.0])
def test_a_launcher_that_stood_still_itself_counts_anew(run: RunDirectory, clock: Clock, away: float) -> None:
    position = PositionFile(run.worker_position(0))
    position.update(phase="forward")
    watchdog = StallWatchdog(run, 1, TIMEOUT)
    assert watched(watchdog, clock, TIMEOUT - 2, [None])[0] == ""
    clock.now += away  # a suspended laptop: nobody looked, and the worker stood still as well
    assert watchdog.stalled([None]) == ""
    message, seconds = watched(watchdog, clock, 100, [None])
    assert message
    assert seconds > TIMEOUT


@pytest.fixture
def stopped() -> Iterator[int]:
    """A process that the system calls stopped."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it")
def test_a_stopped_process_is_known_in_every_phase(run: RunDirectory, clock: Clock, stopped: int) -> None:
    position = PositionFile(run.worker_position(0))
    for phase in ("import", "compile", "forward"):
        position.update(phase=phase)
        assert "worker 0" in watched(StallWatchdog(run, 1, TIMEOUT), clock, TIMEOUT + 3, [stopped])[0]
        assert watched(StallWatchdog(run, 1, TIMEOUT), clock, TIMEOUT + 3, [os.getpid()])[0] == "" or phase == "forward"


BEATS = """
import sys, time
from pathlib import Path
from tonnage.rundir.positions import PositionFile
from tonnage.rundir.directory import RunDirectory
position = PositionFile(RunDirectory(sys.argv[1]).worker_position(int(__import__("os").environ["RANK"])))
position.update(phase="forward", step=3)
for _ in range(600):
    position.beat()
    time.sleep(0.1)
"""


def process_writing(log: Path) -> int:
    """The process whose output a file is."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if (process / "fd" / "1").samefile(log):
                return int(process.name)
    raise AssertionError("no such process")


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_that_are_stopped_end_the_run(run: RunDirectory, number: int) -> None:
    timeout, stopped_at = 2.0, 0.0

    def stop_them() -> None:
        nonlocal stopped_at
        if not stopped_at and all(run.read_position(rank).step for rank in range(number)):
            stopped_at = time.monotonic()
            for rank in range(number):
                pids.append(process_writing(run.worker_log(rank)))
                os.kill(pids[-1], signal.SIGSTOP)

    pids: list[int] = []
    command = [sys.executable, "-c", BEATS, str(run.path)]
    with pytest.raises(WorkerFailed, match=r"no progress for 2 s \(launch.timeout\); worker 0 \(forward, step 3\)"):
        run_workers(run, number, 1, command=command, poll=stop_them, timeout=timeout)
    assert time.monotonic() - stopped_at < timeout + 10
    assert len(pids) == number
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert [error.kind for error in run.read_errors()] == ["Stalled"]


@pytest.mark.slow
def test_workers_that_note_nothing_are_not_watched(run: RunDirectory) -> None:
    assert run_workers(run, 1, 1, command=[sys.executable, "-c", "import time; time.sleep(3)"]) == 0
