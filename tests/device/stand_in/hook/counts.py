"""Looks on: what each phase of the loop asked of the device, a line of JSON in ``STAND_IN_NOTES/counts-PROCESS.jsonl``.

``launches``, ``synchronisations`` (the host waited), ``copies`` and ``collectives`` as the stand-in counted them, and
``allocated`` and ``reserved``, the peaks of torch's allocator in the phase, bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

import torch

from tonnage.training.memory import Phases

COUNTED = ("launches", "synchronisations", "copies", "collectives")


class Counts(ctypes.Structure):
    """``struct stand_in_counts``."""

    _fields_ = [(name, ctypes.c_ulong) for name in COUNTED]


_now = Counts.in_dll(ctypes.CDLL(None), "stand_in_counts")
_before: dict[str, int] = {}
_end = Phases.end


def current() -> dict[str, int]:
    """All that was counted in this process."""
    return {name: getattr(_now, name) for name in COUNTED}


def end(self: Phases) -> None:
    """``Phases.end``, written down."""
    global _before
    now, phase = current(), self._phase
    if phase and self.device is not None and self.device.type == "cuda":
        note = {
            "rank": int(os.environ.get("RANK", "0")),
            "phase": phase,
            **{name: value - _before.get(name, 0) for name, value in now.items()},
            "allocated": torch.cuda.max_memory_allocated(self.device),
            "reserved": torch.cuda.max_memory_reserved(self.device),
        }
        with (Path(os.environ["STAND_IN_NOTES"]) / f"counts-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
    _end(self)
    _before = now


Phases.end = end  # type: ignore[method-assign]
