"""What is there, as the system says: processors, memory, accelerators, and the disk under a directory.

Nothing is measured, and torch is imported only where device files say that there may be an accelerator, so this takes
milliseconds on a machine without one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from tonnage.files.places import existing, free_bytes
from tonnage.host.control_groups import memory_limit, read
from tonnage.host.processor import processor
from tonnage.host.threads import available_cpus, physical_cores, usable_cores

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Hardware:
    """A machine as this process may use it."""

    processor: str
    features: tuple[str, ...]
    """Instruction sets that matrix products may use (``processor.FEATURES``)."""
    cores: int
    """Physical cores that this process may use."""
    machine_cores: int
    """Physical cores of the machine."""
    memory_bytes: int
    """Memory that this process and others in its control group may use together."""
    machine_memory_bytes: int
    devices: tuple[str, ...]
    """Names of the accelerators that torch sees."""
    device_bytes: int
    """Memory of the smallest of them; 0 without any."""
    torch: str
    """Version."""

    @property
    def fingerprint(self) -> str:
        """The same for machines whose measurements hold for each other: 16 hexadecimal digits.

        Sizes count in GiB, as firmware and kernels take a little of them, more or less from one start to the next.
        """
        fields = asdict(self) | {
            "memory_bytes": round(self.memory_bytes / 2**30),
            "machine_memory_bytes": round(self.machine_memory_bytes / 2**30),
        }
        return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=8).hexdigest()


def look() -> Hardware:
    """The machine that this process runs on."""
    name, features = processor()
    machine_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    devices = _devices()
    return Hardware(
        processor=name,
        features=features,
        cores=usable_cores(),
        machine_cores=physical_cores(set(range(os.cpu_count() or 1))),
        memory_bytes=machine_memory if limit is None else min(machine_memory, limit),
        machine_memory_bytes=machine_memory,
        devices=tuple(name for name, _ in devices),
        device_bytes=min((size for _, size in devices), default=0),
        torch=version("torch"),
    )


def device_files(root: Path = Path("/dev")) -> list[str]:
    """Device files of drivers for accelerators: NVIDIA's, AMD's, and the one for both inside Windows."""
    return [str(root / name) for name in ("nvidiactl", "kfd", "dxg") if (root / name).exists()]


def available_memory() -> int | None:
    """Bytes of the machine's memory that nobody needs now; None where the system does not say."""
    line = re.search(r"^MemAvailable:\s*(\d+) kB", read(Path("/proc/meminfo")), re.MULTILINE)
    return int(line[1]) * 1024 if line else None


def free_device_memory() -> list[int]:
    """Bytes that are free on each of NVIDIA's devices that this process may use, in their order.

    The driver's own tool is asked, since asking torch would take memory on the device. Empty where it is not there, or
    does not know them.
    """
    with suppress(ValueError):
        return [int(line) << 20 for line in _asked_of_driver("memory.free")]  # it counts in MiB
    return []


def devices_and_drivers() -> list[str]:
    """Name of each of NVIDIA's devices that this process may use, and its driver, as "NVIDIA L4, 580.95"."""
    return [line.strip() for line in _asked_of_driver("name,driver_version")]


def _asked_of_driver(fields: str) -> list[str]:
    """Fields of each device, a line for each, as ``nvidia-smi`` prints them."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["--id", visible]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    return []


class Neighbours:
    """What others take of this process's processors while it works, from the moment this is made."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._before = (*_processor_times(stat), _own_seconds())

    def share(self) -> float:
        """Part of the processors' time until now that others used; 0 if the system does not say."""
        total, idle, own_seconds = (
            now - then for now, then in zip((*_processor_times(self._stat), _own_seconds()), self._before, strict=True)
        )
        own = own_seconds * os.sysconf("SC_CLK_TCK")
        return max(0.0, (total - idle - own) / total) if total > 0 else 0.0


def _own_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _processor_times(stat: Path) -> tuple[int, int]:
    """All time and idle time of the processors that this process may use, in ticks.

    A line is: name, user, nice, system, idle, waiting for a disk, interrupts (two kinds), stolen, and parts of these.
    """
    cpus = {f"cpu{number}" for number in available_cpus()}
    lines = [line.split() for line in read(stat).splitlines() if line.split(" ", 1)[0] in cpus]
    times = [[int(ticks) for ticks in line[1:9]] for line in lines]
    return sum(map(sum, times)), sum(line[3] + line[4] for line in times)


def _devices() -> list[tuple[str, int]]:
    """Name and memory of each accelerator. This makes no context on any of them."""
    if not device_files():
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [(str(one.name), int(one.total_memory)) for one in properties]


@dataclass(frozen=True)
class Disk:
    """The file system under a directory."""

    directory: str
    key: str
    """The same for directories on the same file system, today and after a restart: type and source of the mount."""
    free_bytes: int

    @property
    def is_memory(self) -> bool:
        """Whether its files are in memory."""
        return self.key.split(":")[0] in MEMORY_FILE_SYSTEMS


def look_at_disk(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Disk:
    """The disk under a directory, which need not exist yet."""
    there = existing(directory)
    return Disk(str(there), _mount(there.resolve(), mounts), free_bytes(there))


def _mount(directory: Path, mounts: Path) -> str:
    """Type and source of the mount that holds a directory; its device number where the system does not tell mounts.

    Fields of a line: id, parent, device, root, mount point, options, optional fields, a dash, type, source, options.
    """
    best = None
    for line in read(mounts).splitlines():
        before, dash, after = line.partition(" - ")
        fields, (kind, source) = before.split(), after.split()[:2] if dash else ("", "")
        if len(fields) < 5:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        # Of mounts one over the other the last is seen.
        if point in (directory, *directory.parents) and (best is None or len(point.parts) >= best[0]):
            best = len(point.parts), f"{kind}:{source}"
    return best[1] if best else f"device:{directory.stat().st_dev}"
