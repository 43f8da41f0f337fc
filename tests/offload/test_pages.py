"""Arrays whose memory is a file: what is written is there, memory is given back, copies stay as they were."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tonnage.errors import UserError
from tonnage.offload.pages import FileRange, Pages, joined

BIG = 32 << 20


def array(pages: Pages, name: str) -> np.ndarray:
    return np.frombuffer(pages.memory(name), np.uint8)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_written_is_there_however_it_is_looked_at(tmp_path: Path) -> None:
    pages = Pages({"a": 5000, "b": 3, "c": 12_288}, [tmp_path / "x", tmp_path / "y"], "numbers")
    assert list(pages) == ["a", "b", "c"]
    assert "d" not in pages
    assert not any(array(pages, name).any() for name in pages)
    draw = np.random.default_rng(0)
    want = {name: draw.integers(0, 256, len(pages.memory(name)), np.uint8) for name in pages}
    array(pages, "a")[:] = want["a"]
    pages.rewrite("b", 0, want["b"].data)
    pages.rewrite("c", 0, want["c"].data)
    pages.rewrite("c", 4000, want["c"][4000:4200].data)
    for verb in (pages.rest, pages.prefetch, pages.bring, pages.rest):
        verb(list(pages))
        for name in pages:
            assert np.array_equal(array(pages, name), want[name]), (name, verb)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))  # no name, nothing left behind


def test_what_is_stored_is_read_where_it_is_and_never_written(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)
    (tmp_path / "theirs").write_bytes(content.tobytes())
    stored = {"b": FileRange(tmp_path / "theirs", 5000, 9000), "c": FileRange(tmp_path / "theirs", 14_000, 6000)}
    pages = Pages({"a": 5000}, [tmp_path / "x"], "numbers", stored)
    assert list(pages) == ["a", "b", "c"]
    assert pages.stored_bytes == 15_000
    for verb in (pages.prefetch, pages.bring, pages.rest):
        verb(list(pages))
        assert np.array_equal(array(pages, "b"), content[5000:14_000])
        assert np.array_equal(array(pages, "c"), content[14_000:])
    array(pages, "b")[:] = 0
    assert (tmp_path / "theirs").read_bytes() == content.tobytes()
    assert list(pages.copy()) == ["a"]


def test_arrays_of_several_are_as_those_of_one(tmp_path: Path) -> None:
    first, second = (Pages(dict.fromkeys(names, 5000), [tmp_path], "numbers") for names in ("ab", "cd"))
    assert joined([]) is None
    assert joined([first]) is first
    both = joined([first, second])
    assert both is not None
    assert list(both) == ["a", "b", "c", "d"]
    assert "c" in both
    assert "e" not in both
    there: list[str] = []
    for number, name in enumerate(both, start=1):
        both.rewrite(name, 0, memoryview(bytes([number] * 5000)))
        there = both.turn(there, both.ahead([name]))
        assert there == [name]
        assert set(both.memory(name)) == {number}
    assert both.waited_seconds > 0 == first.waited_seconds
    second.rest(there)  # as if all had been told
    both.bring(there)
    copied = both.copy()
    both.rewrite("d", 0, memoryview(bytes(5000)))
    both.rest(list(both))
    assert [copied.memory(name)[-1] for name in "abcd"] == [1, 2, 3, 4]
    assert [second.memory(name)[-1] for name in "cd"] == [3, 0]


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files always have a name at first")
def test_a_file_has_a_name_only_where_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between making it and taking its name away a process may be killed."""
    named: list[Path] = []
    make = tempfile.mkstemp

    def noted(prefix: str, dir: Path) -> tuple[int, str]:
        named.append(dir)
        return make(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkstemp", noted)
    Pages({"a": 5000}, [tmp_path], "numbers")
    assert not named
    monkeypatch.delattr(os, "O_TMPFILE")
    array(Pages({"a": 5000}, [tmp_path], "numbers"), "a")[:] = 1
    assert named == [tmp_path]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("in_the_kernel", [True, False])
def test_a_copy_stays_as_it_was(in_the_kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.EXDEV, "not on this file system")

    if not in_the_kernel:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    pages = Pages({"a": 5000, "b": 70_000}, [tmp_path], "numbers")
    array(pages, "a")[:] = 1
    pages.rewrite("b", 0, np.full(70_000, 2, np.uint8).data)
    copy = pages.copy()
    array(pages, "a")[:] = 3
    pages.rewrite("b", 0, np.full(70_000, 4, np.uint8).data)
    assert [int(array(copy, name)[-1]) for name in "ab"] == [1, 2]
    assert [int(array(pages, name)[-1]) for name in "ab"] == [3, 4]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_rests_takes_no_memory(tmp_path: Path) -> None:
    pages = Pages({"a": BIG}, [tmp_path], "numbers")
    before = resident()
    pages.rewrite("a", 0, memoryview(b"\1" * BIG))
    assert resident() - before < BIG // 4  # its pages were not mapped
    pages.bring(["a"])
    assert int(array(pages, "a").sum()) == BIG
    assert resident() - before > BIG // 2
    pages.rest(["a"])
    assert resident() - before < BIG // 4


def test_too_little_space_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"GB free(.|\n)*GB for numbers"):
        Pages({"a": 1 << 50}, [tmp_path], "numbers")


@pytest.mark.parametrize("known", [True, False])
def test_space_is_there_before_memory_is_written_to(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a disk that fills up would end the process by SIGBUS; also where space cannot be had but by writing."""

    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not on this file system")

    if known:
        monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    else:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    taken: list[int] = []
    make_map = mmap.mmap

    def mapped(descriptor: int, size: int) -> mmap.mmap:
        taken.append(os.fstat(descriptor).st_blocks * 512 - size)
        return make_map(descriptor, size)

    monkeypatch.setattr(mmap, "mmap", mapped)
    pages = Pages({"a": BIG + 1}, [tmp_path], "numbers")
    assert len(taken) == 1
    assert taken[0] >= 0
    assert not array(pages, "a").any()
    free = os.statvfs(tmp_path)
    with pytest.raises(UserError, match=r"GB free(.|\n)*GB for numbers"):
        Pages({"a": free.f_bavail * free.f_frsize + (1 << 30)}, [tmp_path], "numbers")
    assert len(taken) == 1
