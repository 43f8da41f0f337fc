"""A file written past the page cache holds exactly what was put, whatever the file system takes."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tonnage.offload import files
from tonnage.offload.files import PAGE, NewFile


def refusing_direct(
    descriptor: int, command: int, flags: int = 0, real: Callable[[int, int, int], int] = fcntl.fcntl
) -> int:
    if command == fcntl.F_SETFL and flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "no direct transfers here")
    return real(descriptor, command, flags)


def stopping_inside_a_page(descriptor: int, data: memoryview, real: Callable[..., int] = os.write) -> int:
    """Writes a third of what it is given: then a direct transfer cannot go on where it stopped."""
    if len(data) < 3:
        return real(descriptor, data)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    written = real(descriptor, data[: len(data) // 3])
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return written


def refusing_at_the_first_write(descriptor: int, data: memoryview, real: Callable[..., int] = os.write) -> int:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, "not like this")
    return real(descriptor, data)


@pytest.mark.parametrize("trouble", ["none", "refused", "refused late", "short"])
@pytest.mark.parametrize("sizes", [(5,), (PAGE, PAGE), (8, 3 * PAGE - 8), (3, 10 * PAGE, 1, 4 * PAGE + 17), ()])
def test_a_new_file_holds_what_was_put(
    trouble: str, sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "STREAM_BYTES", 4 * PAGE)
    if trouble == "refused":
        monkeypatch.setattr(fcntl, "fcntl", refusing_direct)
    elif trouble != "none":
        stand_in = stopping_inside_a_page if trouble == "short" else refusing_at_the_first_write
        monkeypatch.setattr(os, "write", stand_in)
    pieces = [os.urandom(size) for size in sizes]
    file = NewFile(tmp_path / "x")
    for piece in pieces:
        file.put(memoryview(piece))
    file.finish()
    monkeypatch.undo()
    assert (tmp_path / "x").read_bytes() == b"".join(pieces)


def test_a_new_file_takes_no_page_cache(tmp_path: Path) -> None:
    """Where the file system takes direct transfers: nothing of it is in memory afterwards."""
    (tmp_path / "probe").write_bytes(bytes(PAGE))
    if not files._takes_direct(tmp_path / "probe", write=True):
        pytest.skip("no direct transfers in this file system")
    before = _cached()
    file = NewFile(tmp_path / "x")
    for _ in range(16):
        file.put(memoryview(bytes(16 << 20)))
    file.finish()
    assert _cached() - before < 64 << 20


def _cached() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Cached"].split()[0]) * 1024


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        NewFile(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "mine"
