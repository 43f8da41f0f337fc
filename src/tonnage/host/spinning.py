"""Threads that wait for each other spin while the machine is ours, and sleep soon while others use it.

A thread of GNU's OpenMP that waits for the others of its pool spins for some 15 ms before it sleeps, so it is there at
once for the next operation. But a core that spins is not idle: where another process has the core of the thread that is
waited for, the system sees no reason to move either, and a step takes several times as long as alone. Where a process
has more threads of OpenMP than CPUs, they spin 1,000 turns, 0.05 ms at most (GOMP_SPINCOUNT in libgomp's manual), which
costs a twentieth to a fifth of the time where nobody else computes. So this looks, four times a second, how long
threads of this process wait for cores, and as long as they do it keeps a second pool of threads that sleep.

Who sets GOMP_SPINCOUNT or OMP_WAIT_POLICY has chosen. Other OpenMP libraries than GNU's, which torch has on Linux, are
left as they are.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

from tonnage.host.control_groups import read
from tonnage.host.core_waits import TASKS, longest_wait, waited_seconds
from tonnage.host.threads import available_cpus

CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SECONDS = 0.25
"""Between two looks."""
DISTURBED, QUIET = 0.1, 0.04
"""Share of the time that a thread waits for a core from which others are there, and below which they are not."""
CALM = 8
"""Quiet looks in a row after which threads spin again."""

_lock = threading.Lock()
_watched = False


def sleep_soon_beside_others() -> None:
    """Begin to look, in a thread that ends with this process; a second call changes nothing."""
    global _watched
    with _lock:
        if _watched or any(name in os.environ for name in CHOSEN) or not waited_seconds(TASKS):
            return
        _watched = True
        threading.Thread(target=_watch, name="spinning", daemon=True).start()


def _libraries(maps: Path = Path("/proc/self/maps")) -> list[ctypes.CDLL]:
    """GNU's OpenMP in this process: torch comes with one of its own, and numba takes the system's."""
    paths = {line.split(maxsplit=5)[-1] for line in read(maps).splitlines() if "/libgomp" in line}
    return [ctypes.CDLL(path) for path in sorted(paths)]


def _watch() -> None:
    before, looked, quiet = waited_seconds(TASKS), time.perf_counter(), 0
    pools = list[_SecondPool]()
    while True:
        time.sleep(SECONDS)
        waited, now = waited_seconds(TASKS), time.perf_counter()
        share = longest_wait(waited, before) / (now - looked)
        before, looked = waited, now
        quiet = quiet + 1 if share < QUIET else 0
        if not pools and share >= DISTURBED:
            pools = [_SecondPool(library) for library in _libraries()]
        elif pools and quiet >= CALM:
            for pool in pools:
                pool.close()
            pools = []


class _SecondPool:
    """More threads of an OpenMP library than there are CPUs; they sleep."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._end = library, threading.Event()
        self._thread = threading.Thread(target=self._hold, name="second pool", daemon=True)
        self._thread.start()

    def _hold(self) -> None:
        """A parallel region that does nothing makes the pool; it is gone with this thread, which made it."""
        nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
        self._library.GOMP_parallel(nothing, None, ctypes.c_uint(len(available_cpus()) + 1), ctypes.c_uint(0))
        self._end.wait()

    def close(self) -> None:
        """Let the pool go."""
        self._end.set()
        self._thread.join()
