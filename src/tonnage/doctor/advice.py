"""What a user could change about a machine, from what is known of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tonnage.doctor.cache import Compute, Storage
from tonnage.doctor.hardware import Disk, Hardware
from tonnage.host.lockable import lockable_bytes

LITTLE_MEMORY = 8e9
LITTLE_DISK = 20e9
SLOW_DISK = 0.3e9
BUSY = 0.15
"""Use of the processors by others from which measurements are doubtful."""
STATE_BYTES = 10
"""Optimizer state of a bf16 parameter with fp32 moments (``optim``)."""


@dataclass(frozen=True)
class Advice:
    """Something that costs time or room, and what to do about it."""

    found: str
    change: str


def advise(
    hardware: Hardware,
    disk: Disk,
    compute: Compute | None,
    storage: Storage | None,
    *,
    environment: Mapping[str, str],
    available_bytes: int | None,
    device_files: list[str],
) -> list[Advice]:
    """All that can be said of a machine. ``environment`` is the process's, ``available_bytes`` the memory that is free
    now, ``device_files`` those of drivers for accelerators."""
    return [
        *_of_hardware(hardware, device_files),
        *_of_memory(hardware, available_bytes),
        *_of_threads(hardware, environment),
        *(_of_compute(compute) if compute is not None else ()),
        *_of_disk(disk, storage, rests_there=not hardware.devices),
    ]


def _of_hardware(hardware: Hardware, device_files: list[str]) -> Iterator[Advice]:
    if device_files and not hardware.devices:
        yield Advice(
            f"a driver for accelerators is there ({device_files[0]}), but torch {hardware.torch} sees no device",
            "install a build of torch for it, and look at CUDA_VISIBLE_DEVICES",
        )
    if len(kinds := dict.fromkeys(hardware.devices)) > 1:
        yield Advice(
            f"different accelerators: {', '.join(kinds)}; the first was measured, the least memory counts",
            "choose those that are alike with CUDA_VISIBLE_DEVICES: workers wait for the slowest",
        )
    if hardware.cores < hardware.machine_cores:
        yield Advice(
            f"{hardware.cores} of the machine's {hardware.machine_cores} cores may be used",
            "raise the container's or the job's CPU limit, if the others are free",
        )
    if hardware.memory_bytes < 0.95 * hardware.machine_memory_bytes:
        yield Advice(
            f"{hardware.memory_bytes / 1e9:.1f} GB of the machine's {hardware.machine_memory_bytes / 1e9:.1f} may be "
            "used; a process that takes more is killed",
            "raise the container's or the job's memory limit, if there is more",
        )


def _of_memory(hardware: Hardware, available_bytes: int | None) -> Iterator[Advice]:
    if hardware.memory_bytes < max(LITTLE_MEMORY, hardware.device_bytes):
        beside = ", less than one of its accelerators has" if hardware.device_bytes > LITTLE_MEMORY else ""
        yield Advice(
            f"{hardware.memory_bytes / 1e9:.1f} GB of memory{beside}",
            "memory.moments=int8 takes the least of it"
            if hardware.devices
            else "memory.moments=int8 and memory.optimizer_tier=disk take the least of it: docs/offload.md",
        )
    if available_bytes is not None and available_bytes < 0.5 * hardware.machine_memory_bytes:
        yield Advice(
            f"{available_bytes / 1e9:.1f} GB of memory are free now, of {hardware.machine_memory_bytes / 1e9:.1f}",
            "end what takes the rest before a run that needs it",
        )


def _of_threads(hardware: Hardware, environment: Mapping[str, str]) -> Iterator[Advice]:
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) < hardware.cores:
        yield Advice(
            f"OMP_NUM_THREADS={threads} is set, {hardware.cores} cores may be used",
            "nothing for training, whose workers follow launch.threads; unset it for other programs",
        )


def _of_compute(compute: Compute) -> Iterator[Advice]:
    fp32, bf16, fp16 = (compute.flops[dtype] for dtype in ("fp32", "bf16", "fp16"))
    if bf16 < 1.15 * fp32:
        if fp16 > 2 * bf16:
            change = "precision=fp16 is the fast one here"
        else:
            change = "precision=bf16 saves memory here, no time; precision=fp32 is no slower"
        yield Advice(f"products in bf16 run at {bf16 / fp32:.2f} times the speed of fp32", change)
    if compute.busy > BUSY:
        yield Advice(
            f"the machine was busy when it was measured: others used {compute.busy:.0%} of its cores",
            "tonnage doctor, when it is idle",
        )
    if compute.counts_locked and (most := lockable_bytes()) is not None:
        yield Advice(
            f"a process may lock {most / 1e6:,.2f} MB of memory (ulimit -l), and what is locked for this GPU counts: "
            "nothing larger can rest in host memory",
            "ulimit -l unlimited (its hard limit too), or for a container --ulimit memlock=-1",
        )
    if compute.quick:
        yield Advice(
            "measured in a few seconds: rates are rough, links were left out", "tonnage doctor, without --quick"
        )
    if compute.link_failure:
        first, *rest = compute.link_failure.splitlines()
        written = [line.strip() for line in rest if line.startswith("  ")]  # the last of the worker's output
        yield Advice(
            f"workers of this machine could not talk to each other: {': '.join([first, *written[-1:]])}",
            "tonnage doctor --again shows whether that stays; runs with several workers will fail likewise",
        )


def _of_disk(disk: Disk, storage: Storage | None, *, rests_there: bool) -> Iterator[Advice]:
    """``rests_there``: whether states can rest on disk, which they cannot beside a GPU."""
    elsewhere = "write output=... and memory.offload_dirs on a local disk"
    if disk.free_bytes < LITTLE_DISK:
        yield Advice(f"{disk.free_bytes / 1e9:.1f} GB free under {disk.directory}", f"make room, or {elsewhere}")
    if disk.is_memory:
        yield Advice(f"files under {disk.directory} are in memory ({disk.key})", elsewhere)
        return
    if storage is None or not rests_there:
        return
    if not storage.direct:
        yield Advice(
            f"the disk under {disk.directory} ({disk.key}) takes no transfers past the page cache, so what rests there "
            "pushes other things out of memory",
            elsewhere,
        )
    if storage.mixed < SLOW_DISK:
        seconds = 2 * STATE_BYTES * 1e9 / storage.mixed
        yield Advice(
            f"the disk under {disk.directory} reads and writes {storage.mixed / 1e9:.2f} GB/s: "
            f"memory.optimizer_tier=disk would cost {seconds:.0f} s a step for each billion parameters",
            "set memory.offload_dirs to a faster disk, or to several",
        )
