"""What was measured is remembered, and becomes a machine; what was not is assumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from doctor.machines import GIB, compute, disk, hardware, storage
from tonnage.doctor import cache
from tonnage.doctor.cache import HardwareRecord, describe_here, load_machine, machine_of, recall, remember
from tonnage.doctor.hardware import look, look_at_disk
from tonnage.errors import UserError
from tonnage.planning.calibration import PRODUCTS
from tonnage.planning.catalogue import DEVICES
from tonnage.planning.machine import Machine, parse_hardware


def test_what_was_measured_is_found_again(tmp_path: Path) -> None:
    assert recall(hardware(), tmp_path) == HardwareRecord(hardware())
    record = HardwareRecord(hardware(), compute(), {"ext4:/dev/sda": storage(), "nfs:x:/y": storage(direct=False)})
    remember(record, tmp_path)
    assert recall(hardware(), tmp_path) == record
    assert recall(hardware(torch="3.0"), tmp_path).compute is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"version": 1}', '{"version": 1, "compute": {"flops": {}}, "disks": {}}']
)
def test_a_file_that_does_not_read_counts_as_none(tmp_path: Path, text: str) -> None:
    remember(HardwareRecord(hardware(), compute()), tmp_path).write_text(text)
    assert recall(hardware(), tmp_path) == HardwareRecord(hardware())


def test_another_form_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(HardwareRecord(hardware(), compute()), tmp_path)
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    assert recall(hardware(), tmp_path).compute is None


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "machines").write_text("a file in its place")
    with pytest.raises(UserError, match="set TONNAGE_CACHE"):
        remember(HardwareRecord(hardware()), tmp_path)


def test_a_measured_machine() -> None:
    machine = machine_of(HardwareRecord(hardware(), compute(), {disk().key: storage()}), disk())
    assert (machine.source, machine.disk_source, machine.kind) == ("measured", "measured", "cpu")
    assert (machine.name, machine.cores, machine.device_bytes) == ("A Processor", 8, 64 * GIB)
    assert machine.flops["bf16"] == 2e12
    assert (machine.disk_read_bytes_per_second, machine.disk_mixed_bytes_per_second) == (3e9, 2.5e9)
    assert machine.link_bytes_per_second == 2e9
    assert machine.disk_bytes == 10**12
    assert Machine(**json.loads(cache.to_json(machine))["machine"]) == machine


def test_another_disk_is_assumed() -> None:
    machine = machine_of(HardwareRecord(hardware(), compute(), {disk().key: storage()}), disk(key="ext4:/dev/sdb"))
    assert (machine.source, machine.disk_source) == ("measured", "assumed")
    assert machine.disk_read_bytes_per_second == cache.ASSUMED_READ


def test_a_link_that_was_not_measured_is_assumed() -> None:
    machine = machine_of(HardwareRecord(hardware(), compute(link_bytes_per_second=None)), disk())
    assert machine.link_bytes_per_second == parse_hardware("cpu:8c:64GB").link_bytes_per_second


def test_what_is_no_product_goes_at_its_own_rate() -> None:
    traffic = {"bf16": 16e9, "fp32": 40e9}
    machine = machine_of(HardwareRecord(hardware(), compute(traffic_bytes_per_second=traffic)), disk())
    assert machine.reached == {"bf16": (PRODUCTS["cpu"], 0.2), "fp32": (PRODUCTS["cpu"], 0.5)}
    assert machine_of(HardwareRecord(hardware(), compute()), disk()).reached == {}


def test_known_accelerators_take_their_rates_from_the_catalogue() -> None:
    number, size = 4, 81050 << 20
    machine = machine_of(
        HardwareRecord(hardware(devices=("NVIDIA A100-SXM4-80GB",) * number, device_bytes=size)), disk()
    )
    expected = parse_hardware("4xA100-80GB")
    assert (machine.source, machine.name) == ("assumed", "A100-80GB")
    assert (machine.flops, machine.device_bytes, machine.host_bytes) == (expected.flops, size, 64 * GIB)
    assert machine.link_bytes_per_second == expected.link_bytes_per_second


def test_unknown_accelerators_are_taken_for_slow_ones() -> None:
    machine = machine_of(HardwareRecord(hardware(devices=("Something New",), device_bytes=99 * GIB)), disk())
    assert (machine.name, machine.device_bytes, machine.kind) == ("Something New", 99 * GIB, "cuda")
    for device in DEVICES:
        known = parse_hardware(device.name)
        assert machine.memory_bytes_per_second <= known.memory_bytes_per_second
        assert all(machine.flops[dtype] <= known.flops[dtype] for dtype in known.flops)


def test_here(tmp_path: Path) -> None:
    assert load_machine(tmp_path, tmp_path) is None
    described = describe_here(tmp_path)
    assert (described.source, described.nodes) == ("assumed", 1)
    assert described.host_bytes == look().memory_bytes
    remember(HardwareRecord(look(), compute(), {look_at_disk(tmp_path).key: storage()}), tmp_path)
    loaded = load_machine(tmp_path, tmp_path)
    assert loaded is not None
    assert (loaded.source, loaded.disk_source, loaded.flops["fp32"]) == ("measured", "measured", 1e12)
    assert replace(loaded, disk_bytes=0).cores == described.cores
