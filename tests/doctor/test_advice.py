"""Advice: none where all is well, and the right one where not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from doctor.machines import GIB, compute, disk, hardware, storage
from tonnage.doctor import advice
from tonnage.doctor.advice import advise


def given(**changes: Any) -> list[str]:
    """What is found about the machines of ``machines`` with changes of their parts."""
    arguments: dict[str, Any] = {
        "hardware": hardware(),
        "disk": disk(),
        "compute": compute(),
        "storage": storage(),
        "environment": {},
        "available_bytes": 60 * GIB,
        "device_files": [],
    }
    arguments |= changes
    parts = [arguments.pop(name) for name in ("hardware", "disk", "compute", "storage")]
    return [f"{one.found} | {one.change}" for one in advise(*parts, **arguments)]


def test_a_limit_of_locked_memory_is_told_where_a_driver_keeps_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "lockable_bytes", lambda: 8_000_000)
    assert given(compute=compute(counts_locked=False)) == []
    (said,) = given(compute=compute(counts_locked=True))
    assert re.search("may lock 8.00 MB.*ulimit -l unlimited.*memlock=-1", said)
    monkeypatch.setattr(advice, "lockable_bytes", lambda: None)
    assert given(compute=compute(counts_locked=True)) == []


def test_nothing_to_say() -> None:
    assert given() == []
    assert given(compute=None, storage=None) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compute": compute(flops={"fp32": 1e12, "bf16": 1e12, "fp16": 1e12})}, "at 1.00 times.*precision=fp32"),
        ({"compute": compute(flops={"fp32": 8e12, "bf16": 8e12, "fp16": 6e13})}, "at 1.00 times.*precision=fp16"),
        ({"compute": compute(busy=0.5)}, "others used 50%.*tonnage doctor, when"),
        ({"compute": compute(quick=True)}, "rough.*without --quick"),
        ({"compute": compute(link_failure="rank 1 died\n\n  a\n  no NCCL\n\nlog")}, "rank 1 died: no NCCL.*--again"),
        ({"storage": storage(direct=False)}, "past the page cache.*offload_dirs"),
        ({"storage": storage(mixed=0.1e9)}, "0.10 GB/s.*200 s a step"),
        ({"disk": disk(key="tmpfs:tmpfs")}, "in memory"),
        ({"disk": disk(free_bytes=10**9)}, "1.0 GB free under /data"),
        ({"environment": {"OMP_NUM_THREADS": "1"}}, "OMP_NUM_THREADS=1 is set, 8 cores"),
        ({"hardware": hardware(memory_bytes=4 * GIB, machine_memory_bytes=4 * GIB)}, "4.3 GB of memory .*int8"),
        ({"hardware": hardware(memory_bytes=32 * GIB)}, "34.4 GB of the machine's 68.7.*limit"),
        ({"hardware": hardware(cores=2)}, "2 of the machine's 8 cores"),
        ({"hardware": hardware(devices=("X", "Y"), device_bytes=16 * GIB)}, "different accelerators: X, Y"),
        ({"hardware": hardware(devices=("X",), device_bytes=80 * GIB)}, "less than one of its accelerators"),
        ({"device_files": ["/dev/nvidiactl"]}, "torch 2.13.0 sees no device.*install"),
        ({"available_bytes": 8 * GIB}, "8.6 GB of memory are free now"),
    ],
)  # fmt: skip
def test_one_thing_that_is_not_well(changes: dict[str, Any], said: str) -> None:
    found = given(**changes)
    relevant = [one for one in found if "free now" not in one] if "hardware" in changes else found
    assert len(relevant) == 1, found
    assert re.search(said, relevant[0])


@pytest.mark.parametrize("threads", ["8", "16", "", "many"])
def test_enough_threads_are_no_matter(threads: str) -> None:
    assert given(environment={"OMP_NUM_THREADS": threads}) == []


def test_nothing_is_said_to_rest_on_disk_beside_a_gpu() -> None:
    little = hardware(devices=("X",), device_bytes=80 * GIB)
    said = given(hardware=little, storage=storage(mixed=0.1e9, direct=False), disk=disk(free_bytes=10**9))
    assert any("moments=int8" in one for one in said)
    assert any("make room" in one for one in said)
    assert not any("_tier=disk" in one or "page cache" in one for one in said)
