"""How many CPU threads a worker should use: physical cores this process may use, divided by the workers.

Hyper-threads of one core share its arithmetic units, so threads beyond the physical cores slow matrix
products down. What this process may use can be less than what the machine has: an affinity mask
(``taskset``, Slurm) or a control group's CPU quota (containers).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

from tonnage.launch.control_groups import CONTROL_GROUPS, MEMBERSHIP, groups, read

CPUS = Path("/sys/devices/system/cpu")


def threads_per_worker(threads: int | Literal["auto"], num_workers: int) -> int:
    """Threads for each of ``num_workers`` workers: as asked, or an equal share of the cores, at least 1."""
    return max(1, usable_cores() // num_workers) if threads == "auto" else threads


def usable_cores() -> int:
    """Physical cores that this process may use, at least 1."""
    cores = physical_cores(available_cpus())
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def available_cpus() -> set[int]:
    """Logical CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores(cpus: set[int], root: Path = CPUS) -> int:
    """Number of different cores among some logical CPUs; every CPU counts where the machine does not say."""
    if sys.platform == "darwin":
        return min(_sysctl("hw.physicalcpu", len(cpus)), len(cpus))
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


def _sysctl(name: str, otherwise: int) -> int:
    result = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return int(result.stdout) if result.stdout.strip().isdecimal() else otherwise
