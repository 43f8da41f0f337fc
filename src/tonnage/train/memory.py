"""Memory of this process: its high-water marks, and giving back what it no longer uses."""

from __future__ import annotations

import ctypes
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch


def memory_peaks(device: torch.device) -> dict[str, int]:
    """High-water marks of this process in bytes: allocated on the device, resident on the host."""
    return {
        "device_peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "host_peak": _host_peak(),
    }


def _host_peak() -> int:
    """The kernel's high-water mark. Linux's ``getrusage`` would count the process that started this one as well."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


def give_back_free_memory() -> None:
    """Return freed host memory to the system; where the C library cannot, do nothing.

    Packs differ in length, so activations differ in size from step to step, and glibc's heap fragments: a run that
    needs 2 GB was seen to hold 6 after a hundred steps. Trimming once a step costs about 1% of its time.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
