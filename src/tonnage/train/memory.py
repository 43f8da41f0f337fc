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


class HeapLimit:
    """Keeps freed host memory from piling up: returns it to the system when the process outgrows its first step.

    Packs differ in length, so activations differ in size from step to step, and glibc's heap fragments: a run that
    needed 2 GB was seen to hold 6 after a hundred steps. Trimming after every step would cost 3% of its time, in pages
    that must be faulted in again; trimming when a fifth more is resident than after the first step costs nothing.
    """

    def __init__(self, growth: float = 1.2) -> None:
        self._growth = growth
        self._limit: float | None = None

    def after_step(self) -> None:
        """Call between steps, when gradients are gone."""
        resident = _resident_bytes()
        if resident is None:
            return
        if self._limit is None:
            self._limit = self._growth * resident
        elif resident > self._limit:
            trim = _malloc_trim()
            if trim is not None:
                trim(0)


def _resident_bytes() -> int | None:
    """Resident size of this process where the system says it cheaply (Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return None


@cache
def _malloc_trim() -> Any | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
