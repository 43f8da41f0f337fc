"""Arrays that lie in files of somebody else's, and are only read: no copy of them is made, and nothing is written.

As ``pages``: the system's page cache moves the bytes, and what is said here is only about speed and about how much
memory stays taken. A file is mapped privately, so whoever writes into an array all the same changes memory, not the
file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tonnage.offload.files import PAGE
from tonnage.offload.pages import bring_in


@dataclass(frozen=True)
class Place:
    """Bytes of a file."""

    file: Path
    start: int
    num_bytes: int


class Mapped(Collection[str]):
    """Named arrays at ``places`` in files, each of at least one byte."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = dict(places)
        self._maps: dict[Path, mmap.mmap] = {}
        for file in {place.file for place in places.values()}:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._maps[file] = mmap.mmap(
                    descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
            finally:
                os.close(descriptor)
        self._reader = ThreadPoolExecutor(1, "mapped-read")
        self._coming: dict[str, Future[None]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        return sum(place.num_bytes for place in self._places.values())

    def memory(self, name: str) -> memoryview:
        """The bytes of an array."""
        place = self._places[name]
        return memoryview(self._maps[place.file])[place.start : place.start + place.num_bytes]

    def prefetch(self, names: Collection[str]) -> None:
        """Begin to read arrays; returns at once."""
        for name in names:
            self._begin(name)

    def bring(self, names: Collection[str]) -> None:
        """Wait until arrays are in memory."""
        for coming in [self._begin(name) for name in names]:
            coming.result()

    def rest(self, names: Collection[str]) -> None:
        """Give back the memory of arrays, and of whatever shares their first and last page."""
        for name in names:
            coming = self._coming.pop(name, None)
            if coming is not None:
                coming.result()  # what is dropped while it is being read would come in again
            start, size = self._whole_pages(name)
            self._maps[self._places[name].file].madvise(mmap.MADV_DONTNEED, start, size)

    def _begin(self, name: str) -> Future[None]:
        if name not in self._coming:
            self._coming[name] = self._reader.submit(self._read, name)
        return self._coming[name]

    def _read(self, name: str) -> None:
        start, size = self._whole_pages(name)
        mapped = self._maps[self._places[name].file]
        mapped.madvise(mmap.MADV_WILLNEED, start, size)
        address = np.frombuffer(memoryview(mapped)[start : start + 1], np.uint8).ctypes.data
        bring_in(address, size)

    def _whole_pages(self, name: str) -> tuple[int, int]:
        """Start and size of the pages that an array touches."""
        place = self._places[name]
        start = place.start // PAGE * PAGE
        return start, min(len(self._maps[place.file]), place.start + place.num_bytes) - start
