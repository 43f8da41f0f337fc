"""A watchdog in every worker: a run that gets nowhere ends, and says which worker is where.

Ranks wait for each other many times a step, so one that hangs stops them all, and the error that a communication back
end gives in the end names none of them. Here each worker notes where it is (its position) and, from a thread of its
own, that it runs at all (its heartbeat). A worker that has made no progress for the configured time reads the notes of
all of them and ends the run, before the back end's own time-out:

* a worker whose heart does not beat while it is watched is not running: stopped, swapped out, its machine gone;
* if all hearts beat, the worker that is furthest behind is the one that the others wait for.

Where all workers are stopped none of them notices: that is for whoever started them (``rundir.stalls.StallWatchdog``).
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from tonnage.errors import Stalled
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import Position, PositionFile
from tonnage.rundir.stalls import ENDED, describe

BACK_END_SECONDS = 60.0
"""How much later than the watchdog the communication back end gives up."""


class Watchdog:
    """Watches this worker as long as its context is open. Ends the process when there is no progress."""

    def __init__(self, run: RunDirectory, position: PositionFile, rank: int, num_ranks: int, timeout: float) -> None:
        """``timeout``: seconds without progress."""
        self._run, self._position, self._rank, self._num_ranks = run, position, rank, num_ranks
        self._timeout = timeout
        self._beat_seconds = min(1.0, timeout / 10)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        """Seconds are counted here, and not by the time of day: that jumps where a clock is set or a machine slept."""
        changed, since = self._position.seconds, time.monotonic()
        late = since
        while not self._closed.wait(self._beat_seconds):
            self._position.beat()
            was, late = late, time.monotonic()
            stood_still = late - was > self._timeout / 2  # this process itself: it has not been watching
            if stood_still or self._position.seconds != changed:
                changed, since = self._position.seconds, late
            elif late - since > self._timeout:
                self._end()

    def _end(self) -> None:
        first = self._positions()
        if self._closed.wait(3 * self._beat_seconds):
            return
        self._position.beat()
        second = self._positions()
        silent = [
            rank
            for rank in range(self._num_ranks)
            if first[rank].alive == second[rank].alive and second[rank].phase not in ENDED
        ]
        message = describe(second, silent, self._timeout)
        with suppress(OSError):  # a full disk: it ends all the same
            self._run.write_error(self._rank, Stalled(message), Stalled.exit_status)
        os._exit(Stalled.exit_status)

    def _positions(self) -> list[Position]:
        return [self._run.read_position(rank) for rank in range(self._num_ranks)]
