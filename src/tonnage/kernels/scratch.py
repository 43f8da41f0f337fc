"""Memory that loops on the CPU use again in every call, in large pages where the system has any.

In pages of 4 kB that lie anywhere, what fills a core's cache may need the same few places of it: of processes that
computed the same, one in four took a third longer for attention's gradients, until it was given other pages.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import numpy as np

LARGE_PAGE = 2 << 20

_of_thread = threading.local()


def kept_memory(num_bytes: int) -> np.ndarray:
    """The calling thread's own memory, uint8 (num_bytes,), with whatever lies there; it begins at a large page."""
    memory: np.ndarray | None = getattr(_of_thread, "memory", None)
    if memory is None or len(memory) < num_bytes:
        memory = _of_thread.memory = _in_large_pages(num_bytes)
    return memory[:num_bytes]


def _in_large_pages(num_bytes: int) -> np.ndarray:
    size = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE
    region = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(region, np.uint8)
    start = -memory.ctypes.data % LARGE_PAGE
    return memory[start : start + size]
