"""What the planner knows of hardware: sizes and rates of some nodes that are all alike.

A ``Machine`` says where it comes from. Either it was ``measured`` here (``tonnage doctor``), or it is here but nobody
has measured it and its rates are ``assumed``, or it comes from the ``catalogue`` of accelerators that need not be
here: ``parse_hardware("2x8xA100-80GB")``. All three hold rates that are expected in use, not peaks.

A CPU node is one device whose ``device_bytes`` are the host's memory and whose rates are those of all its cores;
workers on it share them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from tonnage.errors import user_error
from tonnage.planning import catalogue
from tonnage.planning.catalogue import DEVICES, EFFICIENCY, Device
from tonnage.planning.words import size

FORMS = (
    "2x8xA100-80GB (nodes x devices x name), 8xH100, RTX4090, RTX4090:128GB (with its host's memory), cpu:16c:64GB or "
    "4xcpu:16c:64GB (nodes)"
)

LONGEST_NAME = 100
"""Of hardware, in characters."""
MOST_OF_A_KIND = 2**20
"""Nodes, devices of one, cores: more there are nowhere."""

Source = Literal["measured", "assumed", "catalogue"]

FRESH_BYTES_PER_SECOND = 2.0e9
"""Where nobody has measured it: slow. Virtual machines had 1.4 to 15."""
MADE_BYTES_PER_SECOND = 0.65e9
"""Where nobody has measured it: what three processors took."""


@dataclass(frozen=True)
class Machine:
    """Nodes that are all alike. Bytes are bytes, rates are a second; GB is 1e9 bytes."""

    name: str
    """Of the device: ``A100-80GB``, or the processor's."""
    source: Source
    """Where its rates come from, those of its disk excepted."""
    disk_source: Source
    kind: Literal["cpu", "cuda"]
    """``cuda`` stands for torch's back end of that name, AMD's devices included."""
    nodes: int
    devices_per_node: int
    """1 on the CPU."""
    cores: int
    """Physical cores of a node that may be used."""
    device_bytes: int
    """Memory of one device. On the CPU: of a node, as far as processes may use it."""
    host_bytes: int
    """Memory of a node, as far as processes may use it."""
    disk_bytes: int
    """Of a node, free in the directory that will be used."""
    flops: Mapping[str, float]
    """Matrix products of one device in FLOP/s, by ``fp32``, ``bf16``, ``fp16``."""
    memory_bytes_per_second: float
    """Read plus written, one device."""
    host_device_bytes_per_second: float
    """Between host memory and one device, each direction while both are in use; 0 on the CPU."""
    disk_read_bytes_per_second: float
    """Of a node, as the next two."""
    disk_write_bytes_per_second: float
    disk_mixed_bytes_per_second: float
    """Read plus written, while as much is read as written."""
    link_bytes_per_second: float
    """From one device (CPU: worker) to another of its node, one direction. An all-reduce of B bytes over N takes
    2 (N - 1) / N * B / this."""
    network_bytes_per_second: float
    """From one device to another node while its neighbours do likewise, one direction; never measured."""
    optimizer_parameters_per_second: Mapping[str, float]
    """Parameters that one device updates, by how their moments rest: ``fp32``, ``bf16``, ``int8``."""
    fresh_bytes_per_second: float = FRESH_BYTES_PER_SECOND
    """Of a core of a CPU: memory that comes anew from the system, which clears it first, in pages of 2 MB."""
    made_bytes_per_second: float = MADE_BYTES_PER_SECOND
    """Of a core of a CPU whose heap returns what is freed: results of operations, in memory that is always new."""
    host_parameters_per_second: Mapping[str, float] = field(default_factory=dict)
    """Parameters that the processors of a node with GPUs update; empty where nobody has measured it."""
    counts_locked: bool = False
    """Whether the driver of its devices keeps to the limit of a process on memory that it locks (``ulimit -l``)."""
    reached: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By precision, the parts of the rates of products and of memory that training reaches (``planning.calibration``);
    where there is none they are assumed."""

    threads_of_worker: int = 0
    """Of a CPU that each worker computes with; 0 where they are not counted: the workers share all cores."""

    @property
    def num_devices(self) -> int:
        """Of all nodes."""
        return self.nodes * self.devices_per_node

    def workers_on_node(self, workers: int) -> int:
        """Of so many workers, those on the node that has most."""
        return -(-workers // self.nodes)

    def share(self, workers: int) -> float:
        """The part of a device's rates that each of so many workers has: those of one CPU share them, and have no more
        than their threads make of it."""
        if self.kind != "cpu":
            return 1.0
        return min(1 / self.workers_on_node(workers), (self.threads_of_worker or self.cores) / self.cores)

    @property
    def has_bf16(self) -> bool:
        """Whether products in bf16 are those that its matrix units make: V100 and T4 make them in fp16 alone. Of a
        device that is not in the catalogue its rates tell."""
        flops = next((device.flops for device in DEVICES if device.name == self.name), self.flops)
        return self.kind == "cpu" or flops.get("fp16", 0) <= 2 * flops.get("bf16", math.inf)

    @cached_property
    def fp8_flops(self) -> float | None:
        """Products in fp8 of one device in FLOP/s: as many times those in bf16 as its peak is. None of a device that
        has none, or is not in the catalogue."""
        device = next((device for device in DEVICES if device.name == self.name), None)
        if device is None or device.family not in catalogue.FP8_TFLOPS:
            return None
        return self.flops["bf16"] * catalogue.FP8_TFLOPS[device.family] * 1e12 / device.flops["bf16"]

    def attention_flops(self, precision: str) -> float:
        """At which a device attends, in FLOP/s: a CPU in fp32, by loops of ours."""
        if self.kind == "cpu":
            return self.flops["fp32"]
        return min(catalogue.ATTENTION_SHARE * self.flops[precision], catalogue.ATTENTION_MOST)

    def describe(self) -> str:
        """One line for people."""
        nodes = f"{self.nodes} nodes, each " if self.nodes > 1 else ""
        memory = size(self.device_bytes)
        if self.kind == "cpu":
            what = f"{self.name}, {self.cores} core{'s' if self.cores > 1 else ''}, {memory}"
        else:
            many = f"{self.devices_per_node} x " if self.devices_per_node > 1 else ""
            what = f"{many}{self.name} with {memory}, host {size(self.host_bytes)}"
        speed = f"{self.flops['bf16'] / 1e12:.3g} TFLOP/s in bf16{' a device' if self.num_devices > 1 else ''}"
        return f"{nodes}{what}, {speed} ({self.source})"


def parse_hardware(text: str) -> Machine:
    """Hardware by name: ``2x8xA100-80GB``, ``8xH100``, ``RTX4090:128GB``, ``cpu:16c:64GB``.

    Numbers before the name are nodes and devices in each, or devices alone; before ``cpu`` they are nodes. What follows
    a device's name is the memory of its node. Case, spaces and vendors' names do not matter, and GB is 1e9 bytes (GiB
    2^30).

    Raises:
        UserError: nothing of that name is known, or it could be several; says what is known and what is near.
    """
    compact = re.sub(r"\s*[x×*]\s*", "x", text.strip().lower())
    counted = re.fullmatch(r"(?:(\d{1,9})x)?(?:(\d{1,9})x)?(.*)", compact)
    if counted is None or len(text) > LONGEST_NAME:
        raise user_error(f"hardware {text[:LONGEST_NAME]!r}", f"one line, written as {FORMS}")
    name = counted[3]
    counts = [int(number) for number in counted.groups()[:2] if number is not None]
    if not all(0 < count <= MOST_OF_A_KIND for count in counts):
        needed = f"at least one of everything, and at most {MOST_OF_A_KIND:,}"
        raise user_error(f"hardware {text!r}", needed, FORMS)
    if name.startswith("cpu"):
        return _parse_cpu(text, name, counts)
    nodes, devices = counts if len(counts) == 2 else [1, *counts, 1][:2]
    name, colon, memory = name.partition(":")
    machine = of_device(_find(text, name), nodes=nodes, devices_per_node=devices)
    if not colon:
        return machine
    if not (host_bytes := _bytes(memory)):
        raise user_error(f"hardware {text!r}", "after a device's name, the memory of its node", "RTX4090:128GB")
    return replace(machine, host_bytes=host_bytes)


def _bytes(text: str) -> int | None:
    """A size of memory in lower case, as ``64gb`` or ``64gib``; None if it is none."""
    if (match := re.fullmatch(r"(\d{1,6}(?:\.\d{1,9})?)\s*([mgt])(i?)b?", text.strip())) is None:
        return None
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("mgt".index(match[2]) + 2))


def _parse_cpu(text: str, name: str, counts: list[int]) -> Machine:
    cores = memory = None
    parts = [part for part in re.split(r"[:,\s]", name.removeprefix("cpu")) if part]
    for part in parts:
        if (match := re.fullmatch(r"(\d{1,9})(?:c|cores?)", part)) and int(match[1]) <= MOST_OF_A_KIND:
            cores = int(match[1])
        elif (num_bytes := _bytes(part)) is not None:
            memory = num_bytes
        else:
            break
    else:
        if cores and memory and len(parts) == 2 and len(counts) < 2:
            return of_cpu(cores, memory, nodes=counts[0] if counts else 1)
    raise user_error(f"hardware {text!r}", "cores and memory, and at most a number of nodes", "cpu:16c:64GB")


_BY_THE_WAY = re.compile(r"nvidia|geforce|tesla|amd|instinct|radeon|sxm\d?|oam|hbm\d?e?|gpu|generation|\bac\b")
"""Parts of names that tell no two devices of the catalogue apart. ``PCIe`` would: such cards are slower."""


def _plain(name: str) -> str:
    """A device's name in lower case, without what does not matter, its parts joined by dashes."""
    parts = re.split(r"[\s_-]+", _BY_THE_WAY.sub("", name.lower()))
    return "-".join(part for part in parts if part).replace("rtx-", "rtx")


def _find(text: str, name: str) -> Device:
    """The device of a name: its family and, where that is made in several sizes, its gigabytes."""
    plain = _plain(name)
    families = {device.family.lower(): device.family for device in DEVICES}
    families |= {family.removeprefix("rtx"): canonical for family, canonical in families.items()}
    family = families.get(plain)  # the whole name first: an A10G is no A of 10 GB
    size: str | None = None
    if family is None and (match := re.fullmatch(r"(.+?)(?:-?(\d+)-?gi?b?|-(\d+))?", plain)) is not None:
        family, size = families.get(match[1]), match[2] or match[3]
    if family is not None:
        devices = [device for device in DEVICES if device.family == family]
        fitting = [device for device in devices if size is None or device.gigabytes == int(size)]
        if len(fitting) == 1:
            return fitting[0]
        names = [device.name for device in devices]
        raise user_error(f"hardware {text!r}", " or ".join(names), f"write its memory, as {names[-1]}")
    near = difflib.get_close_matches(plain, families, n=3, cutoff=0.5)
    catalogue = ", ".join(dict.fromkeys(device.name for device in DEVICES))
    nearest = ", ".join(dict.fromkeys(d.name for family in near for d in DEVICES if d.family == families[family]))
    raise user_error(
        f"hardware {text!r}",
        f"one of {catalogue}, cpu; written as {FORMS}",
        f"did you mean {nearest}?" if near else "",
    )


def device_named(name: str, num_bytes: int) -> Device | None:
    """The device of the catalogue that torch calls ``name`` and gives ``num_bytes``; None if there is none."""
    plain = re.sub(r"-\d+gb\b", "", _plain(name))
    for device in DEVICES:
        if plain == device.family.lower() and abs(device.memory_bytes - num_bytes) < 0.1 * num_bytes:
            return device
    return None


def of_device(device: Device, *, nodes: int, devices_per_node: int) -> Machine:
    """Nodes of a device of the catalogue, with the rates that are expected of it."""
    products, memory, links, host_links = (EFFICIENCY[kind] for kind in ("products", "memory", "links", "host links"))
    bandwidth = memory * device.memory_bytes_per_second
    return Machine(
        name=device.name,
        source="catalogue",
        disk_source="catalogue",
        kind="cuda",
        nodes=nodes,
        devices_per_node=devices_per_node,
        cores=catalogue.HOST_CORES_PER_DEVICE * devices_per_node,
        device_bytes=device.memory_bytes,
        host_bytes=catalogue.HOST_BYTES_PER_DEVICE_BYTE * devices_per_node * device.memory_bytes,
        disk_bytes=catalogue.DISK_BYTES,
        flops={dtype: products * peak for dtype, peak in device.flops.items()},
        memory_bytes_per_second=bandwidth,
        host_device_bytes_per_second=host_links * device.host_bytes_per_second,
        disk_read_bytes_per_second=catalogue.DISK_READ,
        disk_write_bytes_per_second=catalogue.DISK_WRITE,
        disk_mixed_bytes_per_second=catalogue.DISK_MIXED,
        link_bytes_per_second=links * device.link_bytes_per_second,
        network_bytes_per_second=links * device.network_bits_per_second / 8 / devices_per_node,
        optimizer_parameters_per_second={
            codec: bandwidth / moved for codec, moved in catalogue.UPDATE_BYTES["cuda"].items()
        },
    )


def of_cpu(cores: int, memory_bytes: int, *, nodes: int = 1) -> Machine:
    """Nodes without accelerators, with the rates that are expected of any processor."""
    flops = EFFICIENCY["products"] * catalogue.CORE_FLOPS * cores
    bandwidth = EFFICIENCY["memory"] * min(catalogue.CPU_BANDWIDTH, catalogue.CORE_BANDWIDTH * cores)
    return Machine(
        name="cpu",
        source="catalogue",
        disk_source="catalogue",
        kind="cpu",
        nodes=nodes,
        devices_per_node=1,
        cores=cores,
        device_bytes=memory_bytes,
        host_bytes=memory_bytes,
        disk_bytes=catalogue.DISK_BYTES,
        flops=dict.fromkeys(("fp32", "bf16", "fp16"), flops),
        memory_bytes_per_second=bandwidth,
        host_device_bytes_per_second=0.0,
        disk_read_bytes_per_second=catalogue.DISK_READ,
        disk_write_bytes_per_second=catalogue.DISK_WRITE,
        disk_mixed_bytes_per_second=catalogue.DISK_MIXED,
        link_bytes_per_second=catalogue.BETWEEN_PROCESSES,
        network_bytes_per_second=catalogue.BETWEEN_PROCESSES,
        optimizer_parameters_per_second={
            codec: min(bandwidth / catalogue.UPDATE_BYTES["cpu"][codec], cores / seconds)
            for codec, seconds in catalogue.UPDATE_CORE_SECONDS.items()
        },
    )
