"""Files are whole or as they were, and nobody else may write them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tonnage.files.writing import close_to_others, made, write_whole


def refuse(*_: object, **__: object) -> None:
    raise OSError(28, os.strerror(28))


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, "é\udc80")
    write_whole(path, b"second")
    assert path.read_bytes() == b"second"
    with pytest.raises(FileExistsError):
        write_whole(path, "x", new=True)
    assert path.read_bytes() == b"second"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        with pytest.raises(OSError, match="No space left") as caught:
            write_whole(path, "third")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "none" / "file", "x")
    assert caught.value.filename == str(tmp_path / "none" / "file")


def test_a_new_file_that_was_not_finished_is_gone(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_whole(tmp_path / "file", 3, new=True)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_goes_with_the_next_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    path, left, living, other = (
        tmp_path / name for name in ("file", ".file.7.tonnage", ".file.8.tonnage", ".file.json.7.tonnage")
    )
    of_others = [tmp_path / ".file.7", tmp_path / ".file.8.tonnages"]
    for name in (left, living, other, *of_others):
        name.write_text("half")
    with living.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_whole(path, "whole")
    assert path.read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == sorted([path, living, other, *of_others])


def test_a_writer_that_is_taken_for_dead_before_it_could_say_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    turns: list[int] = []

    def removed_first(descriptor: int, operation: int) -> None:
        if not turns:
            (tmp_path / f".file.{os.getpid()}.tonnage").unlink()
        turns.append(descriptor)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    write_whole(path, "whole")
    assert path.read_text() == "whole"
    assert len(turns) == 2


def test_of_several_that_write_a_new_file_the_first_has_written_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, "first", new=True)
    monkeypatch.setattr(os.path, "lexists", lambda _: False)  # it comes while the second one writes
    with pytest.raises(FileExistsError) as caught:
        write_whole(path, "second", new=True)
    assert caught.value.filename == str(path)

    def without_links(*_: object) -> None:
        raise OSError(1, os.strerror(1))

    monkeypatch.setattr(os, "link", without_links)
    with pytest.raises(FileExistsError):
        write_whole(path, "third", new=True)
    write_whole(tmp_path / "other", "whole", new=True)
    assert path.read_text() == "first"
    assert (tmp_path / "other").read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "other"]


def test_a_directory_goes_again_if_it_stays_empty(tmp_path: Path) -> None:
    for path, stays in ((tmp_path / "new", False), (tmp_path, True)):
        with pytest.raises(OSError, match="No space left"), made(path):
            refuse()
        assert path.exists() == stays
    with pytest.raises(OSError, match="No space left"), made(tmp_path / "used"):
        fail_after((tmp_path / "used" / "file").touch)
    assert (tmp_path / "used" / "file").exists()


def fail_after(work: Callable[[], None]) -> None:
    work()
    refuse()


def test_the_mask_of_a_program(tmp_path: Path) -> None:
    for before, mode in ((0o000, 0o644), (0o002, 0o644), (0o077, 0o600)):
        mask = os.umask(before)
        try:
            close_to_others()
            (path := tmp_path / f"{before}").touch()
        finally:
            os.umask(mask)
        assert path.stat().st_mode & 0o777 == mode
