"""What a contestant says to the contest: one line of JSON for each thing, over two pipes. Standard library only, since
a peer's process runs in an environment of its own.

    contest  --> {"steps": 3}                              take three steps
             <-- {"losses": [...], "tokens": [...]}         they are taken, and nothing of them goes on

A contestant begins by saying what it is (``{"ready": ...}``) and ends when the pipe to it does. Between turns it waits
in a read and computes nothing.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

COMMANDS, ANSWERS = "CONTEST_COMMANDS", "CONTEST_ANSWERS"
"""Variables with the descriptors of the two pipes."""


class Seat:
    """A contestant's side."""

    def __init__(self) -> None:
        self._commands = os.fdopen(int(os.environ[COMMANDS]))
        self._answers = os.fdopen(int(os.environ[ANSWERS]), "w")
        self._cpu_seconds = 0.0

    def ready(self, **facts: Any) -> None:
        """Say that everything is built."""
        self._say({"ready": facts})

    def turn(self) -> int:
        """Wait for one's turn: how many steps to take, 0 when the contest is over."""
        line = self._commands.readline()
        self._cpu_seconds = time.process_time()
        return int(json.loads(line)["steps"]) if line else 0

    def done(self, losses: list[float], tokens: list[int], peak: int = 0, device_peak: int | None = None) -> None:
        """Say that the turn is over: loss and non-padding tokens of each of its steps, of all ranks together.

        ``peak`` is the largest resident size so far, from a program that has the kernel forget its own mark;
        ``device_peak`` what a GPU's allocator had given out, which counts instead where there is one.
        """
        spent = time.process_time() - self._cpu_seconds
        largest = max(peak, peak_bytes()) if device_peak is None else device_peak
        told = {"losses": losses, "tokens": tokens, "peak_bytes": largest, "cpu_seconds": spent}
        self._say(told)

    def _say(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


def be_alone() -> None:
    """Forget that this is the only rank of a contestant: a trainer would wrap its model in DDP, and copy gradients."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def peak_bytes() -> int:
    """Largest resident size that this process had, as the kernel counts it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
