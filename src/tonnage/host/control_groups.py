"""The control groups around this process: what containers and schedulers leave it of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
UNLIMITED_BYTES = 1 << 60
"""Version 1 writes the largest number of pages where there is no limit."""


def groups(
    controller: str, root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP
) -> Iterator[tuple[Literal[1, 2], Path]]:
    """The directories of this process's groups that may limit ``controller``, and of those above them.

    Each with its version: 2 has all controllers in one tree, 1 a tree for each.
    """
    for line in read(membership).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        path = top / group.lstrip("/")
        for directory in [path, *path.parents]:
            if top not in (directory, *directory.parents):
                break
            yield 1 if controllers else 2, directory


def memory_limit(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes of memory that the control groups around this process grant it; None if they set no limit.

    The least of ``memory.max`` (version 2) and ``memory.limit_in_bytes`` (version 1) of all groups.
    """
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    texts = [read(directory / names[version]).strip() for version, directory in groups("memory", root, membership)]
    limits = [int(text) for text in texts if text.isdecimal()]
    return min((limit for limit in limits if limit < UNLIMITED_BYTES), default=None)


def free_memory(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP, info: Path = MEMINFO) -> int | None:
    """Bytes of memory that processes here can still take, files that the system caches not counted; None if unknown.

    What the system calls available, or what the control groups around this process leave, whichever is less.
    """
    fields = dict(line.split(":", 1) for line in read(info).splitlines() if ":" in line)
    free = [int(fields["MemAvailable"].split()[0]) * 1024] if "MemAvailable" in fields else []
    for version, directory in groups("memory", root, membership):
        limit = read(directory / {1: "memory.limit_in_bytes", 2: "memory.max"}[version]).strip()
        used = read(directory / {1: "memory.usage_in_bytes", 2: "memory.current"}[version]).strip()
        if limit.isdecimal() and used.isdecimal() and int(limit) < UNLIMITED_BYTES:
            held = dict(line.split() for line in read(directory / "memory.stat").splitlines())
            total = {1: "total_", 2: ""}[version]
            cached = sum(int(held.get(f"{total}{kind}_file", 0)) for kind in ("inactive", "active"))
            free.append(int(limit) - int(used) + cached)
    return min(free, default=None)


def read(path: Path) -> str:
    """A small file's text, empty if there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
