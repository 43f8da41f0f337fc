"""What is measured when, and that all of it together becomes a machine."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doctor.machines import compute, disk, hardware, storage
from tonnage.doctor import compute as probes
from tonnage.doctor import link, measure
from tonnage.doctor.cache import HardwareRecord, load_machine, recall, remember
from tonnage.doctor.hardware import Neighbours, look
from tonnage.doctor.measure import QUICK, examine, glance
from tonnage.errors import WorkerFailed
from tonnage.kernels import threads, widening
from tonnage.planning.catalogue import UPDATE_BYTES


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in its order, on a machine on which nothing is."""
    done: list[str] = []

    def find_compute(*_: Any, quick: bool, **__: Any) -> Any:
        done.append("compute")
        return compute(quick=quick)

    def find_storage(*_: Any, quick: bool) -> Any:
        done.append("disk")
        return storage(quick=quick)

    monkeypatch.setattr(measure, "look", hardware)
    monkeypatch.setattr(measure, "look_at_disk", lambda directory: disk(key=str(directory)))
    monkeypatch.setattr(measure, "_compute", find_compute)
    monkeypatch.setattr(measure, "_storage", find_storage)
    monkeypatch.setattr(Neighbours, "share", lambda _: 0.0)
    return done


def test_everything_is_measured_once(measured: list[str], tmp_path: Path) -> None:
    first, second, third = Path("/a"), Path("/a"), Path("/b")
    assert examine(first, cache=tmp_path).new
    assert measured == ["disk", "compute"]
    assert not examine(second, cache=tmp_path).new
    assert measured == ["disk", "compute"]
    found = examine(third, cache=tmp_path)
    assert measured == ["disk", "compute", "disk"]
    assert set(found.record.disks) == {"/a", "/b"}
    kept = widening._file(torch.bfloat16, tmp_path)  # whether products go through fp32
    kept.parent.mkdir()
    kept.touch()
    examine(first, cache=tmp_path)
    assert kept.exists()
    examine(first, again=True, cache=tmp_path)
    assert measured == ["disk", "compute", "disk", "disk", "compute"]
    assert not kept.exists()


@pytest.mark.parametrize("disturbed", ["disk", "compute"])
def test_what_others_disturbed_is_not_kept(
    disturbed: str, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if disturbed == "disk":
        monkeypatch.setattr(Neighbours, "share", lambda _: 0.4)
    else:
        monkeypatch.setattr(measure, "_compute", lambda *_, **__: compute(busy=0.4))
    found = examine(Path("/a"), cache=tmp_path)
    assert found.disturbed
    assert recall(hardware(), tmp_path).compute is None
    assert set(recall(hardware(), tmp_path).disks) == (set() if disturbed == "disk" else {"/a"})


def test_what_was_quick_is_measured_again_in_earnest_and_not_the_other_way(measured: list[str], tmp_path: Path) -> None:
    assert examine(Path("/a"), quick=True, cache=tmp_path).record.compute == compute(quick=True)
    assert examine(Path("/a"), cache=tmp_path).record.compute == compute()
    assert examine(Path("/a"), quick=True, cache=tmp_path).record.compute == compute()
    assert measured == ["disk", "compute"] * 2


def test_what_was_glanced_at_is_examined_by_whoever_asks(measured: list[str], tmp_path: Path) -> None:
    remember(HardwareRecord(hardware(), compute(quick=True, glance=True)), tmp_path)
    assert examine(Path("/a"), quick=True, cache=tmp_path).record.compute == compute(quick=True)
    assert measured == ["disk", "compute"]


def test_a_glance_at_products_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real probes, small; others' work is left out, which decides whether it is kept."""
    monkeypatch.setattr(probes, "HIDDEN", {"cpu": 128, "cuda": 128})
    monkeypatch.setattr(Neighbours, "share", lambda _: 0.0)
    told: list[tuple[str, int, int]] = []
    threads = torch.get_num_threads()
    found = glance(tmp_path, cache=tmp_path / "cache", progress=lambda *step: told.append(step))
    assert found is not None
    assert 0 < found.seconds < 60
    assert torch.get_num_threads() == threads
    assert [done for _, done, _ in told] == list(range(told[0][2]))
    machine = found.machine
    assert (machine.source, machine.disk_source) == ("measured", "assumed")
    assert all(1e8 < rate < 1e16 for rate in machine.flops.values())
    assert 1e8 < machine.memory_bytes_per_second < 1e14
    for codec, rate in machine.optimizer_parameters_per_second.items():
        assert rate <= machine.memory_bytes_per_second / UPDATE_BYTES["cpu"][codec]
    known = load_machine(tmp_path, tmp_path / "cache")
    assert known is not None
    assert replace(known, disk_bytes=machine.disk_bytes) == machine  # what is free changes while others write
    record = recall(look(), tmp_path / "cache")
    assert record.compute is not None
    assert (record.compute.quick, record.compute.glance, record.disks) == (True, True, {})
    assert glance(tmp_path, cache=tmp_path / "cache") is None  # it is known now


def test_a_glance_at_a_busy_machine_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_probed", lambda *_, **__: compute(quick=True, glance=True, busy=0.4))
    for _ in range(2):
        found = glance(tmp_path, cache=tmp_path / "cache")
        assert found is not None
        assert found.machine.flops == compute().flops
        assert "while others used 40% of the cores" in str(found)
    assert load_machine(tmp_path, tmp_path / "cache") is None


def test_accelerators_are_glanced_at_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.dumps([asdict(compute(glance=True)), 1.5])
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(stdout=f"a warning\n{said}\n")

    monkeypatch.setattr(measure, "look", lambda: hardware(devices=("X",), device_bytes=10**9))
    monkeypatch.setattr(subprocess, "run", run)
    found = glance(tmp_path, cache=tmp_path / "cache")
    assert found is not None
    assert (found.seconds, found.machine.kind) == (1.5, "cuda")
    assert commands[0][1:] == ["-m", "tonnage.doctor.measure"]

    def fail(command: list[str], **_: Any) -> Any:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail)
    assert glance(tmp_path, cache=tmp_path / "other") is None  # it is assumed, as the plan says


@pytest.mark.slow
def test_a_machine_in_earnest_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real probes at the least size, the links among workers left out."""
    small = replace(QUICK, disk_bytes=128 << 20, disk_seconds=0.1, memory_bytes=8 << 20, parameters=100_000)
    monkeypatch.setattr(measure, "QUICK", small)
    monkeypatch.setattr(probes, "HIDDEN", {"cpu": 128, "cuda": 128})
    # Several threads wait for each other: where other tests have the cores, a thousand times as long as they compute.
    monkeypatch.setattr(Neighbours, "share", lambda _: 0.0)
    use_threads = threads.use_threads
    monkeypatch.setattr(threads, "use_threads", lambda number: use_threads(1))
    told: list[tuple[str, int, int]] = []
    found = examine(tmp_path, quick=True, cache=tmp_path / "cache", progress=lambda *step: told.append(step))
    assert [done for _, done, _ in told] == list(range(told[0][2]))
    machine = load_machine(tmp_path, tmp_path / "cache")
    assert machine is not None
    assert (machine.source, machine.disk_source) == ("measured", "measured")
    assert found.record.compute is not None
    assert machine.flops == found.record.compute.flops
    assert all(1e8 < rate < 1e16 for rate in machine.flops.values())
    assert all(1e6 < rate < 1e13 for rate in machine.optimizer_parameters_per_second.values())
    assert 1e8 < machine.memory_bytes_per_second < 1e14


def test_workers_that_fail_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> float:
        raise WorkerFailed("worker 1 (of 2) was killed")

    monkeypatch.setattr(link, "link_rate", fail)
    assert measure._link(hardware()) == (None, "worker 1 (of 2) was killed")
    assert measure._link(hardware(devices=("X",))) == (None, "")


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def note(workers: int, threads: int) -> float:
        asked.append((workers, threads))
        return 1e9

    monkeypatch.setattr(link, "link_rate", note)
    measure._link(hardware(cores=8))
    measure._link(hardware(cores=1))
    measure._link(hardware(cores=8, devices=("X",) * 4))
    assert asked == [(2, 4), (2, 1), (4, 2)]
