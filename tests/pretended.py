"""A machine that counts as measured, so that no plan of a test measures it or depends on how fast it is."""

from __future__ import annotations


def pretend_measured() -> None:
    """Write down that this machine, with the cores that this process may use, is as is assumed of any."""
    from tonnage.doctor.cache import Compute, Record, describe_here, remember
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
    remember(Record(look(), measured))
