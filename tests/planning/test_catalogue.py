"""The catalogue: complete, and as the datasheets' figures fit each other."""

from __future__ import annotations

import pytest

from tonnage.planning.catalogue import DEVICES, EFFICIENCY, FP8_TFLOPS, Device

NAMED = pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)


def test_names_are_unique() -> None:
    assert len({device.name for device in DEVICES}) == len(DEVICES) == 31


@NAMED
def test_every_entry_is_whole(device: Device) -> None:
    assert set(device.flops) == {"fp32", "bf16", "fp16"}
    rates = (*device.flops.values(), device.memory_bytes_per_second, device.network_bits_per_second)
    assert all(rate > 0 for rate in rates)
    assert device.source.split()[0] in ("NVIDIA", "AMD")
    assert device.host_bytes_per_second in (16e9, 32e9, 64e9, 225e9, 450e9)
    assert device.link_bytes_per_second >= device.host_bytes_per_second


@NAMED
def test_memory_is_near_the_number_in_the_name(device: Device) -> None:
    # Error correction in GDDR6 takes a sixteenth; HBM is sold in GiB, more or less.
    assert 0.93 <= device.memory_bytes / (device.gigabytes * 2**30) <= 1.01


@NAMED
def test_sixteen_bits_are_dense_and_summed_in_fp32(device: Device) -> None:
    """Vendors print twice as much for sparsity, and twice for sums in fp16: matrix units make 2 to 31 times fp32."""
    assert 1.9 < device.flops["fp16"] / device.flops["fp32"] < 32
    assert device.flops["bf16"] in (device.flops["fp16"], device.flops["fp32"])


@NAMED
def test_eight_bits_are_as_dense(device: Device) -> None:
    """NVIDIA's cards since Ada and Hopper multiply them twice as fast as 16."""
    has = device.family.startswith(("L4", "H", "GH", "B2", "B3", "GB", "RTX6000-Ada", "RTX4", "RTX5"))
    assert (device.family in FP8_TFLOPS) == has
    assert not has or FP8_TFLOPS[device.family] * 1e12 == pytest.approx(2 * device.flops["bf16"], rel=0.015)


def test_efficiencies_are_parts() -> None:
    assert all(0.5 <= part < 1 for part in EFFICIENCY.values())
