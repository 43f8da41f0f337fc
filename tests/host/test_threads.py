"""Threads per worker, on machines made of files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tonnage.host import threads


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


def described(*workers: tuple[str, int, int, float | None]) -> list[str]:
    return [json.dumps([machine, f"{cpus:x}", cores, quota]) for machine, cpus, cores, quota in workers]


def shares(descriptions: list[str]) -> list[int]:
    return [threads.share_of(descriptions, rank) for rank in range(len(descriptions))]


def test_workers_that_others_started_share_what_they_have_in_common() -> None:
    assert shares(described(("a", 0xFF, 4, None), ("a", 0xFF, 4, None), ("b", 0xFF, 4, None))) == [2, 2, 4]
    assert shares(described(("a", 0x0F, 4, None), ("a", 0xF0, 4, None))) == [4, 4]  # bound to CPUs of their own
    assert shares(described(("a", 0xFF, 8, 4.0), ("a", 0xFF00, 8, 4.0))) == [2, 2]  # under one quota
    assert shares(described(*[("a", 0x3, 2, None)] * 3)) == [1, 1, 1]


def test_this_process_alone_has_all_its_cores() -> None:
    assert threads.share_of([threads.describe_cpus()], 0) == threads.usable_cores()
