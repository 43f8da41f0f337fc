"""An update that goes on while the next step begins."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator


class Background:
    """Carries out ``work`` in a thread. It yields turns in ascending order; those before the one it yields are done."""

    def __init__(self, work: Iterator[int]) -> None:
        self._work = work
        self._reached: float = -math.inf
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="update", daemon=True).start()

    def _run(self) -> None:
        try:
            for turn in self._work:
                self._reach(turn)
        except BaseException as error:
            self._error = error
        self._reach(math.inf)

    def _reach(self, turn: float) -> None:
        with self._changed:
            self._reached = turn
            self._changed.notify_all()

    def wait(self, turn: int | None = None) -> float:
        """Wait until ``turn`` is done, or all work; the seconds that took. Raises what the work raised."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._reached > turn if turn is not None else self._reached == math.inf)
        if self._error is not None:
            raise self._error
        return time.perf_counter() - began
