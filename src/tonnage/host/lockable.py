"""The limit of the system on memory that a process locks (``ulimit -l``), and who obeys it.

Linux counts what a process locks with ``mlock``. Drivers of GPUs lock memory by themselves, and whether they count it
is theirs to say: NVIDIA's open kernel modules do not (``os_lock_user_pages``), so that a limit of 8 MB, which many
systems and containers have, says nothing about what a run can lock. ``tonnage doctor`` tries it.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def lockable_bytes() -> int | None:
    """Bytes that this process may lock once it has raised its limit as far as it may; None where there is no limit."""
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if most == resource.RLIM_INFINITY else most


def raise_limit() -> None:
    """Raise the limit of this process as far as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))


@contextmanager
def limited_to(num_bytes: int) -> Iterator[None]:
    """Have this process lock no more than ``num_bytes`` meanwhile, as far as the system counts."""
    now, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    lower = num_bytes if now == resource.RLIM_INFINITY else min(now, num_bytes)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (lower, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (now, most))


def limit_in_words() -> str:
    """What ``ulimit -l`` would say of the most that this process may have."""
    most = lockable_bytes()
    return "no limit" if most is None else f"{most / 1e6:,.2f} MB"
