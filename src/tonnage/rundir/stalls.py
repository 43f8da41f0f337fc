"""A run that gets nowhere: who holds it up, told from the positions that its workers note.

Workers that wait for each other find it out themselves (``training.watchdog``). Nobody in a worker that is stopped
finds out anything, so whoever started the workers looks as well (``StallWatchdog``): it is there for the run of which
all stand still, one worker's above all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tonnage.errors import Stalled
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import Position

ORDER = ("starting", "import", "compile", "join", "build", "load", "optimizer")
BEFORE_HEARTBEATS = ("starting", "import", "compile")
"""Phases in which no worker says that it runs: libraries keep it busy, on a slow machine for longer than a step."""
ENDED = ("done", "stopped")
WITHIN_STEP = ("step", "forward", "backward", "weights", "update")


def describe(positions: Sequence[Position], silent: Sequence[int], timeout: float) -> str:
    """Who holds up the run, and where every worker is. ``silent`` are ranks whose heart does not beat."""
    if silent:
        who = ", ".join(f"worker {rank} ({positions[rank]})" for rank in silent)
        verb = "are" if len(silent) > 1 else "is"
        theirs = "their machine" if len(silent) > 1 else "its machine"
        why = f"{who} {verb} not running: stopped, swapped out, or {theirs} is gone"
    else:
        last = min(range(len(positions)), key=lambda rank: progress(positions[rank]))
        why = f"worker {last} is furthest behind ({positions[last]}): it runs, but gets nowhere"
    now = time.time()
    lines = [f"no progress for {timeout:g} s (launch.timeout); {why}"]
    for rank, position in enumerate(positions):
        since = f"for {now - position.seconds:.0f} s" if position.seconds else "not heard of"
        lines.append(f"  worker {rank}: {position}, {since}{', not running' if rank in silent else ''}")
    return "\n".join(lines)


def progress(position: Position) -> tuple[int, int, bool, int, int]:
    """How far a worker is, for comparison with others of the same run."""
    early = ORDER.index(position.phase) if position.phase in ORDER else len(ORDER)
    within = WITHIN_STEP.index(position.phase) if position.phase in WITHIN_STEP else len(WITHIN_STEP)
    return early, position.step, within == len(WITHIN_STEP), position.micro_batch, within


class StallWatchdog:
    """Whether all workers of a run stand still: asked now and then by whoever started them.

    A worker stands still when its heart has not beaten for ``timeout`` seconds in which this process looked, or when
    the system calls it stopped for as long. Where one still runs, its watchdog ends the run. A process that stood still
    itself has seen nothing of the others, and begins to count again.
    """

    def __init__(self, run: RunDirectory, num_workers: int, timeout: float) -> None:
        self._run, self._num_workers, self._timeout = run, num_workers, timeout
        self._pause = min(1.0, timeout / 10)
        self._seen: dict[int, tuple[float, float]] = {}
        """By rank: the last sign of life, and since when there is no newer one (``time.monotonic``)."""
        self._looked = time.monotonic()

    def stalled(self, processes: Sequence[int | None]) -> str:
        """What to say of the run if it stands still, else nothing; it is written down as well, as of worker 0, for
        those who follow elsewhere.

        ``processes`` are those of the workers, in order of rank; None for one that has ended, or that another machine
        has.
        """
        now = time.monotonic()
        if now - self._looked < self._pause:
            return ""
        was_away, self._looked = now - self._looked > max(self._timeout / 2, 2 * self._pause), now
        positions = [self._run.read_position(rank) for rank in range(self._num_workers)]
        still = [
            self._stands_still(*worker, now=now, again=was_away)
            for worker in zip(range(self._num_workers), positions, processes, strict=True)
        ]
        running = [rank for rank, position in enumerate(positions) if position.phase not in ENDED]
        if running and all(still[rank] for rank in running):
            message = describe(positions, running, self._timeout)
            with suppress(OSError):
                self._run.write_error(0, Stalled(message), Stalled.exit_status)
            return message
        return ""

    def _stands_still(self, rank: int, position: Position, process: int | None, *, now: float, again: bool) -> bool:
        is_stopped = process is not None and _is_stopped(process)
        alive, since = self._seen.get(rank, (-1.0, now))
        has_heart = position.phase not in BEFORE_HEARTBEATS
        if again or alive != position.alive or not (has_heart or is_stopped):
            alive, since = position.alive, now
        self._seen[rank] = alive, since
        return now - since > self._timeout


def _is_stopped(process: int) -> bool:
    """Whether the system says that a process is stopped (Linux; elsewhere nobody says so)."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
