"""Arrays whose memory is a file: they rest on disk and come into memory when somebody looks at them.

Most lie in files of their own. What is ``stored`` lies in somebody else's and is only read: no copy of it is made, and
whoever writes into it all the same changes memory, not the file.

The system's page cache moves the bytes, so every use is correct at any time, by anyone: a block's forward pass, a
checkpoint, an evaluation, a loader that fills them. What is said here besides is only about speed and about how much
memory stays taken: ``prefetch`` begins to read before a use, ``bring`` waits for that, ``rest`` gives memory back after
it and begins to write what has changed. ``rewrite`` changes an array without mapping its pages, which would cost a
fault for each. Memory that nobody else wants goes on serving as a cache.

Files of their own have no name and vanish with the process: what a run goes on from is a checkpoint.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tonnage.errors import DiskFailed, user_error
from tonnage.offload.files import PAGE, REFUSED, reserve

_POPULATE_READ = 22
"""``MADV_POPULATE_READ``: bring pages in and wait for them (Linux 5.14)."""
_START_WRITING = 2
"""``SYNC_FILE_RANGE_WRITE``."""


@dataclass(frozen=True)
class FileRange:
    file: Path
    start: int
    num_bytes: int


@dataclass(frozen=True)
class _File:
    descriptor: int
    memory: mmap.mmap
    """All of it, mapped."""
    directory: Path | None = None
    """Where it is, if it is not somebody else's."""


@dataclass(frozen=True)
class _Place:
    file: _File
    start: int
    num_bytes: int

    @property
    def whole_pages(self) -> tuple[int, int]:
        """Start and size of what the bytes touch."""
        start = self.start // PAGE * PAGE
        return start, self.start + self.num_bytes - start


class _Reading:
    """What is being read, or was."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, "page-read")
        self._coming: dict[str, Future[None]] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, read: Callable[[str], None]) -> Future[None]:
        """Begin to ``read`` an array, if nobody has begun since it was forgotten."""
        with self._lock:
            if name not in self._coming:
                self._coming[name] = self._reader.submit(read, name)
            return self._coming[name]

    def forget(self, name: str) -> None:
        """Wait for an array that is being read: what is dropped meanwhile would come in again."""
        with self._lock:
            coming = self._coming.pop(name, None)
        if coming is not None:
            coming.result()


class Pages:
    """Named arrays over files, one in each of ``directories``, filled evenly, which are zero at first; and those that
    are ``stored`` in other files.

    Several threads may call: one that updates a block while another reads the next one ahead.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        directories: Sequence[Path],
        contents: str,
        stored: Mapping[str, FileRange] = MappingProxyType({}),
    ) -> None:
        """Reserve the space: ``sizes`` are bytes, at least one. ``contents`` says what the arrays hold, for messages.

        Raises:
            UserError: not enough space.
        """
        self._sizes, self._directories, self.contents = dict(sizes), list(directories), contents
        self.stored = stored
        """Arrays that have their content already."""
        self._parts: dict[str, _Place] = {}
        self._part_bytes: dict[str, int] = {}
        self.others: Sequence[Pages] = ()
        """Those that this one is ``joined`` of."""
        ends, numbers, starts = [0] * len(directories), dict[str, int](), dict[str, int]()
        for name, size in sizes.items():
            numbers[name] = ends.index(min(ends))
            starts[name] = ends[numbers[name]]
            ends[numbers[name]] += -(-size // PAGE) * PAGE
        self.num_bytes = sum(ends)
        """Reserved on disk."""
        descriptors = [_reserved(path, max(PAGE, end), contents) for path, end in zip(directories, ends, strict=True)]
        weakref.finalize(self, _close, descriptors)
        self.own = [
            _File(descriptor, mmap.mmap(descriptor, max(PAGE, end)), directory)
            for descriptor, end, directory in zip(descriptors, ends, directories, strict=True)
        ]
        self.places = {name: _Place(self.own[numbers[name]], starts[name], size) for name, size in sizes.items()}
        others: dict[Path, _File] = {}
        for path in {place.file for place in stored.values()}:
            descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            both = mmap.PROT_READ | mmap.PROT_WRITE
            others[path] = _File(descriptors[-1], mmap.mmap(descriptors[-1], 0, flags=mmap.MAP_PRIVATE, prot=both))
        self.places |= {name: _Place(others[one.file], one.start, one.num_bytes) for name, one in stored.items()}
        self.reading = _Reading()
        self.waited_seconds = 0.0
        """Time spent in ``bring``."""

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    @property
    def stored_bytes(self) -> int:
        """Of what is stored."""
        return sum(place.num_bytes for place in self.stored.values())

    def memory(self, name: str) -> memoryview:
        """The bytes of an array, mapped."""
        place = self.places[name]
        return memoryview(place.file.memory)[place.start : place.start + place.num_bytes]

    def divide(self, name: str, part_bytes: int) -> None:
        """Let an array come and go in parts of so many bytes, which ``ahead`` names."""
        place, self._part_bytes[name] = self.places[name], part_bytes
        for number, first in enumerate(range(0, place.num_bytes, part_bytes)):
            size = min(part_bytes, place.num_bytes - first)
            self._parts[_part(name, number)] = _Place(place.file, place.start + first, size)

    def ahead(self, names: Sequence[str], first: int = 0) -> list[str]:
        """The names to give ``prefetch``, ``bring`` and ``rest`` where ``names`` are needed one after another, the
        first from byte ``first`` on. If the first is divided: its part that is needed, and the next part; else, of
        others that are divided, their first part."""
        if names and (part_bytes := self._part_bytes.get(names[0])) is not None:
            number = first // part_bytes
            return [part for index in (number, number + 1) if (part := _part(names[0], index)) in self._parts]
        return [_part(name, 0) if name in self._part_bytes else name for name in names]

    def prefetch(self, names: Collection[str]) -> None:
        """Begin to read arrays, or parts of them; returns at once."""
        for name in names:
            self._begin(name)

    def bring(self, names: Collection[str]) -> float:
        """Wait until arrays, or parts of them, are in memory; the seconds that took."""
        began = time.perf_counter()
        for coming in [self._begin(name) for name in names]:
            coming.result()
        waited = time.perf_counter() - began
        self.waited_seconds += waited
        return waited

    def rest(self, names: Collection[str]) -> None:
        """Give back the memory of arrays, and of what shares a page with them, and begin to write what was changed in
        them."""
        for name in names:
            self.reading.forget(name)
            place = self._place(name)
            start, size = place.whole_pages
            place.file.memory.madvise(mmap.MADV_DONTNEED, start, size)
            if place.file.directory is not None:
                _start_writing(place.file.descriptor, start, size)

    def turn(self, in_memory: Collection[str], coming: Sequence[str]) -> list[str]:
        """Bring the first of ``coming`` into memory, begin to read the others, and let the rest of what is
        ``in_memory`` go. Returns what is in memory now."""
        self.rest([name for name in in_memory if name not in coming])
        self.prefetch(coming)
        if coming:
            self.bring(coming[:1])
        return list(coming)

    def rewrite(self, name: str, first: int, content: memoryview) -> None:
        """Change the bytes of an array from ``first`` on to ``content``.

        Raises:
            DiskFailed: the disk did not take it.
        """
        place = self.places[name]
        remaining, offset = content.cast("B"), place.start + first
        try:
            while remaining:
                moved = os.pwrite(place.file.descriptor, remaining, offset)
                remaining, offset = remaining[moved:], offset + moved
        except OSError as error:
            where = place.file.directory
            raise DiskFailed(f"{where}: could not write {name} ({self.contents}): {error.strerror}") from error

    def copy(self) -> Pages:
        """The same arrays, but for what is stored, as they are now; a file system that can share blocks does.

        Raises:
            UserError: not enough space.
        """
        if (whole := joined([other.copy() for other in self.others])) is not None:
            return whole
        twin = Pages(self._sizes, self._directories, f"a copy of {self.contents}")
        for source, target in zip(self.own, twin.own, strict=True):
            _copy_file(source.descriptor, target.descriptor, len(source.memory))
        return twin

    def _begin(self, name: str) -> Future[None]:
        return self.reading.begin(name, self._read)

    def _place(self, name: str) -> _Place:
        return self._parts.get(name) or self.places[name]

    def _read(self, name: str) -> None:
        place = self._place(name)
        start, size = place.whole_pages
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(place.file.descriptor, start, size, os.POSIX_FADV_WILLNEED)
        mapped = memoryview(place.file.memory)[start : start + size]
        bring_in(np.frombuffer(mapped, np.uint8).ctypes.data, size)


def joined(several: Sequence[Pages]) -> Pages | None:
    """All arrays of ``several`` as those of one; None if there are none. No array has the name of another's, and none
    is divided. What one of them is told to read, or has read, all know."""
    if len(several) < 2:
        return next(iter(several), None)
    whole = Pages({}, [], several[0].contents)
    whole.others = several
    for other in several:
        whole.places |= other.places
        whole.stored = {**whole.stored, **other.stored}
        other.reading = whole.reading
    return whole


def _part(name: str, number: int) -> str:
    """The name of a part of an array; no parameter has one like it."""
    return f"{name}[{number}]"


def _reserved(directory: Path, size: int, contents: str) -> int:
    """A new file without a name in ``directory``: its descriptor. Its space is reserved now, because a mapped file that
    finds the disk full ends the process."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = _unnamed(directory)
    try:
        reserve(descriptor, size, mapped=True)
    except OSError as error:
        os.close(descriptor)
        space = os.statvfs(directory)
        raise user_error(
            where=str(directory),
            found=f"{space.f_bavail * space.f_frsize / 1e9:.2f} GB free ({error.strerror})",
            needed=f"{size / 1e9:.2f} GB for {contents}",
            change="free some space, or set memory.offload_dirs to other directories",
        ) from error
    return descriptor


def _unnamed(directory: Path) -> int:
    """A new file that never had a name, so that nothing of it stays whenever this process is killed.

    Where file systems know no such thing it has one for a moment.
    """
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    descriptor, path = tempfile.mkstemp(prefix="pages-", dir=directory)
    Path(path).unlink()
    return descriptor


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _copy_file(source: int, target: int, size: int) -> None:
    done, in_the_kernel = 0, hasattr(os, "copy_file_range")
    while done < size:
        try:
            if in_the_kernel:
                moved = os.copy_file_range(source, target, min(size - done, 1 << 30), done, done)
            else:
                moved = os.pwrite(target, os.pread(source, min(size - done, 16 << 20), done), done)
        except OSError as error:
            if not in_the_kernel or error.errno not in REFUSED:
                raise DiskFailed(f"a copy ended after {done} of {size} bytes: {error.strerror}") from error
            in_the_kernel = False
            continue
        if not moved:
            raise DiskFailed(f"a copy ended after {done} of {size} bytes")
        done += moved


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def bring_in(address: int, size: int) -> None:
    """Wait until mapped pages are in memory. Where this is not known they come when they are used."""
    if sys.platform == "linux":
        _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(_POPULATE_READ))


def _start_writing(descriptor: int, start: int, size: int) -> None:
    """Begin to write what was changed. Where this is not known the system does it in its own time."""
    if (function := getattr(_libc(), "sync_file_range", None)) is not None:
        function(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(_START_WRITING))
