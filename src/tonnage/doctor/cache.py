"""What was measured, remembered in the user's cache directory, and the ``Machine`` that follows from it.

    machines/FINGERPRINT.json     one for each kind of hardware (``Hardware.fingerprint``)
      hardware                    what it is, for people
      compute                     rates of a device and of links between devices
      disks                       rates by disk (``Disk.key``)
    calibration/FINGERPRINT.json  steps that were timed there (``planning.calibration``)

Sizes are looked up anew whenever they are asked for; only rates are remembered. A file that does not read as it should,
or was written in another form, counts as none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tonnage.doctor.hardware import Disk, Hardware, look, look_at_disk
from tonnage.errors import UserError, user_error
from tonnage.files.reading import read_record
from tonnage.files.writing import write_json
from tonnage.host.cachedir import default_directory, room_for, trusted
from tonnage.planning import calibration
from tonnage.planning.catalogue import DEVICES
from tonnage.planning.machine import Machine, device_named, of_cpu, of_device

VERSION = 4
"""Of the form, and of what is measured and how: a change of either is a new number."""

ASSUMED_READ, ASSUMED_WRITE, ASSUMED_MIXED = 200e6, 150e6, 150e6
"""Bytes a second of a disk that nobody has measured: a slow one, as a plan should rather be late than wrong."""


@dataclass(frozen=True)
class Compute:
    """Rates of one device, as ``Machine`` has them."""

    flops: Mapping[str, float]
    memory_bytes_per_second: float
    host_device_bytes_per_second: float
    optimizer_parameters_per_second: Mapping[str, float]
    link_bytes_per_second: float | None
    """None where there is nothing to link, or it was not measured."""
    link_failure: str
    """Why workers could not talk to each other; empty if they could."""
    busy: float
    """Part of the processors' time that others used meanwhile."""
    fresh_bytes_per_second: float
    quick: bool
    """Measured in little time, so less exactly."""
    date: str
    glance: bool = False
    """Only products and memory were measured, for a plan that could not wait; updates follow from memory."""
    traffic_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    """On a CPU: of what is no product, by data type; empty where it was not measured."""
    host_parameters_per_second: Mapping[str, float] = field(default_factory=dict)
    """Updates by the processors of a machine with GPUs; empty where they were not measured."""
    made_bytes_per_second: float | None = None
    """Of a core of a CPU; None where it was not measured."""
    counts_locked: bool | None = None
    """Whether what is locked for a device counts against the limit of its process; None where nobody tried."""


@dataclass(frozen=True)
class DiskRates:
    """Rates of one disk in bytes a second, as ``Machine`` has them."""

    read: float
    write: float
    mixed: float
    """Read plus written, at once."""
    direct: bool
    """Whether it takes transfers past the page cache."""


@dataclass(frozen=True)
class Storage(DiskRates):
    """The same, as they are remembered."""

    quick: bool
    date: str


@dataclass(frozen=True)
class HardwareRecord:
    """What is known of some hardware."""

    hardware: Hardware
    compute: Compute | None = None
    disks: Mapping[str, Storage] = field(default_factory=dict)


@dataclass(frozen=True)
class _Stored:
    """What a file of ``machines`` holds."""

    version: int
    compute: Compute | None
    disks: Mapping[str, Storage]


def today() -> str:
    return time.strftime("%Y-%m-%d")


def recall(hardware: Hardware, cache: Path | None = None) -> HardwareRecord:
    """What was measured on such hardware."""
    path, nothing = _file(hardware, cache), HardwareRecord(hardware)
    try:
        stored = read_record(path, _Stored)
    except UserError:
        return nothing
    return HardwareRecord(hardware, stored.compute, stored.disks) if stored.version == VERSION else nothing


def remember(record: HardwareRecord, cache: Path | None = None) -> Path:
    """Store what was measured; returns the file.

    Raises:
        UserError: the cache cannot be written.
    """
    path = _file(record.hardware, cache)
    try:
        room_for(path)
        write_json(path, {"version": VERSION, **asdict(record)})
    except OSError as error:
        raise user_error(
            found=f"what was measured cannot be kept ({error.strerror}: {path.parent})",
            needed="a directory with write access",
            change="set TONNAGE_CACHE to one",
        ) from error
    return path


def _file(hardware: Hardware, cache: Path | None) -> Path:
    return trusted(default_directory() if cache is None else cache, "machines", f"{hardware.fingerprint}.json")


def calibration_file(hardware: Hardware, cache: Path | None = None) -> Path:
    """Where samples of training on such hardware are kept."""
    return trusted(default_directory() if cache is None else cache, "calibration", f"{hardware.fingerprint}.json")


def load_machine(directory: str | Path = ".", cache: Path | None = None) -> Machine | None:
    """This machine as it was measured, with the disk under ``directory``, and as fast as training was seen to be on it;
    None if it never was measured.

    The disk's rates are assumed (``disk_source``) if another disk was measured, but not this one.
    """
    hardware = look()
    record = recall(hardware, cache)
    if record.compute is None:
        return None
    samples = calibration.read(calibration_file(hardware, cache))
    return calibration.calibrated(machine_of(record, look_at_disk(Path(directory))), samples)


def describe_here(directory: str | Path = ".") -> Machine:
    """This machine with its sizes and with cautious rates that nobody has measured; takes milliseconds."""
    return machine_of(HardwareRecord(look()), look_at_disk(Path(directory)))


def machine_of(record: HardwareRecord, disk: Disk) -> Machine:
    """Hardware, a disk, and what was measured of them; what was not is assumed."""
    machine = _assumed(record.hardware, disk)
    if (compute := record.compute) is not None:
        shared = {known.name for known in fields(Machine)} & {known.name for known in fields(Compute)}
        rates = {name: rate for name in shared if (rate := getattr(compute, name)) is not None}
        reached = {
            precision: (calibration.PRODUCTS[machine.kind], traffic / compute.memory_bytes_per_second)
            for precision, traffic in compute.traffic_bytes_per_second.items()
        }
        machine = replace(machine, source="measured", reached=reached, **rates)
    if (storage := record.disks.get(disk.key)) is not None:
        machine = replace(
            machine,
            disk_source="measured",
            disk_read_bytes_per_second=storage.read,
            disk_write_bytes_per_second=storage.write,
            disk_mixed_bytes_per_second=storage.mixed,
        )
    return machine


def _assumed(hardware: Hardware, disk: Disk) -> Machine:
    """Rates from the catalogue for a device that it lists, and for any other the slowest of all that it lists."""
    if not hardware.devices:
        machine = of_cpu(hardware.cores, hardware.memory_bytes)
        name = hardware.processor
    else:
        number, name = len(hardware.devices), hardware.devices[0]
        listed = device_named(name, hardware.device_bytes)
        if listed is not None:
            machine, name = of_device(listed, nodes=1, devices_per_node=number), listed.name
        else:
            all_known = [of_device(device, nodes=1, devices_per_node=number) for device in DEVICES]
            machine = _slowest(all_known)
    return replace(
        machine,
        name=name,
        source="assumed",
        disk_source="assumed",
        cores=hardware.cores,
        device_bytes=hardware.device_bytes or hardware.memory_bytes,
        host_bytes=hardware.memory_bytes,
        disk_bytes=disk.free_bytes,
        disk_read_bytes_per_second=ASSUMED_READ,
        disk_write_bytes_per_second=ASSUMED_WRITE,
        disk_mixed_bytes_per_second=ASSUMED_MIXED,
    )


def _slowest(machines: list[Machine]) -> Machine:
    def least(name: str) -> Any:
        values = [getattr(machine, name) for machine in machines]
        if isinstance(values[0], Mapping):
            return {key: min(value[key] for value in values) for key in values[0]}
        return min(values)

    rates = [name for name in asdict(machines[0]) if name == "flops" or name.endswith("_per_second")]
    return replace(machines[0], **{name: least(name) for name in rates})


def to_json(machine: Machine, **more: object) -> str:
    """A machine as JSON text, with ``more`` beside it."""
    return json.dumps({"machine": asdict(machine), **more}, indent=2)
