"""Small files, whole or not at all; and no file of ours that others may write."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tonnage.errors import ROOM, user_error

CLOSED_TO_OTHERS = 0o022
UNFINISHED = ".tonnage"
"""End of a file's name before it is in its place: nobody else's files are called so."""


def close_to_others() -> None:
    """Let no file or directory that this process and its children make be writable for group and others.

    For the beginning of a program: the mask belongs to the whole process. What the user's own mask takes away besides
    stays taken away.
    """
    os.umask(os.umask(CLOSED_TO_OTHERS) | CLOSED_TO_OTHERS)


@contextmanager
def made(directory: Path) -> Iterator[None]:
    """Make a directory; if what is to be written into it cannot be, and it is new and empty, it goes again."""
    was_there = directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if not was_there:
            with suppress(OSError):
                directory.rmdir()
        raise


def write_whole(path: Path, content: str | bytes, *, new: bool = False) -> None:
    """Write a file so that others see the old one or the new one, never half of one; nothing stays behind on failure.

    It is written beside its place at first. What a killed process has left there is removed by the next that writes
    ``path``. ``new``: it must not be there yet; of several that write it, the first has written it. What is no regular
    file (a link, a device, a pipe) is not replaced by one.

    Raises:
        FileExistsError: with ``new``, it is.
        OSError: it cannot be written; the error names ``path``.
    """
    beside = path.with_name(f".{path.name[:100]}.{os.getpid()}{UNFINISHED}")
    opened = False
    try:
        if new and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            number = errno.EISDIR if path.is_dir() else errno.ENOTSUP
            raise OSError(number, os.strerror(number))
        _sweep(path)
        with os.fdopen(_opened(beside), "wb") as file:
            opened = True
            file.write(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
            file.flush()
            if new:
                _link(beside, path)
                beside.unlink(missing_ok=True)
            else:
                beside.replace(path)
    except BaseException as error:
        if opened:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise


def sync(path: Path) -> None:
    """Have a file or a directory itself on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def synchronise(directory: Path) -> None:
    """Have every file of a tree on disk."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON so that readers see the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=2) + "\n")


def take_lock(descriptor: int, path: Path, operation: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> None:
    """``fcntl.flock`` of a file of ours at ``path``.

    Raises:
        BlockingIOError: another process has the lock.
        UserError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
        raise user_error(
            found=f"a file system without locks ({error.strerror}), which would keep two processes from writing the "
            "same files",
            needed="one that has flock, as disks of this machine do",
            change="name a directory on another one (output=..., data.cache=... or TONNAGE_CACHE), or have this one "
            "mounted with flock",
            where=str(path),
        ) from None


def _opened(beside: Path) -> int:
    """An empty file, locked as long as it is open: so others see that it is being written."""
    while True:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # a file system without locks: there nobody can have the lock of what was left either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # taken for left behind, before it was locked


def _sweep(path: Path) -> None:
    """Remove what is beside ``path``, to be moved there, and nobody writes any more."""
    pattern = re.compile(rf"\.{re.escape(path.name[:100])}\.[0-9]+{re.escape(UNFINISHED)}")
    with suppress(OSError), os.scandir(path.parent) as entries:
        for name in [entry.path for entry in entries if pattern.fullmatch(entry.name)]:
            with suppress(OSError):
                descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    Path(name).unlink()
                finally:
                    os.close(descriptor)


def is_unfinished(path: Path) -> bool:
    """Whether a name is one that a file of ours has before it is in its place."""
    return re.fullmatch(rf"\..+\.[0-9]+{re.escape(UNFINISHED)}", path.name) is not None


def _link(beside: Path, path: Path) -> None:
    """Give a whole file its name, which must be free."""
    try:
        os.link(beside, path)
    except FileExistsError:
        raise
    except OSError as error:  # a file system without links
        if error.errno in ROOM:
            raise
        path.touch(exist_ok=False)
        beside.replace(path)
