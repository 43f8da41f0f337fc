"""The largest models that the publications on ZeRO give, how they count them, and ours: by stage and by tier.

Counted are bytes of model states a parameter, on each device, in the memory of the node's host and on its disks: the
largest model is the one whose states fill one of them. Nothing else is counted here, as the publications do not; a plan
(``tonnage plan``) counts all of it.

* ZeRO: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, table 2.
* ZeRO-Offload: Ren et al. 2021, https://arxiv.org/abs/2101.06840.
* ZeRO-Infinity: Rajbhandari et al. 2021, https://arxiv.org/abs/2104.07857, figure 2, table 2 and section 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tonnage.planning.zero_table import STAGES, classic_bytes, our_bytes

SHARDS = 64
"""Devices among which the states of table 2 are divided, at every degree of model parallelism."""
DEVICE_BYTES = 32e9
"""Of a V100, as that table counts them."""
MEASURED = {1: (1.3e9, 6.2e9), 2: (2.5e9, 12.5e9), 4: (5e9, 25e9), 8: (10e9, 50e9), 16: (20e9, 100e9)}
"""Parameters by degree of model parallelism, as measured: without ZeRO, and with stage 1."""


@dataclass(frozen=True)
class ByStage:
    """The largest models for one degree of model parallelism, in parameters by ZeRO stage."""

    degree: int
    devices: int
    theirs: tuple[float, ...]
    ours: tuple[float, ...]
    measured: tuple[float, float]
    """Without ZeRO, and with stage 1."""


def largest_by_stage() -> list[ByStage]:
    """Table 2 of the ZeRO paper: V100 of 32 GB, states divided among 64 of them, times model parallelism."""
    found = []
    for degree, measured in MEASURED.items():
        room = DEVICE_BYTES * degree
        theirs = tuple(room / classic_bytes(1, SHARDS, stage) for stage in STAGES)
        ours = tuple(room / our_bytes(1, SHARDS, stage) for stage in STAGES)
        found.append(ByStage(degree, degree * SHARDS, theirs, ours, measured))
    return found


@dataclass(frozen=True)
class NodeMemory:
    """What a node has room in."""

    devices: int
    device_bytes: float
    """Of each."""
    host_bytes: float
    disk_bytes: float


DGX_2 = NodeMemory(devices=16, device_bytes=32 * 2**30, host_bytes=1.5e12, disk_bytes=28e12)
"""The node of ZeRO-Infinity: sixteen V100 of 32 GB, 1.5 TB of memory, 28 TB of NVMe."""


@dataclass(frozen=True)
class Needs:
    """Bytes of states a parameter."""

    device: float = 0.0
    """On each device of the node."""
    host: float = 0.0
    """In the memory of its host, for all devices."""
    disk: float = 0.0

    def largest(self, node: NodeMemory) -> float:
        """Parameters that fill a node."""
        rooms = ((self.device, node.device_bytes), (self.host, node.host_bytes), (self.disk, node.disk_bytes))
        return min(room / need if need else math.inf for need, room in rooms)


@dataclass(frozen=True)
class Tiered:
    """One way to divide states among the devices of a node and to put them into tiers."""

    name: str
    theirs: Needs
    ours: Needs
    published: float | None
    """Parameters of the largest model that was run; None where we know of no figure."""
    keys: str = ""
    """Of a config."""


_N = DGX_2.devices
TIERED = (
    Tiered("everything on every device", Needs(16), Needs(18), 1.4e9, keys="zero: 0"),
    Tiered("ZeRO 2", Needs(2 + 14 / _N), Needs(2 + 16 / _N), None, keys="zero: 2"),
    Tiered(
        "ZeRO 2, optimizer and gradients in host memory",
        Needs(2, host=14),
        Needs(2 + 4 / _N, host=12),
        13e9,
        keys="zero: 2, optimizer_tier: host, gradient_tier: host",
    ),
    Tiered("ZeRO 3", Needs(16 / _N), Needs(16 / _N), None, keys="zero: 3"),
    Tiered(
        "ZeRO 3, optimizer and gradients in host memory",
        Needs(2 / _N, host=18),
        Needs(4 / _N, host=12),
        None,
        keys="zero: 3, optimizer_tier: host, gradient_tier: host",
    ),
    Tiered(
        "ZeRO 3, everything in host memory",
        Needs(host=20),
        Needs(host=16),
        None,
        keys="zero: 3, parameter_tier: host, optimizer_tier: host, gradient_tier: host",
    ),
    Tiered(
        "ZeRO 3, everything on disk",
        Needs(disk=20),
        Needs(disk=16),
        1e12,
        keys="zero: 3, parameter_tier: disk, optimizer_tier: disk, gradient_tier: disk",
    ),
)
"""Strategies of ZeRO-Infinity's table 2. It counts 20 bytes a parameter where states are offloaded: 16-bit parameters
and gradients, and an fp32 parameter, gradient and two moments."""


@dataclass(frozen=True)
class Massive:
    """A model of ZeRO-Infinity's figure 2: blocks of 12 ``hidden``^2 parameters."""

    layers: int
    hidden: int

    @property
    def parameters(self) -> float:
        """As the figure counts them."""
        return 12.0 * self.layers * self.hidden**2

    @property
    def their_bytes(self) -> float:
        """Model states, as the figure counts them."""
        return 20 * self.parameters

    @property
    def our_bytes(self) -> float:
        """Model states over all workers under ZeRO 3, with fp32 moments."""
        return 16 * self.parameters


MASSIVE = (
    Massive(80, 10 * 1024),
    Massive(100, 20 * 1024),
    Massive(128, 25 * 1024),
    Massive(195, 64 * 1024),
    Massive(315, 160 * 1024),
)
"""From a tenth of a trillion parameters to a hundred."""
