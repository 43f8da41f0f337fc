"""A store of tiles on disk: fixed-size pieces of raw bytes, read ahead and written behind.

Three verbs. ``prefetch(tile)`` begins to read a tile and returns at once; ``fetch(tile)`` waits for it and hands out
its buffer, to be changed in place; ``store(tile)`` takes the buffer back, begins to write it and returns at once. A
tile that was never stored is all zeros.

Memory is a ring of buffers in one page-aligned mapping: ``num_buffers`` times the tile, whatever the store holds. A
buffer that is still being written may be the next tile's already: reading it begins when the buffer has been written.

Tiles are dealt in turn to the directories, each of which has one file with all its space reserved. The files have no
name: when the process is gone, however it ended, so is their space.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tonnage.errors import Problem, UserError, user_error
from tonnage.host.arena import arena
from tonnage.offload.files import PAGE, TileFile

PIECE_BYTES = 8 << 20
"""A tile moves in requests of this size, which several threads carry out."""
THREADS = 4
"""That read, and as many that write: each has one request under way, and disks want several."""


@dataclass(frozen=True)
class StoreShape:
    """What a store needs besides directories."""

    tile_bytes: int
    num_tiles: int
    num_buffers: int = 6
    """Tiles in memory at most: being read, in use, being written."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a tile on disk: whole pages."""
        return -(-self.tile_bytes // PAGE) * PAGE

    @property
    def buffer_bytes(self) -> int:
        """Memory of the ring."""
        return self.num_buffers * self.slot_bytes

    def file_bytes(self, num_directories: int) -> int:
        """Bytes reserved in each directory."""
        return -(-self.num_tiles // num_directories) * self.slot_bytes


@dataclass
class Counters:
    """What a store was asked to move since it was made."""

    bytes_read: int = 0
    bytes_written: int = 0
    waited_seconds: float = 0.0
    """Time that callers spent waiting, in ``fetch`` and ``flush``."""


@dataclass(eq=False)
class _Buffer:
    """Room for a tile, and the requests that move its bytes."""

    memory: memoryview
    requests: list[Future[None]] = field(default_factory=list)


class TileStore:
    """Tiles over one or several directories. One thread calls; the store's own threads move bytes."""

    def __init__(
        self,
        directories: Sequence[Path],
        shape: StoreShape,
        log: Callable[[str], None] = lambda message: None,
        *,
        spare_bytes: int = 0,
    ) -> None:
        """Reserve the space. ``spare_bytes`` must stay free besides, in the first directory.

        Raises:
            UserError: not enough space; nothing was changed.
        """
        self.shape, self._files = shape, _make_files(directories, shape, spare_bytes)
        for file in self._files:
            if not file.direct:
                log(f"{file.path.parent}: no direct access on this file system; its tiles go through the page cache")
        whole, size = memoryview(arena(shape.buffer_bytes)), shape.slot_bytes
        self._free = deque(_Buffer(whole[n * size : (n + 1) * size]) for n in range(shape.num_buffers))
        """Given back; the content may be on its way to the disk still."""
        self._here: dict[int, _Buffer] = {}
        """Tiles that are in memory or on their way."""
        self._held: set[int] = set()
        """Those that the caller has."""
        self._writes: dict[int, list[Future[None]]] = {}
        """The requests that wrote a tile last."""
        self._readers = ThreadPoolExecutor(THREADS, "tile-read")
        self._writers = ThreadPoolExecutor(THREADS, "tile-write")
        self.counters = Counters()

    def prefetch(self, tile: int) -> None:
        """Begin to read a tile, if that has not begun and a buffer is free."""
        if tile in self._here or not self._free:
            return
        writes = self._writes.get(tile, [])
        for buffer in self._free:
            if buffer.requests is writes and not all(request.done() for request in writes):
                self._free.remove(buffer)  # which has its content still
                self._here[tile] = buffer
                return
        buffer = self._here[tile] = self._free.popleft()
        earlier = [*buffer.requests, *writes]
        if writes:
            self.counters.bytes_read += self.shape.slot_bytes
            buffer.requests = [
                self._readers.submit(self._read, earlier, buffer.memory[start:stop], tile, start)
                for start, stop in self._pieces()
            ]
        else:
            buffer.requests = [self._readers.submit(_clear, earlier, buffer.memory)]

    def fetch(self, tile: int) -> memoryview:
        """The tile's content (``tile_bytes``), once it is read; may be changed, and must be stored or dropped.

        Raises:
            DiskFailed: a read or write failed, of this or an earlier request.
        """
        if tile in self._held:
            raise ValueError(f"tile {tile} was fetched before and not given back")
        if tile not in self._here and not self._free:  # in the buffer of one that was only prefetched
            waiting = [other for other in self._here if other not in self._held]
            if not waiting:
                raise ValueError(f"tile {tile} was asked for while the caller has all {len(self._here)} buffers")
            self._free.append(self._here.pop(waiting[-1]))
        self.prefetch(tile)
        buffer = self._here[tile]
        self._wait(buffer.requests)
        self._held.add(tile)
        return buffer.memory[: self.shape.tile_bytes]

    def store(self, tile: int) -> None:
        """Take back a fetched tile and begin to write it."""
        buffer = self._taken_back(tile)
        self.counters.bytes_written += self.shape.slot_bytes
        buffer.requests = self._writes[tile] = [
            self._writers.submit(self._write, buffer.memory[start:stop], tile, start) for start, stop in self._pieces()
        ]
        self._free.append(buffer)

    def drop(self, tile: int) -> None:
        """Take back a fetched tile that was not changed."""
        self._free.appendleft(self._taken_back(tile))

    def flush(self) -> None:
        """Wait until every tile stored so far is written (not: durable).

        Raises:
            DiskFailed: one could not be written.
        """
        self._wait(request for writes in self._writes.values() for request in writes)

    def close(self) -> None:
        """Wait for what is under way and close the files. Buffers handed out are no longer valid."""
        self._readers.shutdown()
        self._writers.shutdown()
        for file in self._files:
            file.close()

    def _taken_back(self, tile: int) -> _Buffer:
        if tile not in self._held:
            raise ValueError(f"tile {tile} was not fetched")
        self._held.remove(tile)
        return self._here.pop(tile)

    def _read(self, earlier: Iterable[Future[None]], piece: memoryview, tile: int, start: int) -> None:
        _await(earlier)
        file, offset = self._place(tile)
        file.read(piece, offset + start)

    def _write(self, piece: memoryview, tile: int, start: int) -> None:
        file, offset = self._place(tile)
        file.write(piece, offset + start)

    def _place(self, tile: int) -> tuple[TileFile, int]:
        num_files = len(self._files)
        return self._files[tile % num_files], tile // num_files * self.shape.slot_bytes

    def _pieces(self) -> list[tuple[int, int]]:
        size = self.shape.slot_bytes
        return [(start, min(start + PIECE_BYTES, size)) for start in range(0, size, PIECE_BYTES)]

    def _wait(self, requests: Iterable[Future[None]]) -> None:
        began = time.perf_counter()
        _await(requests)
        self.counters.waited_seconds += time.perf_counter() - began


def _await(requests: Iterable[Future[None]]) -> None:
    """Wait for requests; the failure of one is raised."""
    for request in requests:
        request.result()


def _clear(earlier: Iterable[Future[None]], memory: memoryview) -> None:
    _await(earlier)
    np.frombuffer(memory, np.uint8).fill(0)


def _make_files(directories: Sequence[Path], shape: StoreShape, spare_bytes: int) -> list[TileFile]:
    """A file in each directory, which has no name any more; what a process that was killed left there goes."""
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    _check_space(directories, shape, spare_bytes)
    files: list[TileFile] = []
    for directory in directories:
        for old in directory.glob("tiles-*.bin"):
            old.unlink()
        path = directory / f"tiles-{secrets.token_hex(8)}.bin"
        try:
            files.append(TileFile(path, create_bytes=shape.file_bytes(len(directories))))
        except OSError as error:
            for file in files:
                file.close()
            needed = f"{shape.file_bytes(len(directories)) / 1e9:.2f} GB to reserve"
            observed = error.strerror or str(error)
            raise user_error(where=str(path), found=observed, needed=needed, change="use another directory") from error
        finally:
            path.unlink(missing_ok=True)
    return files


def _check_space(directories: Sequence[Path], shape: StoreShape, spare_bytes: int) -> None:
    """Refuse if the file systems of ``directories`` have too little space, counting that of a store to be replaced."""
    each = shape.file_bytes(len(directories))
    needed: dict[int, int] = {}
    for directory in directories:
        device = directory.stat().st_dev
        replaced = sum(old.stat().st_blocks * 512 for old in directory.glob("tiles-*.bin"))
        spare = spare_bytes if directory is directories[0] else 0
        needed[device] = needed.get(device, 0) + each - replaced + spare
    problems = []
    for device, num_bytes in needed.items():
        on_same_device = [directory for directory in directories if directory.stat().st_dev == device]
        space = os.statvfs(on_same_device[0])
        free = space.f_bavail * space.f_frsize
        if free < num_bytes:
            problems.append(
                Problem(
                    where=", ".join(map(str, on_same_device)),
                    found=f"{free / 1e9:.2f} GB free",
                    needed=f"{num_bytes / 1e9:.2f} GB, for {shape.num_tiles} tiles of {shape.slot_bytes / 1e6:.1f} MB",
                    change=f"free {(num_bytes - free) / 1e9:.2f} GB there, or use other or more directories",
                )
            )
    if problems:
        raise UserError(*problems)
