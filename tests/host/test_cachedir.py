"""Caches: what others may have written is not read, and what is made is not theirs to write."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from entry import tonnage
from tonnage.data import cache
from tonnage.doctor.cache import HardwareRecord, recall, remember
from tonnage.doctor.hardware import look
from tonnage.errors import UserError
from tonnage.host.cachedir import default_directory, kept, remembered, room_for, say_once, trusted

OTHER = 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.lstat().st_mode) for path in directory.rglob("*")}


def test_what_everybody_may_write_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "it's a cache"
    (root / "machines").mkdir(parents=True)
    (root / "machines" / "one.json").touch()
    assert trusted(root, "machines", "one.json") == root / "machines" / "one.json"
    assert trusted(root, "none", "two.json") == root / "none" / "two.json"
    for path in (root, root / "machines", root / "machines" / "one.json"):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        with pytest.raises(UserError, match="a cache that everybody may write") as caught:
            trusted(root, "machines", "one.json")
        assert caught.value.problems[0].where == str(path)
        assert caught.value.problems[0].change == "set TONNAGE_CACHE (or data.cache) to a new directory of your own"
        path.chmod(mode)


@AS_ROOT
def test_what_belongs_to_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    (root / "machines").mkdir(parents=True)
    for path in (root, root / "machines"):
        os.chown(path, OTHER, OTHER)
        with pytest.raises(UserError, match=f"a cache that belongs to somebody else .*{OTHER}"):
            trusted(root, "machines")
        os.chown(path, 0, 0)
    os.chown(root / "machines", OTHER, OTHER)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)  # whose own it is, below a directory of root's
    assert trusted(root, "machines") == root / "machines"


@AS_ROOT
def test_a_group_shares_what_its_owner_has_opened_to_it(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    (root / "machines").mkdir(parents=True)
    root.chmod(0o2775)
    os.chown(root / "machines", OTHER, OTHER)
    (root / "machines" / "one.json").touch()
    os.chown(root / "machines" / "one.json", OTHER + 1, OTHER)
    assert trusted(root, "machines", "one.json")
    (root / "machines").chmod(0o777)
    with pytest.raises(UserError, match="everybody may write"):
        trusted(root, "machines", "one.json")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "named"))
    assert default_directory() == tmp_path / "named"
    monkeypatch.delenv("TONNAGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "xdg" / "tonnage"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_directory() == tmp_path / "home" / ".cache" / "tonnage"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match=r"without a home directory(.|\n)*set TONNAGE_CACHE"):
        default_directory()


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_what_is_made_is_not_for_others_to_write(tmp_path: Path, mask: int) -> None:
    """Whatever the mask of the process is: a library does not change it."""
    before = os.umask(mask)
    try:

        def build(directory: Path) -> None:
            (directory / "below").mkdir()
            (directory / "below" / "file").touch()

        assert cache.entry(tmp_path / "cache" / "packs" / "key", build)
    finally:
        os.umask(before)
    found = modes(tmp_path / "cache" / "packs")
    assert {name: mode & 0o022 for name, mode in found.items()} == dict.fromkeys(
        ["key", "below", "file", "key.lock"], 0
    )


def test_a_cache_of_a_group_stays_one(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o2775)
    room_for(root / "machines" / "one.json")
    assert stat.S_IMODE((root / "machines").stat().st_mode) == 0o2775
    room_for(tmp_path / "own" / "machines" / "one.json")
    assert stat.S_IMODE((tmp_path / "own" / "machines").stat().st_mode) & 0o022 == 0


def test_that_something_is_not_kept_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    for _ in range(2):
        with kept(tmp_path / "\x1b[31m" / "file", "it is measured again"):
            raise OSError(28, os.strerror(28))
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/\\x1b[31m: cannot be written (No space left on device); it is measured again; "
        "TONNAGE_CACHE names another directory"
    ]


@pytest.mark.parametrize(
    "read",
    [
        lambda cache_: recall(look(), cache_),
        lambda cache_: remember(HardwareRecord(look()), cache_),
        lambda cache_: cache.entry(cache_ / "packs" / "key", lambda directory: None),
        lambda cache_: cache.remembered_digest(cache_, __file__),
    ],
    ids=["recall", "remember", "entry", "digest"],
)
def test_every_part_of_a_cache_is_asked(tmp_path: Path, read: Callable[[Path], object]) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UserError, match="everybody may write"):
        read(tmp_path)
    tmp_path.chmod(0o755)
    read(tmp_path)


def test_commands_refuse_it_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path))
    ended = tonnage("doctor", "--quick")
    assert ended.status == 2
    assert f"error: {tmp_path}: a cache that everybody may write (mode 1777)" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_is_no_directory_is_not_to_be_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in ("/dev/null", str(tmp_path / "file")):
        monkeypatch.setenv("TONNAGE_CACHE", place)
        with pytest.raises(UserError, match=r"no directory(.|\n)*set TONNAGE_CACHE") as caught:
            default_directory()
        assert "chmod" not in str(caught.value)


@dataclass(frozen=True)
class Sum:
    """What is remembered here."""

    total: int


def test_what_follows_from_the_same_is_found_once(tmp_path: Path) -> None:
    found: list[int] = []

    def sum_of(*numbers: int, place: tuple[Path, str, str] | None = (tmp_path / "cache", "sums", "of-")) -> int:
        def find() -> Sum:
            found.append(sum(numbers))
            return Sum(found[-1])

        return remembered(place, numbers, Sum, find, "sums are made again every time").total

    assert [sum_of(1, 2), sum_of(1, 2), sum_of(2, 2), sum_of(1, 2, place=None)] == [3, 3, 4, 3]
    assert found == [3, 4, 3]
    files = sorted((tmp_path / "cache" / "sums").glob("of-*.json"))
    assert len(files) == 2
    for file in files:
        file.write_text('{"total": "three"}')
    assert (sum_of(1, 2), found) == (3, [3, 4, 3, 3])
