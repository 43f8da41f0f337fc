"""How many CPU threads a worker should use: physical cores this process may use, divided by the workers.

Hyper-threads of one core share its arithmetic units, so threads beyond the physical cores slow matrix
products down. What this process may use can be less than what the machine has: an affinity mask
(``taskset``, Slurm) or a control group's CPU quota (containers).

A launcher that starts all workers on one machine divides what it has itself. Workers that others started, on several
machines and perhaps bound to CPUs of their own, tell each other what they have, and each takes its share of that.
No torch is imported here.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tonnage.host.control_groups import CONTROL_GROUPS, MEMBERSHIP, groups, read

CPUS = Path("/sys/devices/system/cpu")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def threads_per_worker(threads: int | Literal["auto"], num_workers: int, cores: int | None = None) -> int:
    """Threads for each of ``num_workers`` workers: as asked, or an equal share of the ``cores``, at least 1; by default
    of those that this process may use."""
    return max(1, (usable_cores() if cores is None else cores) // num_workers) if threads == "auto" else threads


def usable_cores() -> int:
    """Physical cores that this process may use, at least 1."""
    cores = physical_cores(available_cpus())
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def describe_cpus() -> str:
    """What this process may use, for ``share_of`` on any rank: the machine, its CPUs in hexadecimal, cores, quota."""
    cpus = available_cpus()
    machine = read(BOOT_ID).strip() or socket.gethostname()  # containers of one machine have names of their own
    return json.dumps([machine, f"{sum(1 << cpu for cpu in cpus):x}", physical_cores(cpus), cpu_quota()])


def share_of(descriptions: Sequence[str], rank: int) -> int:
    """Threads for ``rank`` among workers that described themselves: its cores over those who share them, or 1."""
    workers = [json.loads(text) for text in descriptions]
    machine, cpus, cores, quota = workers[rank]
    neighbours = [worker for worker in workers if worker[0] == machine]
    sharing = sum(1 for worker in neighbours if int(worker[1], 16) & int(cpus, 16))
    share = int(cores) // sharing
    return max(1, share if quota is None else min(share, int(quota / len(neighbours))))


def available_cpus() -> set[int]:
    """Logical CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores(cpus: set[int], root: Path = CPUS) -> int:
    """Number of different cores among some logical CPUs; every CPU counts where the machine does not say."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "hw.physicalcpu"]
        number = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return min(int(number), len(cpus)) if number.isdecimal() else len(cpus)
    return len({_siblings(cpu, root) for cpu in cpus})


def cpu_quota(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs' worth of time that the control groups around this process grant it; None if they set no limit.

    Reads ``cpu.max`` (version 2) or ``cpu.cfs_quota_us`` (version 1) of this process's group and those
    above it.
    """
    quotas = [
        _quota_v1(directory) if version == 1 else _quota_v2(directory)
        for version, directory in groups("cpu", root, membership)
    ]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(directory: Path) -> float | None:
    fields = read(directory / "cpu.max").split()
    return int(fields[0]) / int(fields[1]) if len(fields) == 2 and fields[0] != "max" else None


def _quota_v1(directory: Path) -> float | None:
    quota, period = read(directory / "cpu.cfs_quota_us"), read(directory / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _siblings(cpu: int, root: Path) -> str:
    """The hyper-threads of a CPU's core, as the kernel lists them; the CPU alone if it does not."""
    return read(root / f"cpu{cpu}" / "topology" / "thread_siblings_list").strip() or str(cpu)
