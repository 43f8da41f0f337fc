"""Measure what is not known yet of this machine, one thing after the other so that none disturbs another.

``examine`` is what ``tonnage doctor`` does. ``glance`` is for the first plan on a machine that nobody has examined: two
seconds for products and memory, without which its seconds would be a guess.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

from tonnage.doctor.advice import BUSY
from tonnage.doctor.cache import Compute, HardwareRecord, Storage, calibration_file, machine_of, recall, remember, today
from tonnage.doctor.hardware import Disk, Hardware, Neighbours, look, look_at_disk
from tonnage.errors import UserError, WorkerFailed
from tonnage.planning import calibration
from tonnage.planning.catalogue import UPDATE_BYTES, UPDATE_CORE_SECONDS
from tonnage.planning.machine import Machine

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Effort:
    """How much is spent on a measurement."""

    product_seconds: float
    product_limit_seconds: float
    """For products of one size and type."""
    memory_seconds: float
    update_seconds: float
    disk_seconds: float
    """For each direction."""
    disk_bytes: int
    memory_bytes: int
    """Of an array that is copied; ``ON_DEVICE`` times that on an accelerator, at most 1/32 of the memory."""
    parameters: int
    """That are updated; ``ON_DEVICE`` times that on an accelerator, at most one for 128 bytes of memory."""
    link: bool


FULL = Effort(4.0, 8.0, 1.0, 2.0, 2.0, 1_500_000_000, 256 << 20, 20_000_000, link=True)
QUICK = Effort(0.2, 1.0, 0.1, 0.2, 0.2, 128 << 20, 64 << 20, 4_000_000, link=False)
GLANCE = Effort(0.1, 0.4, 0.05, 0.0, 0.0, 0, 64 << 20, 0, link=False)
"""Of what nothing is spent on, what is assumed follows from the rest."""

GLANCE_LIMIT_SECONDS = 120.0
"""For a process that glances at an accelerator, imports and all."""
BY_HOST = 20_000_000
"""Parameters at least that a GPU's host updates: its processors' caches held 4 million, and it seemed twice as fast."""
ON_DEVICE = 5
"""Caches of accelerators are larger, and they are fast."""


@dataclass(frozen=True)
class Examination:
    """What is there and what is known of it."""

    hardware: Hardware
    disk: Disk
    record: HardwareRecord
    new: bool
    """Whether anything was measured now."""
    disturbed: bool = False
    """Whether others used so much of the processors meanwhile that nothing of it is kept."""


def examine(
    directory: Path,
    *,
    quick: bool = False,
    again: bool = False,
    progress: Progress = lambda stage, done, total: None,
    cache: Path | None = None,
) -> Examination:
    """Find what is known of this machine and of the disk under ``directory``; measure and remember the rest.

    What was measured quickly is measured once more when time is given; ``again`` measures all once more. What others
    disturbed is not remembered.

    Raises:
        UserError: the directory or the cache cannot be written, or the disk is full.
        DiskFailed: the disk failed.
    """
    hardware = look()
    disk = look_at_disk(directory)
    record = recall(hardware, cache)
    compute, storage = record.compute, record.disks.get(disk.key)
    need_compute = again or compute is None or compute.glance or (compute.quick and not quick)
    need_disk = again or storage is None or (storage.quick and not quick)
    steps = _steps(progress, (6 if need_compute else 0) + (4 if need_disk else 0))
    disturbed = False
    if need_disk:  # first: it is where a directory turns out to be of no use
        neighbours = Neighbours()
        record = replace(record, disks={**record.disks, disk.key: _storage(directory, steps, quick=quick)})
        disturbed = neighbours.share() > BUSY
        if not disturbed:
            remember(record, cache)
    if again:
        from tonnage.kernels.widening import forget

        forget(cache)
    if need_compute:
        measured = _compute(hardware, steps, quick=quick)
        record, disturbed = replace(record, compute=measured), disturbed or measured.busy > BUSY
        if not disturbed:
            remember(record, cache)
    return Examination(hardware, disk, record, need_compute or need_disk, disturbed)


@dataclass(frozen=True)
class Glance:
    """A machine that was measured in a moment."""

    machine: Machine
    seconds: float
    """That it took."""
    busy: float
    """Part of the processors' time that others used meanwhile."""

    def __str__(self) -> str:
        others = f", while others used {self.busy:.0%} of the cores" if self.busy > BUSY else ""
        return f"measured now, in {self.seconds:.1f} s{others}; tonnage doctor measures longer"


def glance(
    directory: Path,
    *,
    progress: Progress = lambda stage, done, total: None,
    cache: Path | None = None,
) -> Glance | None:
    """This machine, measured in a moment; None if it was measured before, or cannot be.

    What was found is kept until somebody examines the machine, unless others used it meanwhile, or the cache cannot be
    written.
    """
    hardware = look()
    record = recall(hardware, cache)
    if record.compute is not None:
        return None
    glanced = (_glanced_elsewhere if hardware.devices else partial(_glanced, hardware))(_steps(progress, 5))
    if glanced is None:
        return None
    compute, seconds = glanced
    record = replace(record, compute=compute)
    if compute.busy <= BUSY:
        with suppress(UserError):
            remember(record, cache)
    samples = calibration.read(calibration_file(hardware, cache))
    machine = calibration.calibrated(machine_of(record, look_at_disk(directory)), samples)
    return Glance(machine, seconds, compute.busy)


def _glanced(hardware: Hardware, tell: Callable[[str], None]) -> tuple[Compute, float]:
    tell("measuring this machine")
    import torch

    import tonnage.doctor.compute
    import tonnage.kernels.products  # noqa: F401  (imports are not what is measured)

    before = torch.get_num_threads()
    torch.set_num_threads(hardware.cores)
    try:
        began = time.perf_counter()
        return _probed(hardware, tell, GLANCE, quick=True), time.perf_counter() - began
    finally:
        torch.set_num_threads(before)


def _glanced_elsewhere(tell: Callable[[str], None]) -> tuple[Compute, float] | None:
    """The same by a process of its own, as this one would keep from the run whatever it once took of an accelerator's
    memory. None where that fails, for instance because others have filled the accelerator."""
    tell("measuring this machine")
    command = [sys.executable, "-m", "tonnage.doctor.measure"]
    with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GLANCE_LIMIT_SECONDS)
        fields, seconds = json.loads(ended.stdout.splitlines()[-1])
        return Compute(**fields), float(seconds)
    return None


def _steps(progress: Progress, total: int) -> Callable[[str], None]:
    """Tells ``progress`` what begins, and how much is done."""
    done = count()
    return lambda what: progress(what, next(done), total)


def _storage(directory: Path, tell: Callable[[str], None], *, quick: bool) -> Storage:
    from tonnage.doctor.disk import disk_rates

    effort = QUICK if quick else FULL
    rates = disk_rates(directory, effort.disk_bytes, effort.disk_seconds, tell)
    return Storage(**asdict(rates), quick=quick, date=today())


def _compute(hardware: Hardware, tell: Callable[[str], None], *, quick: bool) -> Compute:
    tell("starting")
    from tonnage.kernels.threads import use_threads

    use_threads(hardware.cores)
    return _probed(hardware, tell, QUICK if quick else FULL, quick=quick)


def _probed(hardware: Hardware, tell: Callable[[str], None], effort: Effort, *, quick: bool) -> Compute:
    import torch

    from tonnage.doctor import compute

    neighbours, in_haste = Neighbours(), effort is GLANCE
    device = torch.device("cuda", 0) if hardware.devices else torch.device("cpu")
    tell("matrix products")
    flops = compute.product_flops(device, effort.product_seconds, effort.product_limit_seconds, in_haste=in_haste)
    tell("memory")
    larger = ON_DEVICE if hardware.devices else 1
    room = hardware.device_bytes or hardware.memory_bytes
    array_bytes = min(larger * effort.memory_bytes, room // 32)
    memory = compute.memory_rate(device, array_bytes, effort.memory_seconds, in_haste=in_haste)
    traffic = {} if hardware.devices else compute.traffic_rates(device, effort.memory_seconds, in_haste=in_haste)
    fresh = compute.fresh_rate(effort.memory_bytes, effort.memory_seconds, in_haste=in_haste)
    given_anew = (
        None if hardware.devices else compute.made_rate(hardware.cores, effort.memory_seconds, in_haste=in_haste)
    )
    counts_locked = compute.counts_locked() if hardware.devices else None
    host = compute.host_copy_rate(device, effort.memory_seconds) if hardware.devices else 0.0
    if effort.parameters:
        tell("optimizer")
        parameters = min(larger * effort.parameters, room // 128)
        updates = compute.update_rates(device, parameters, effort.update_seconds)
    else:
        updates = _updates_at(memory, hardware)
    by_host = dict[str, float]()
    if hardware.devices and effort.parameters:
        by_host = compute.update_rates(torch.device("cpu"), max(effort.parameters, BY_HOST), effort.update_seconds)
    if hardware.devices:
        torch.cuda.empty_cache()
    tell("workers")
    link, failure = _link(hardware) if effort.link else (None, "")
    tell("done")
    return Compute(
        flops=flops,
        memory_bytes_per_second=memory,
        host_device_bytes_per_second=host,
        optimizer_parameters_per_second=updates,
        link_bytes_per_second=link,
        link_failure=failure,
        busy=neighbours.share(),
        fresh_bytes_per_second=fresh,
        quick=quick,
        date=today(),
        glance=in_haste,
        traffic_bytes_per_second=traffic,
        host_parameters_per_second=by_host,
        counts_locked=counts_locked,
        made_bytes_per_second=given_anew,
    )


def _updates_at(memory_bytes_per_second: float, hardware: Hardware) -> dict[str, float]:
    """Updates of parameters a second that memory of this speed allows; on a CPU, no more than its cores compute."""
    kind = "cuda" if hardware.devices else "cpu"
    rates = {codec: memory_bytes_per_second / moved for codec, moved in UPDATE_BYTES[kind].items()}
    if hardware.devices:
        return rates
    return {codec: min(rate, hardware.cores / UPDATE_CORE_SECONDS[codec]) for codec, rate in rates.items()}


def _link(hardware: Hardware) -> tuple[float | None, str]:
    """Bytes a second between workers; None where there is only one, or where they failed, with the reason."""
    from tonnage.doctor.link import CPU_WORKERS, link_rate

    workers = len(hardware.devices) or CPU_WORKERS
    if workers == 1:
        return None, ""
    try:
        return link_rate(workers, max(1, hardware.cores // workers)), ""
    except WorkerFailed as error:
        return None, str(error)


if __name__ == "__main__":
    compute, seconds = _glanced(look(), lambda _: None)
    print(json.dumps([asdict(compute), seconds]))
