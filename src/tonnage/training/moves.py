"""What a worker moves to and from disk and the host's memory, and how long it waits for it: for the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.parallel.block_inputs import BlockInputs
from tonnage.parallel.homes import FileHome
from tonnage.parallel.host_blocks import BlocksElsewhere
from tonnage.parallel.host_masters import HostMasters
from tonnage.parallel.streaming import StreamedBlocks


class DiskUse:
    """Bytes that this process moves, checkpoints included, and seconds in which it waits for what rests on disk."""

    def __init__(self, optimizer: ShardedOptimizer, blocks: Sequence[StreamedBlocks | FileHome]) -> None:
        self._waiting: list[ShardedOptimizer | StreamedBlocks | FileHome] = [optimizer, *blocks]
        self._traffic, self._waited = disk_traffic(), 0.0

    def take(self) -> dict[str, float]:
        """Since the last call."""
        before, self._traffic = self._traffic, disk_traffic()
        waited_before, self._waited = self._waited, sum(one.waited_seconds for one in self._waiting)
        found: dict[str, float] = {"waited_seconds": self._waited - waited_before}
        if before is not None and self._traffic is not None:
            read, written = (now - then for now, then in zip(self._traffic, before, strict=True))
            found |= {"read_bytes": read, "written_bytes": written}
        return found


def disk_traffic() -> tuple[int, int] | None:
    """Bytes that this process has read from disks and written to them, as the system counts: not what was found in the
    page cache. None where it does not say (not Linux, some containers)."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    counts = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"]


class HostUse:
    """Bytes that came from the host's memory or went there, of states, parameters and inputs of blocks, and
    seconds in which training waited for the optimizer."""

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        inputs: Sequence[BlockInputs],
        weights: Sequence[BlocksElsewhere | HostMasters],
    ) -> None:
        self._optimizer, self._copied, self._waited = optimizer, 0, 0.0
        self._copying = [optimizer.tier, optimizer.gradients, *inputs, *weights]

    def take(self) -> dict[str, float]:
        """Since the last call."""
        copied, waited = self._copied, self._waited
        self._copied = sum(getattr(one, "copied_bytes", 0) for one in self._copying)
        self._waited = self._optimizer.waited_seconds
        return {"waited_seconds": self._waited - waited, "copied_bytes": self._copied - copied}
