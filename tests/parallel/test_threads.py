"""Threads per worker, on machines made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tonnage.parallel import threads


def make_cpus(root: Path, siblings: dict[int, str]) -> Path:
    for cpu, text in siblings.items():
        topology = root / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    return root


def test_hyper_threads_of_a_core_count_once(tmp_path: Path) -> None:
    root = make_cpus(tmp_path, {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"})
    assert threads.physical_cores({0, 1, 4, 5}, root) == 2
    assert threads.physical_cores({0, 4}, root) == 1
    assert threads.physical_cores({0, 1}, root) == 2


def test_every_cpu_counts_where_the_machine_does_not_say(tmp_path: Path) -> None:
    assert threads.physical_cores({0, 1, 2}, tmp_path) == 3


def test_quota_of_the_strictest_control_group(tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "slice" / "job"
    group.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("0::/slice/job\n")
    root = tmp_path / "cgroup"
    assert threads.cpu_quota(root, membership) is None
    (group / "cpu.max").write_text("max 100000\n")
    assert threads.cpu_quota(root, membership) is None
    (group / "cpu.max").write_text("400000 100000\n")
    assert threads.cpu_quota(root, membership) == 4
    (group.parent / "cpu.max").write_text("250000 100000\n")
    assert threads.cpu_quota(root, membership) == 2.5
    assert threads.cpu_quota(root, tmp_path / "none") is None


def test_quota_of_version_1(tmp_path: Path) -> None:
    group = tmp_path / "cpu,cpuacct" / "job"
    group.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("3:memory:/job\n2:cpu,cpuacct:/job\n0::/\n")
    (group / "cpu.cfs_quota_us").write_text("150000")
    (group / "cpu.cfs_period_us").write_text("100000")
    assert threads.cpu_quota(tmp_path, membership) == 1.5
    (group / "cpu.cfs_quota_us").write_text("-1")
    assert threads.cpu_quota(tmp_path, membership) is None


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    assert [threads.threads_per_worker("auto", count) for count in (1, 3, 8, 20)] == [8, 2, 1, 1]
    assert threads.threads_per_worker(5, 20) == 5


def test_this_machine() -> None:
    assert 1 <= threads.usable_cores() <= (os.cpu_count() or 1)
