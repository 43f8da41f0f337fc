"""Files past the page cache: one of tiles, read and written anywhere, and one written once from front to end.

With ``O_DIRECT`` the disk and the buffer exchange pages without a copy and without pushing anything out of the system's
cache. Buffers, offsets and sizes must then be multiples of ``PAGE``. File systems that refuse it (some network and
overlay ones) are found out by a probe that really writes and reads; there the cache is used and told to forget.

The calls are ``os.preadv`` and ``os.pwritev``, which let other threads run meanwhile, so a few threads reach the speed
of the disk and there is nothing to compile. They may move less than was asked; that is carried on with here.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path

from tonnage.errors import DiskFailed
from tonnage.host.arena import arena

PAGE = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)
"""What a file system says that cannot do a thing."""
STREAM_BYTES = 16 << 20
"""``NewFile`` writes in requests of this size."""


class NewFile:
    """A new file, written from front to end past the page cache, so that it takes little time of a processor.

    What is put goes through one page-aligned buffer. A file system that refuses direct transfers, or takes only a part
    of one, gets the rest through the cache.
    """

    def __init__(self, path: Path) -> None:
        """Make the file.

        Raises:
            OSError: it is there already, or cannot be made.
        """
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        self._buffer = memoryview(arena(STREAM_BYTES))
        self._filled = 0
        self._direct = self._set_direct(True)

    def put(self, data: memoryview) -> None:
        """Write ``data`` (bytes) next.

        Raises:
            OSError: the disk is full, or fails.
        """
        while data:
            taken = data[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            data = data[len(taken) :]
            if self._filled == len(self._buffer):
                self._flush()

    def finish(self) -> None:
        """Write what is left, wait until all is on the disk, and close. Raises as ``put``."""
        if self._direct and self._filled % PAGE:
            self._direct = self._set_direct(False)
        self._flush()
        os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        self._closing()

    def _flush(self) -> None:
        rest, self._filled = self._buffer[: self._filled], 0
        while rest:
            try:
                moved = os.write(self._descriptor, rest)
            except OSError as error:
                if not (self._direct and error.errno in REFUSED):
                    raise
                moved = 0
            rest = rest[moved:]
            if rest and self._direct:
                self._direct = self._set_direct(False)

    def _set_direct(self, enabled: bool) -> bool:
        """Turn direct transfers on or off; whether they are on now."""
        if not _DIRECT:
            return False
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | _DIRECT if enabled else flags & ~_DIRECT)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            return False
        return enabled


class TileFile:
    """An open file of a fixed size. Reads and writes may come from several threads at once."""

    def __init__(self, path: Path, *, create_bytes: int | None = None) -> None:
        """Open ``path``; with ``create_bytes`` (at least a page), make it new, with all its space reserved.

        Raises:
            OSError: it is not there, or its space cannot be reserved.
        """
        self.path = path
        if create_bytes is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                reserve(descriptor, create_bytes)
            finally:
                os.close(descriptor)
        self.direct = _takes_direct(path, write=create_bytes is not None)
        """Whether transfers go past the page cache."""
        self._descriptor = os.open(path, os.O_RDWR | (_DIRECT if self.direct else 0))
        self._closing = weakref.finalize(self, os.close, self._descriptor)

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` on.

        Raises:
            DiskFailed: an error of the disk, or the file ends too early.
        """
        done = 0
        while done < len(buffer):
            try:
                moved = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise self._failure("read", len(buffer), offset, error.strerror) from error
            if moved == 0:
                raise self._failure("read", len(buffer), offset, f"the file ends after {done} of them")
            done = self._aligned(done, moved)
        self._forget(offset, len(buffer))

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write ``buffer`` at ``offset``.

        Raises:
            DiskFailed: an error of the disk, or no space.
        """
        done = 0
        while done < len(buffer):
            try:
                moved = os.pwritev(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise self._failure("write", len(buffer), offset, error.strerror) from error
            if moved == 0:
                raise self._failure("write", len(buffer), offset, f"the disk took {done} of them and no more")
            done = self._aligned(done, moved)
        self._forget(offset, len(buffer))

    def _aligned(self, done: int, moved: int) -> int:
        """Where to carry on. Direct transfers start on a page: one cut off inside a page repeats what it has of it."""
        if not self.direct:
            return done + moved
        on_page = (done + moved) // PAGE * PAGE
        return on_page if on_page > done else done + moved

    def _forget(self, offset: int, size: int) -> None:
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_DONTNEED)

    def _failure(self, verb: str, size: int, offset: int, why: str | None) -> DiskFailed:
        return DiskFailed(f"{self.path}: could not {verb} {size} bytes at {offset}: {why}")

    def sync(self) -> None:
        """Wait until all that was written would survive a loss of power.

        Raises:
            DiskFailed: the disk could not keep what it had taken.
        """
        try:
            (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(self._descriptor)
        except OSError as error:
            raise DiskFailed(f"{self.path}: could not be forced to disk: {error.strerror}") from error

    def close(self) -> None:
        self._closing()


def reserve(descriptor: int, size: int, *, mapped: bool = False) -> None:
    """Give a new file its size, and the space for it now, where the file system can.

    So a disk that fills later does not stop the run. A process that writes into the memory of a ``mapped`` file would
    be ended by a signal then, so such a file is written full of zeros where its space cannot be had otherwise.

    Raises:
        OSError: not enough space.
    """
    if not _allocate(descriptor, size) and mapped:
        space = os.fstatvfs(descriptor)
        if space.f_bavail * space.f_frsize < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        zeros = memoryview(bytes(min(size, STREAM_BYTES)))
        done = 0
        while done < size:
            done += os.pwrite(descriptor, zeros[: size - done], done)
    os.ftruncate(descriptor, size)


def _allocate(descriptor: int, size: int) -> bool:
    """Whether the system knows how to give a file its space, and has."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        return False
    return True


def _takes_direct(path: Path, *, write: bool) -> bool:
    """Whether a file can be read past the page cache and, if that may be tried with a page of zeros, written."""
    if not _DIRECT:
        return False
    page = mmap.mmap(-1, PAGE)
    try:
        descriptor = os.open(path, os.O_RDWR | _DIRECT)
        try:
            return (not write or os.pwritev(descriptor, [page], 0) == PAGE) and os.preadv(descriptor, [page], 0) == PAGE
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in REFUSED:
            return False
        raise
