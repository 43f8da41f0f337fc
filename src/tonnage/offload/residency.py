"""How each kind of state visits a device from where it rests: in units, of which a few are there at a time.

No torch: the engine takes the sizes of its buffers from here, and ``planning`` counts with the same.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Residency:
    """Units of one kind of state."""

    slots: int
    """Units that are there at a time, or on their way."""
    unit_bytes: int = sys.maxsize
    """Of one, at most; units that differ in size (blocks, gradients) are as large as they are."""

    def ring_bytes(self, num_bytes: int, stays: int = 0) -> int:
        """Of the slots through which so many bytes go in whole units, and of what ``stays`` in others."""
        return min(-(-num_bytes // self.unit_bytes) * self.unit_bytes, self.slots * self.unit_bytes + stays)

    def buffer_bytes(self, largest: int) -> int:
        """Of the slots, if what goes through them in pieces is no larger than ``largest``."""
        return self.slots * min(self.unit_bytes, largest)


BLOCKS = Residency(2)
"""Parameters of a block: of the one that runs and, forward or backward, the next one's."""
TILES = Residency(2)
"""Of a large weight: the one that is computed with, and the next one."""
OPTIMIZER: dict[str, Residency] = {"host": Residency(4, 64 << 20), "disk": Residency(12, 16 << 20)}
"""Tiles of optimizer state, by the tier in which it rests. What is read, updated and written at once is more where a
request takes longer."""
GRADIENTS: dict[str, Residency] = {"host": Residency(2), "disk": Residency(3, 64 << 20)}
"""On their way from a device: to host memory whole, the one that became whole last and the one before; to disk in
pieces, through locked buffers."""
INPUTS = Residency(2)
"""Of recomputed blocks, on their way to host memory: that of the block that runs, and of the one before."""


def blocks_in_memory(*, gathered: bool) -> int:
    """Blocks whose parameters a CPU has in memory where they rest on disk: the one that runs and those that are read
    ahead, of which sharding gathers one early."""
    return BLOCKS.slots + gathered
