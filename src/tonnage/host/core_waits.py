"""How long this process waits for cores while other processes have them.

Linux counts for every thread how long it was ready to run and had no core (the second number of ``schedstat``). Of
threads that work together each waits for the last, so what counts is the thread that waited longest. Those that mean to
give way, as whoever writes a checkpoint beside training does (``nice``), are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tonnage.host.control_groups import read

TASKS = Path("/proc/self/task")
NICE = 16
"""Place of a thread's niceness after its name in ``stat``."""
NOTABLE = 0.1
"""Share of the time from which others have slowed a step down; of a quiet machine it is below 0.02."""
LEAST_SECONDS = 1.0
"""Between two looks, each of which reads some files a thread: steps may be short."""


class CoreWaits:
    """Share of the time that a thread of this process waited for a core, step by step; said when it becomes notable."""

    def __init__(self, log: Callable[[str], None], tasks: Path = TASKS) -> None:
        self._log, self._tasks = log, tasks
        self._waited, self._looked = waited_seconds(tasks), time.perf_counter()
        self._share: float | None = None
        self._is_slow = False

    def of_step(self, step: int, seconds: float) -> dict[str, float]:
        """What ``metrics.jsonl`` says of a step that took ``seconds``; nothing where the system does not count.

        Of steps shorter than ``LEAST_SECONDS`` it is the share of several.
        """
        now = time.perf_counter()
        if now - self._looked >= LEAST_SECONDS:
            waited = waited_seconds(self._tasks)
            self._share = min(1.0, longest_wait(waited, self._waited) / (now - self._looked)) if waited else None
            self._waited, self._looked = waited, now
            if self._share is not None:
                self._say(step, seconds, self._share)
        return {} if self._share is None else {"core_wait": round(self._share, 4)}

    def _say(self, step: int, seconds: float, share: float) -> None:
        if (share >= NOTABLE) != self._is_slow:
            self._is_slow = not self._is_slow
            took = f"step {step} took {seconds:.2f} s"
            if self._is_slow:
                took += f": for {share:.0%} of the time a thread waited for a core that other processes had"
            else:
                took += ": other processes do not slow it down any more"
            self._log(took)


def longest_wait(waited: Mapping[str, float], before: Mapping[str, float]) -> float:
    """Of one thread, in seconds, since ``before``."""
    return max((seconds - before.get(thread, 0.0) for thread, seconds in waited.items()), default=0.0)


def waited_seconds(tasks: Path) -> dict[str, float]:
    """By thread: seconds in which it was ready and had no core. Empty where the system does not count them."""
    waited, nice = {}, {}
    for folder in sorted(tasks.glob("[0-9]*")):
        counted, stat = read(folder / "schedstat").split(), read(folder / "stat").rpartition(")")[2].split()
        if len(counted) == 3 and len(stat) > NICE:  # not of a thread that has ended meanwhile
            waited[folder.name], nice[folder.name] = int(counted[1]) / 1e9, int(stat[NICE])
    least = min(nice.values(), default=0)
    return {thread: seconds for thread, seconds in waited.items() if nice[thread] == least}
