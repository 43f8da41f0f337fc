"""A machine that counts as measured, so that no plan of a test measures it or depends on how fast it is; and one that
seems to have GPUs."""

from __future__ import annotations

import re

import pytest


def pretend_measured() -> None:
    """Write down that this machine, with the cores that this process may use, is as is assumed of any."""
    from tonnage.doctor.cache import Compute, HardwareRecord, describe_here, remember
    from tonnage.doctor.hardware import look

    here = describe_here()
    measured = Compute(
        flops=here.flops,
        memory_bytes_per_second=here.memory_bytes_per_second,
        host_device_bytes_per_second=here.host_device_bytes_per_second,
        optimizer_parameters_per_second=here.optimizer_parameters_per_second,
        link_bytes_per_second=None,
        link_failure="",
        busy=0.0,
        fresh_bytes_per_second=here.fresh_bytes_per_second,
        quick=True,
        date="",
    )
    remember(HardwareRecord(look(), measured))


def pretend_gpus(patch: pytest.MonkeyPatch, number: int, name: str = "NVIDIA H100 80GB HBM3") -> None:
    """Let this machine have so many GPUs that it sees, for what is decided: nothing computes on them."""
    gigabytes = int(re.findall(r"(\d+)GB", name)[0])
    patch.setattr("tonnage.doctor.hardware._devices", lambda: [(name, gigabytes * 10**9)] * number)
    patch.setattr("tonnage.doctor.measure.glance", lambda *_, **__: None)
