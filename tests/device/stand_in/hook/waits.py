"""Looks on: where the host waits for a device, a line of JSON in ``STAND_IN_NOTES/waits-PROCESS.jsonl`` each time.

The stand-in calls back whenever it is asked to wait: for a stream, an event, a device or a copy. Of each it is noted in
which phase of the loop it was, and the lines of tonnage that led to it, the innermost first.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

from tonnage.training.memory import Phases

INNERMOST = 3
"""Lines that are told."""
_phase = ""
_enter = Phases.enter


def enter(self: Phases, phase: str, **where: int) -> None:
    """``Phases.enter``, remembered."""
    global _phase
    _enter(self, phase, **where)
    _phase = phase


def waited() -> None:
    """The host waits."""
    places, frame = list[str](), sys._getframe(1)
    while frame is not None and len(places) < INNERMOST:
        _, found, inside = frame.f_code.co_filename.rpartition("/tonnage/")
        if found:
            places.append(f"{inside}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    note = {"rank": int(os.environ.get("RANK", "0")), "phase": _phase, "places": places}
    with (Path(os.environ["STAND_IN_NOTES"]) / f"waits-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(note) + "\n")


Phases.enter = enter  # type: ignore[method-assign]
_called = ctypes.CFUNCTYPE(None)(waited)
ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stand_in_on_synchronisation").value = ctypes.cast(
    _called, ctypes.c_void_p
).value
