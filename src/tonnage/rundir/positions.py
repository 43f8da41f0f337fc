"""Where a worker is now: a small file of its own that it keeps writing, and that launchers and displays read."""

from __future__ import annotations

import json
import mmap
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

POSITION_BYTES = 512


@dataclass(frozen=True)
class Position:
    phase: str = "starting"
    step: int = 0
    micro_batch: int = 0
    num_micro_batches: int = 0
    seconds: float = 0.0
    """Wall-clock time of the last change."""
    alive: float = 0.0
    """Wall-clock time of the last sign that the process runs at all."""

    def __str__(self) -> str:
        where = f"{self.phase}, step {self.step}" if self.step else self.phase
        return where + (f", micro-batch {self.micro_batch} of {self.num_micro_batches}" if self.micro_batch else "")


class PositionFile:
    """A worker's own note of where it is: 512 bytes, kept mapped, so that writing costs no system call."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b" " * POSITION_BYTES)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), POSITION_BYTES)
        self._position = Position()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Wall-clock time of the last change."""
        return self._position.seconds

    def update(self, **changes: Any) -> None:
        """Change some fields of the position; without any, say that there is progress where it is."""
        now = time.time()
        self._write({**changes, "seconds": now, "alive": now})

    def beat(self) -> None:
        """Say that the process runs, whether or not it gets anywhere."""
        self._write({"alive": time.time()})

    def _write(self, changes: Mapping[str, Any]) -> None:
        with self._lock:
            self._position = replace(self._position, **changes)
            self._map[:] = json.dumps(asdict(self._position)).encode().ljust(POSITION_BYTES)
