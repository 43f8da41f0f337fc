"""A content-addressed directory that many processes share: an entry is whole, or it is not there.

An entry is built in a directory of its own beside the others and moved into place, synchronised to disk, in one rename.
A lock per key keeps a second process from doing the same work: it waits, and finds the entry. The lock dies with its
holder, and what a killed holder left behind is removed by whoever builds the next entry, of any key.

Hosts may share a cache, and some file systems keep locks to the host that took them. So the name of an unfinished
directory says which kernel its builder ran under: one of this kernel is abandoned when its lock can be had, one of
another only if nothing has been written to it for a day as well. If two hosts do build the same entry, the first one
stays.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.errors import refused, user_error
from tonnage.files.writing import CLOSED_TO_OTHERS, sync, take_lock, write_whole
from tonnage.files.writing import synchronise as synchronise
from tonnage.host.cachedir import default_directory as default_directory
from tonnage.host.cachedir import kept, room_for, trusted

VERSION = 5
"""Of the layout and of everything that decides a byte in it: a change of either is a new number."""
ABANDONED_SECONDS = 24 * 3600
WAITING_SECONDS = 0.2
_UNFINISHED = re.compile(r"\.(?P<key>.+)\.(?P<kernel>[0-9a-f]+)\.(?P<process>[0-9]+)")


def key(value: Any) -> str:
    """Key of plain values: 32 hexadecimal digits."""
    text = json.dumps([VERSION, value], sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def entry(directory: Path, build: Callable[[Path], None], waiting: Callable[[], None] | None = None) -> bool:
    """Make sure that an entry is there, building it if need be; returns whether it was built now.

    ``build`` gets a new directory to fill; ``waiting`` is called a few times a second while another process does so.
    Raises ``UserError`` when the cache cannot be written or others may have written it, and whatever ``build`` raises,
    in which case nothing stays behind.
    """
    trusted(directory.parent.parent, directory.parent.name, directory.name)
    if directory.is_dir():
        return False
    with _faults(directory.parent):
        room_for(directory)
    with _locked(directory, waiting):
        if directory.is_dir():
            return False
        _sweep(directory)
        building = _unfinished(directory)
        with _faults(directory.parent):
            try:
                building.mkdir()
                build(building)
                _close_to_others(building)
                synchronise(building)
                return _move(building, directory)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise


def discard(directory: Path, is_bad: Callable[[], bool]) -> None:
    """Remove an entry that ``is_bad`` finds damaged, checked while nobody builds it. Who has its files open keeps
    them."""
    with _locked(directory):
        if directory.is_dir() and is_bad():
            with _faults(directory.parent):
                aside = _unfinished(directory)
                shutil.rmtree(aside, ignore_errors=True)
                directory.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)


def _unfinished(directory: Path) -> Path:
    """Where an entry lies while this process makes it, or removes it."""
    return directory.parent / f".{directory.name}.{_kernel()}.{os.getpid()}"


@contextmanager
def _locked(directory: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of an entry, however long another has it."""
    with _faults(directory.parent):
        lock = _open_lock(directory)
    try:
        while True:
            try:
                operation = fcntl.LOCK_EX if waiting is None else fcntl.LOCK_EX | fcntl.LOCK_NB
                take_lock(lock, directory.parent, operation)
                break
            except BlockingIOError:
                assert waiting is not None
                waiting()
                time.sleep(WAITING_SECONDS)
        yield
    finally:
        os.close(lock)


@contextmanager
def _faults(directory: Path) -> Iterator[None]:
    """Raise errors of the file system on files of the cache as ``UserError``; those on other files pass unchanged."""
    try:
        yield
    except OSError as error:
        named = None if error.filename is None else Path(os.fsdecode(error.filename))
        if named is not None and not (named.is_relative_to(directory.parent) or directory.is_relative_to(named)):
            raise
        summary, change = "the cache could not be written", "set TONNAGE_CACHE (or data.cache) to another directory"
        explained = refused(error, summary, directory, change=change)
        message = f"{summary}: {error.strerror or error}"  # numpy's errors have no number
        raise explained or user_error(message, "a disk that takes it", change, str(directory)) from error


def _open_lock(directory: Path) -> int:
    path = directory.with_suffix(".lock")
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PermissionError:  # somebody else's, in a shared cache: to lock it, reading is enough
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _move(building: Path, directory: Path) -> bool:
    """Put a finished entry in its place; ``False`` if one from a host that does not see our locks is there already."""
    try:
        building.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        shutil.rmtree(building, ignore_errors=True)
        return False
    sync(directory.parent)
    return True


def _sweep(directory: Path) -> None:
    """Remove what killed builders left beside an entry whose lock is held."""
    for path in directory.parent.glob(".*.*.*"):
        match = _UNFINISHED.fullmatch(path.name)
        if match is None or (match["kernel"] != _kernel() and not _is_idle(path)):
            continue
        if match["key"] == directory.name:
            shutil.rmtree(path, ignore_errors=True)
            continue
        lock = _open_lock(directory.with_name(match["key"]))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its builder is alive
        finally:
            os.close(lock)


def _is_idle(path: Path) -> bool:
    try:
        newest = max(file.stat().st_mtime for file in (path, *path.rglob("*")))
    except OSError:
        return False  # it has just been moved or removed
    return time.time() - newest > ABANDONED_SECONDS


@cache
def _kernel() -> str:
    """Stands for the running kernel, within which locks are always seen: containers share it, a restart changes it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
    except OSError:
        return f"{uuid.getnode():x}"


def _close_to_others(directory: Path) -> None:
    """Take the right to write from group and others, which processes of other machines may have given."""
    for path in (*directory.rglob("*"), directory):
        if (mode := stat.S_IMODE(path.stat().st_mode)) & CLOSED_TO_OTHERS:
            path.chmod(mode & ~CLOSED_TO_OTHERS)


def remembered_digest(cache: Path, file: str) -> str:
    """Digest of a file's content, read again only when its size, time of change or inode is another."""
    stat = Path(file).stat()
    stamp = [os.path.realpath(file), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    note = trusted(cache, "digests", key(stamp))
    try:
        return note.read_text(encoding="ascii")
    except OSError:
        pass
    with Path(file).open("rb") as opened:
        file_digest = hashlib.file_digest(opened, "blake2b").hexdigest()[:32]
    with kept(note, "files are read once more to know them again"):
        room_for(note)
        write_whole(note, file_digest)
    return file_digest
