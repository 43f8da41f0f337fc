"""Memory of this process: its high-water mark in every phase, and giving back what it no longer uses."""

from __future__ import annotations

import ctypes
import json
import re
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch

from tonnage.parallel.world import World
from tonnage.rundir.positions import PositionFile

RETURNED_BYTES = 256 << 10
LARGEST_KEPT_BYTES = 32 << 20
"""Larger ones glibc never keeps."""
LARGEST_KEPT_OF_PADDED_BYTES = 4 << 20
"""Of padded rows, whose tensors differ in size from micro-batch to micro-batch, so that no place fits the next one: a
hybrid kept 700 MB with the limit above and 250 MB with this one, and was as fast."""
UNPLANNED_BYTES = 64 << 20
"""What libraries take when they are first used, and what a process may gain between two trims at least."""
NEVER_BYTES = 1 << 30
GROWTH = 1.2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""


@dataclass(frozen=True)
class Peak:
    """High-water marks in bytes."""

    host: int = 0
    """Resident in this process, the pages of files that it maps included."""
    device: int = 0
    """Allocated on the device."""

    def __or__(self, other: Peak) -> Peak:
        return Peak(max(self.host, other.host), max(self.device, other.device))


class Phases:
    """Where this worker is, for others to read, and how much memory each phase took at most.

    A phase lasts until the next one is entered. Entering one costs about 50 microseconds.
    """

    def __init__(self, position: PositionFile, device: torch.device | None = None) -> None:
        self.position = position
        self.device = device
        self.peaks: dict[str, Peak] = {}
        """Of every phase that has ended, in the order in which they were first entered."""
        self._phase = ""

    def enter(self, phase: str, **where: int) -> None:
        """End the phase before and begin ``phase``. The first forward pass is a phase of its own."""
        self.end()
        self._phase = "first forward" if phase == "forward" and "first forward" not in self.peaks else phase
        self.position.update(phase=phase, **where)

    def end(self) -> None:
        """End the phase, and note its peak."""
        peak = take_peak(self.device)
        if self._phase:
            self.peaks[self._phase] = self.peaks.get(self._phase, Peak()) | peak
        self._phase = ""

    def progress(self, **where: int) -> None:
        self.position.update(**where)

    def advance(self, done: int, total: int) -> None:
        """Say that so many of all micro-batches of the phase are done."""
        self.progress(micro_batch=done, num_micro_batches=total)

    @property
    def peak(self) -> Peak:
        """Of all phases that have ended."""
        return reduce(Peak.__or__, self.peaks.values(), Peak())

    def of_all_ranks(self, world: World) -> list[dict[str, Any]]:
        """Peaks by phase, bytes by rank: ``[{"phase": ..., "host": [...], "device": [...]}]``."""
        mine = json.dumps({phase: [peak.host, peak.device] for phase, peak in self.peaks.items()})
        ranks = [json.loads(text) for text in world.gather(mine)]
        return [
            {"phase": phase, "host": [r[phase][0] for r in ranks], "device": [r[phase][1] for r in ranks]}
            for phase in ranks[0]
            if all(phase in r for r in ranks)
        ]


def take_peak(device: torch.device | None = None) -> Peak:
    """The high-water marks since the last call. Where the system cannot forget one, since the start."""
    on_device = 0
    if device is not None and device.type == "cuda":
        on_device = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    return Peak(_take_host_peak(), on_device)


def _take_host_peak() -> int:
    # The kernel's own mark: Linux's getrusage would count the process that started this one as well.
    try:
        status = Path("/proc/self/status").read_bytes()
    except OSError:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return resident if sys.platform == "darwin" else resident * 1024
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_bytes(b"5")
    mark = re.search(rb"VmHWM:\s*(\d+) kB", status)
    return int(mark[1]) * 1024 if mark else 0


class HeapLimit:
    """Keeps freed host memory from piling up: returns it to the system when the process outgrows what was planned, or
    its first step.

    Packs differ in length, so activations differ in size from step to step, and glibc's heap fragments: a run that
    needed 2 GB was seen to hold 6 after a hundred steps, and one of padded rows twice what was planned after the first.
    Trimming after every step would cost 3% of its time, in pages that must be faulted in again.
    """

    def __init__(self, planned: float | None = None) -> None:
        """``planned``: bytes that may come to stay after this call (``Plan.kept_bytes``). Without it, a process may
        have ``GROWTH`` times what it has after its first step."""
        self._planned = planned is not None
        self._limit: float | None = None
        if planned is not None and (resident := _resident_bytes()) is not None:
            self._limit = resident + max(planned, UNPLANNED_BYTES)

    def after_passes(self) -> None:
        """Call between micro-batches, when activations are gone."""
        if self._planned:
            self._look(0)

    def after_step(self, besides: int = 0) -> None:
        """Call between steps, when gradients are gone. ``besides`` are bytes that came since and will stay, unplanned.

        Without them a run that had saved once would trim after every step, and was seen to take a fifth longer.
        """
        self._look(0 if self._planned else besides)

    def _look(self, besides: int) -> None:
        resident = _resident_bytes()
        if resident is None:
            return
        resident -= besides
        if self._limit is None:
            self._limit = GROWTH * resident
        elif resident > self._limit:
            trim = _malloc_trim()
            if trim is not None:
                trim(0)
            if self._planned:  # what cannot be given back has come to stay: not to be tried for again and again
                self._limit = max(self._limit, (_resident_bytes() or 0) + UNPLANNED_BYTES)


def set_up_heap(*, returns: bool, padded: bool = False) -> None:
    """Decide once whether the heap keeps the place of large tensors that are freed, or returns it to the system.

    Left to itself glibc raises the size from which it returns memory as a program runs, and trims the heap's end often.
    Kept, and in huge pages (``worker``), steps of a model of 70M parameters took 2.48 ms a token instead of 3.17;
    returned, 3.47 in huge pages and 3.82 without, but a step holds 5 to 25% less, and what it holds can be planned.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        kept = LARGEST_KEPT_OF_PADDED_BYTES if padded else LARGEST_KEPT_BYTES
        mallopt(_M_MMAP_THRESHOLD, RETURNED_BYTES if returns else kept)
        mallopt(_M_TRIM_THRESHOLD, NEVER_BYTES)


def _resident_bytes() -> int | None:
    """Resident size of this process, without files that it maps, where the system says it cheaply (Linux)."""
    try:
        resident, of_files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        return (resident - of_files) * resource.getpagesize()
    except OSError:
        return None


@cache
def _malloc_trim() -> Any | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
