"""A content-addressed directory that many processes share: an entry is whole, or it is not there.

An entry is built in a directory of its own beside the others and moved into place, synchronised to disk, in one rename.
A lock per key keeps a second process from doing the same work: it waits, and finds the entry. The lock dies with its
holder, and what a killed holder left behind is removed by the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tonnage.errors import Problem, UserError

VERSION = 2
"""Of the layout and of everything that decides a byte in it: a change of either is a new number."""


def default_directory() -> Path:
    """``$TONNAGE_CACHE``, else ``tonnage`` in the user's cache directory."""
    named = os.environ.get("TONNAGE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tonnage"


def key(value: Any) -> str:
    """Key of plain values: 32 hexadecimal digits."""
    text = json.dumps([VERSION, value], sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def entry(directory: Path, build: Callable[[Path], None]) -> bool:
    """Make sure that an entry is there, building it if need be; returns whether it was built now.

    ``build`` gets a new directory to fill. Raises ``UserError`` when the cache cannot be written, and whatever
    ``build`` raises, in which case nothing stays behind.
    """
    if directory.is_dir():
        return False
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(
            Problem(
                found=f"the data cache cannot be written ({error.strerror}: {directory.parent})",
                needed="a directory with write access",
                change="set TONNAGE_CACHE to one",
            )
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.is_dir():
            return False
        for stale in directory.parent.glob(f".{directory.name}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        building = directory.parent / f".{directory.name}.{os.getpid()}"
        building.mkdir()
        try:
            build(building)
            synchronise(building)
            building.rename(directory)
            _sync(directory.parent)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        return True
    finally:
        os.close(lock)


def synchronise(directory: Path) -> None:
    """Have every file of a tree on disk."""
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remembered_digest(cache: Path, file: str, digest: Callable[[str], str]) -> str:
    """Digest of a file's content, read again only when its size, time of change or inode is another."""
    stat = Path(file).stat()
    stamp = [os.path.realpath(file), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    note = cache / "digests" / key(stamp)
    try:
        return note.read_text(encoding="ascii")
    except OSError:
        pass
    found = digest(file)
    note.parent.mkdir(parents=True, exist_ok=True)
    temporary = note.with_name(f".{note.name}.{os.getpid()}")
    temporary.write_text(found, encoding="ascii")
    temporary.replace(note)
    return found
