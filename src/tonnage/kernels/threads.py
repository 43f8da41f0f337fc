"""How many CPU threads torch and the loops of this room use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numba
import torch

from tonnage.host.spinning import sleep_soon_beside_others


def use_threads(number: int) -> None:
    """Let torch and the loops of this room use ``number`` CPU threads.

    Both run on one OpenMP pool, and numba, when it starts its threads, sets the size of that pool for torch as well.
    So numba goes first; otherwise the first update would give each of two workers on two cores two threads, and all
    four would spin against each other. From now on they sleep soon while others use the machine (``host.spinning``).
    """
    sleep_soon_beside_others()
    numba.set_num_threads(min(number, numba.config.NUMBA_NUM_THREADS))
    torch.set_num_threads(number)


def num_threads() -> int:
    """CPU threads of the loops of this room, in this thread."""
    return int(numba.get_num_threads())


def use_loop_threads(number: int) -> None:
    """Let the loops of this room use ``number`` CPU threads in this thread: each thread has a number of its own."""
    if number != numba.get_num_threads():
        numba.set_num_threads(number)


@contextmanager
def half_the_threads() -> Iterator[None]:
    """Let the loops of this room use half of their threads, for as long as other threads of this process move bytes.

    All threads of a loop wait for the slowest, which is the one that shares its core with such a thread: with both of
    two cores, an update beside a busy disk took eight times as long as with one.
    """
    number = numba.get_num_threads()
    numba.set_num_threads(max(1, number // 2))
    try:
        yield
    finally:
        numba.set_num_threads(number)
