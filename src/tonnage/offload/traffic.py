"""What this process really moves to and from disks, as the system counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Traffic:
    """Bytes since the process began. What was found in the page cache is not counted."""

    read: int
    written: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.read - earlier.read, self.written - earlier.written)

    @staticmethod
    def now() -> Traffic | None:
        """So far; None where the system does not say (not Linux, some containers)."""
        try:
            lines = Path("/proc/self/io").read_text().splitlines()
        except OSError:
            return None
        counts = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
        return Traffic(counts["read_bytes"], counts["write_bytes"])
