"""What one worker may use, and all of a machine on its disks, and where the numbers come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.config import Config
from tonnage.errors import user_error
from tonnage.planning.machine import Machine
from tonnage.planning.plan import Budget
from tonnage.planning.words import size


@dataclass(frozen=True)
class Free:
    """Bytes that are free on a node; where nobody has looked, the machine's, or as if there were no end of them."""

    memory: float | None = None
    """Of all workers on a CPU, or of each on its device."""
    host: float | None = None
    """Of the host's memory, where that is not the devices'."""
    disk: float | None = None
    """On the disks where states rest."""
    disks_are_assumed: bool = False
    """Whether nobody has looked at these, and machines of the kind are taken to have so much."""
    lockable: float | None = None
    """That one worker may lock of its host's memory."""


UNKNOWN = Free()


def budget_of(config: Config, machine: Machine, free: Free = UNKNOWN) -> Budget:
    """What a config's workers may use on a machine.

    Raises:
        UserError: the machine has no devices beside its host, and the config a budget for the host's memory.
    """
    per_node = machine.workers_on_node(config.launch.num_workers)
    whole = float(machine.device_bytes) if free.memory is None else free.memory
    source = "free now" if free.memory is not None else f"of {machine.name}"
    if config.memory.budget.device != "auto":
        whole, source = float(config.memory.budget.device), "memory.budget.device"
    of_host, of_disk = config.memory.budget.host, config.memory.budget.disk
    disk = None if of_disk == "auto" else float(of_disk)
    shared = f", shared by {per_node} workers" if per_node > 1 else ""
    if machine.kind != "cpu":
        host, host_source = _host_memory(of_host, machine, free.host)
        host_source += f": {size(host)}{shared}" if host_source and shared else ""
        of_device = f"{size(whole)} {source}"
        return Budget(
            whole, of_device, host / per_node, host_source, free.lockable, disk, free.disk, free.disks_are_assumed
        )
    if of_host != "auto":
        raise user_error(
            where="memory.budget.host",
            found=f"memory.budget.host={of_host} on {machine.name}",
            needed="GPUs, beside whose memory there is another",
            change="memory.budget.host=auto"
            + (f" memory.budget.device={of_host}" if config.memory.budget.device == "auto" else ""),
        )
    of_worker, each = f"{size(whole)} {source}{shared}", whole / per_node
    return Budget(each, of_worker, disk=disk, disk_free=free.disk, disks_are_assumed=free.disks_are_assumed)


def _host_memory(said: int | Literal["auto"], machine: Machine, free: float | None) -> tuple[float, str]:
    """What all workers of a node may use of its host's memory beside their devices, never more than is free; and
    where that comes from, in words."""
    if said == "auto":
        return (float(machine.host_bytes), "") if free is None else (free, "free now")
    if free is not None and free < said:
        return free, "free now, less than memory.budget.host"
    return float(said), "memory.budget.host"
