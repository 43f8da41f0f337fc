"""Machines by name, as JSON, and in words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tonnage.errors import UserError
from tonnage.planning.catalogue import DEVICES, EFFICIENCY
from tonnage.planning.machine import device_named, parse_hardware


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "name"),
    [
        ("2x8xA100-80GB", 2, 8, "A100-80GB"),
        ("8xH100", 1, 8, "H100-80GB"),
        ("RTX4090", 1, 1, "RTX4090-24GB"),
        ("2 x 8 x nvidia a100 sxm4 80 GB", 2, 8, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 1, 1, "H100-80GB"),
        ("4×4090", 1, 4, "RTX4090-24GB"),
        ("8 * GeForce RTX 5090", 1, 8, "RTX5090-32GB"),
        ("Tesla V100-SXM2-32GB", 1, 1, "V100-32GB"),
        ("V100_16", 1, 1, "V100-16GB"),
        ("1x8xmi300x", 1, 8, "MI300X-192GB"),
        ("l4", 1, 1, "L4-24GB"),
        ("4xA10G", 1, 4, "A10G-24GB"),
        ("8xB300", 1, 8, "B300-288GB"),
        ("18x4xGB200", 18, 4, "GB200-186GB"),
    ],
)  # fmt: skip
def test_devices_are_found_however_they_are_written(text: str, nodes: int, devices: int, name: str) -> None:
    machine = parse_hardware(text)
    assert (machine.nodes, machine.devices_per_node, machine.name) == (nodes, devices, name)
    assert (machine.source, machine.disk_source, machine.kind) == ("catalogue", "catalogue", "cuda")
    assert machine.num_devices == nodes * devices


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_name_is_its_own(device: Any) -> None:
    machine = parse_hardware(device.name)
    assert machine.name == device.name
    assert machine.device_bytes == device.memory_mib * 2**20
    assert machine.flops["bf16"] == EFFICIENCY["products"] * device.flops["bf16"]
    assert machine.memory_bytes_per_second == EFFICIENCY["memory"] * device.memory_bytes_per_second


def test_devices_share_their_nodes_network() -> None:
    one, eight = parse_hardware("A100-80GB"), parse_hardware("16x8xA100-80GB")
    assert one.network_bytes_per_second == 8 * eight.network_bytes_per_second == EFFICIENCY["links"] * 400e9 / 8
    assert eight.link_bytes_per_second == EFFICIENCY["links"] * 300e9
    assert eight.host_bytes == 8 * one.host_bytes


def test_the_memory_of_a_node_may_be_said() -> None:
    assumed = parse_hardware("2x4xRTX4090")
    for text, num_bytes in (("2x4xRTX4090:128GB", 128 * 10**9), ("2 x 4 x rtx 4090: 0.5 TiB", 2**39)):
        assert parse_hardware(text) == replace(assumed, host_bytes=num_bytes)


def test_updates_are_bound_by_memory_or_by_arithmetic() -> None:
    device = parse_hardware("A100-80GB")
    assert device.optimizer_parameters_per_second["fp32"] == device.memory_bytes_per_second / 28
    few, many = (parse_hardware(f"cpu:{cores}c:24GB").optimizer_parameters_per_second for cores in (1, 64))
    assert few == {"fp32": 8e9 / 26, "bf16": 8e9 / 18, "int8": 8e9 / 14.1}
    assert many["fp32"] == 80e9 / 26  # all channels are busy
    assert parse_hardware("cpu:1c:1GB").flops["fp32"] * 64 == parse_hardware("cpu:64c:1GB").flops["bf16"]


@pytest.mark.parametrize(
    ("text", "nodes", "cores", "num_bytes"),
    [
        ("cpu:16c:64GB", 1, 16, 64 * 10**9),
        ("4xCPU:1.5TB:96cores", 4, 96, 1500 * 10**9),
        ("cpu 1core 512MiB", 1, 1, 512 * 2**20),
    ],
)
def test_processors(text: str, nodes: int, cores: int, num_bytes: int) -> None:
    machine = parse_hardware(text)
    assert (machine.kind, machine.nodes, machine.devices_per_node, machine.cores) == ("cpu", nodes, 1, cores)
    assert machine.device_bytes == machine.host_bytes == num_bytes
    assert machine.host_device_bytes_per_second == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH10", r"did you mean H100-80GB"),
        ("8xA100", r"needed: A100-40GB or A100-80GB\n  change: write its memory"),
        ("A100-60GB", r"A100-40GB or A100-80GB"),
        ("A1000", r"one of V100-16GB.*RTX5090-32GB, cpu"),
        ("H100-PCI", r"did you mean H100-PCIe-80GB"),
        ("0xH100", r"at least one"),
        ("2x2x2xH100", r"nodes x devices x name"),
        ("RTX4090:", r"memory of its node"),
        ("RTX4090:128", r"memory of its node"),
        ("cpu:16c", r"cores and memory"),
        ("cpu:16c:64GB:3", r"cores and memory"),
        ("2x8xcpu:16c:64GB", r"at most a number of nodes"),
        ("", r"one of V100"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(text: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)hardware '{text}'.*{said}"):
        parse_hardware(text)


@pytest.mark.parametrize(
    ("name", "mib", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 81050, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 40339, "A100-40GB"),
        ("NVIDIA B200", 182630, "B200-180GB"),
        ("NVIDIA GeForce RTX 3090", 24259, "RTX3090-24GB"),
        ("NVIDIA A100-PCIE-40GB", 40339, "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", 81050, "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", 81080, "H100-80GB"),
        ("NVIDIA H100 PCIe", 81080, "H100-PCIe-80GB"),
        ("NVIDIA H100 NVL", 95320, "H100-NVL-94GB"),
        ("NVIDIA H20", 97280, "H20-96GB"),
        ("NVIDIA GH200 480GB", 97280, "GH200-96GB"),
        ("NVIDIA RTX A6000", 48530, "RTXA6000-48GB"),
        ("NVIDIA RTX 6000 Ada Generation", 48520, "RTX6000-Ada-48GB"),
        ("NVIDIA L40", 45470, "L40-48GB"),
        ("NVIDIA GeForce RTX 4080", 16070, "RTX4080-16GB"),
        ("NVIDIA A10G", 22723, "A10G-24GB"),
        ("NVIDIA A10", 22723, "A10-24GB"),
        ("NVIDIA A40", 45470, "A40-48GB"),
        ("NVIDIA H800", 81080, "H800-80GB"),
        ("NVIDIA H200 NVL", 143160, "H200-NVL-141GB"),
        ("NVIDIA GB200", 188800, "GB200-186GB"),
        ("NVIDIA B300 SXM6 AC", 274400, "B300-288GB"),
        ("NVIDIA GeForce RTX 3060", 11910, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9900, None),
    ],
)
def test_devices_that_are_here_are_recognised(name: str, mib: int, expected: str | None) -> None:
    found = device_named(name, mib << 20)
    assert (found and found.name) == expected


def test_a_line_for_people() -> None:
    machine = parse_hardware("2x8xA100-80GB")
    assert machine.describe() == (
        "2 nodes, each 8 x A100-80GB with 85.9 GB, host 1.37 TB, 218 TFLOP/s in bf16 a device (catalogue)"
    )
    here = replace(parse_hardware("cpu:2c:24GB"), name="EPYC", source="measured")
    assert here.describe() == "EPYC, 2 cores, 24 GB, 0.112 TFLOP/s in bf16 (measured)"


def test_no_torch_is_needed() -> None:
    code = "import sys, tonnage.planning.machine as m; m.parse_hardware('8xH100'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
