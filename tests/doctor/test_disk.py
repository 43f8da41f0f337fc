"""The disk's probe: what it counts, and that nothing of it stays."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tonnage.doctor import disk
from tonnage.doctor.disk import REQUEST_BYTES, disk_rates
from tonnage.errors import DiskFailed, UserError
from tonnage.training.moves import disk_traffic


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    told: list[str] = []
    before, began = disk_traffic(), time.perf_counter()
    rates = disk_rates(tmp_path / "new", 2 * disk.LEAST_BYTES, 0.2, told.append)
    seconds = time.perf_counter() - began
    assert told == ["disk: filling", "disk: read", "disk: write", "disk: mixed"]
    assert min(rates.read, rates.write, rates.mixed) > 1e6
    assert list((tmp_path / "new").iterdir()) == []
    after = disk_traffic()
    if rates.direct and before is not None and after is not None:
        read, written = after[0] - before[0], after[1] - before[1]
        assert 0 < read <= max(rates.read, rates.mixed) * seconds
        assert written >= 2 * disk.LEAST_BYTES  # filled, whatever came after


def test_bytes_of_all_threads_are_counted(tmp_path: Path) -> None:
    offsets: list[int] = []

    def move(buffer: memoryview, offset: int) -> None:
        assert len(buffer) == REQUEST_BYTES
        offsets.append(offset)
        time.sleep(0.02)

    quiet: Any = SimpleNamespace(sync=lambda: None)
    began = time.perf_counter()
    rate = disk._rate([move, move], num_threads=2, requests=5, seconds=0.5, written=quiet)
    seconds = time.perf_counter() - began
    assert set(offsets) == {number * REQUEST_BYTES for number in range(5)}
    moved = len(offsets) * REQUEST_BYTES
    assert moved / seconds <= rate <= moved / 0.5 <= 4.4 * REQUEST_BYTES / 0.02  # four threads


def test_threads_that_begin_late_move_something(tmp_path: Path) -> None:
    quiet: Any = SimpleNamespace(sync=lambda: None)
    moved: list[int] = []
    rate = disk._rate([lambda _, offset: moved.append(offset)], 3, requests=9, seconds=-1.0, written=quiet)
    assert sorted(moved) == [0, REQUEST_BYTES, 2 * REQUEST_BYTES]
    assert rate > 0


def test_a_failing_disk_is_told(tmp_path: Path) -> None:
    def fail(buffer: memoryview, offset: int) -> None:
        raise DiskFailed("broken")

    nothing: Any = None
    with pytest.raises(DiskFailed, match="broken"):
        disk._rate([fail], num_threads=3, requests=1, seconds=5.0, written=nothing)


def test_a_slow_disk_is_measured_on_what_it_could_take(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        written = 0

        def write(self, buffer: memoryview, offset: int) -> None:
            assert offset == self.written
            self.written += len(buffer)

        def sync(self) -> None:
            pass

    files: Any = (Slow(), Slow())
    monkeypatch.setattr(disk, "FILLING_SECONDS", -1.0)
    assert disk._fill(files, most=1000) == disk.LEAST_BYTES // REQUEST_BYTES
    assert files[0].written == files[1].written == disk.LEAST_BYTES


def test_a_full_disk_is_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=100, f_frsize=10**6))
    with pytest.raises(UserError, match=r"100 MB free\n  needed: 537 MB.*\n  change: .*--directory"):
        disk_rates(tmp_path, 10**9, 0.1)


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="no file can be made there"):
        disk_rates(tmp_path / "file", 10**9, 0.1)
