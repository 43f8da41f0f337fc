"""Limits of control groups, on machines made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.host.control_groups import free_memory, memory_limit


def test_memory_of_the_strictest_group(tmp_path: Path) -> None:
    group = tmp_path / "groups" / "slice" / "job"
    group.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("0::/slice/job\n")
    root = tmp_path / "groups"
    assert memory_limit(root, membership) is None
    (group / "memory.max").write_text("max\n")
    assert memory_limit(root, membership) is None
    (group / "memory.max").write_text("4000000000\n")
    assert memory_limit(root, membership) == 4_000_000_000
    (group.parent / "memory.max").write_text("3000000000\n")
    assert memory_limit(root, membership) == 3_000_000_000
    (tmp_path / "memory.max").write_text("1\n")  # not a group: above the root
    assert memory_limit(root, membership) == 3_000_000_000
    assert memory_limit(root, tmp_path / "none") is None


def test_memory_of_version_1(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    group = root / "docker" / "job"
    group.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/docker/job\n1:name=systemd:/x\n0::/\n")
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # no limit, as the kernel writes it
    assert memory_limit(tmp_path, membership) is None
    (root / "memory.limit_in_bytes").write_text("8000000000\n")
    assert memory_limit(tmp_path, membership) == 8_000_000_000


def test_a_container_that_does_not_see_its_own_path(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("2000000000\n")
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/docker/0123\n")
    assert memory_limit(tmp_path, membership) == 2_000_000_000


@pytest.mark.parametrize(
    ("line", "limit", "used", "prefix"),
    [
        ("0::/job\n", "memory.max", "memory.current", ""),
        ("4:memory:/job\n", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
def test_files_that_a_group_caches_are_free(tmp_path: Path, line: str, limit: str, used: str, prefix: str) -> None:
    """All of them: those that were read twice, as the files of a large model, as well."""
    group = (tmp_path / "memory" if prefix else tmp_path) / "job"
    group.mkdir(parents=True)
    (group / limit).write_text("7000000000\n")
    (group / used).write_text("2000000000\n")
    stat = {"rss": 500_000_000, "inactive_file": 200_000_000, "active_file": 1_300_000_000}
    (group / "memory.stat").write_text("".join(f"{prefix}{key} {value}\n" for key, value in stat.items()))
    (tmp_path / "membership").write_text(line)
    (tmp_path / "info").write_text("MemAvailable:   9000000 kB\n")
    assert free_memory(tmp_path, tmp_path / "membership", tmp_path / "info") == 6_500_000_000
