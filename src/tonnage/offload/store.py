"""A store of tiles on disk: fixed-size pieces of raw bytes, read ahead and written behind.

Three verbs. ``prefetch(tile)`` begins to read a tile and returns at once; ``fetch(tile)`` waits for it and hands out
its buffer, to be changed in place; ``store(tile)`` takes the buffer back, begins to write it and returns at once. Every
request completes by itself, nothing ever waits for all others but ``flush`` and ``commit``. A tile that was never
stored is all zeros.

Memory is a ring of buffers in one page-aligned mapping: ``num_buffers`` times the tile, whatever the store holds.
``prefetch`` beyond the ring is remembered and begins when a buffer is free. A tile prefetched while it is still being
written keeps its buffer and is not read again.

On disk, tiles are dealt in turn to the directories, each of which has one file with all its space reserved, in two
slots::

    DIRECTORY/tiles-ID.bin      [slot 0: tile 0, tile D, tile 2D ...][slot 1: tile 0, tile D, ...]
    FIRST DIRECTORY/manifest.json

``commit`` makes a state durable: it waits for the writes, forces them to disk, and replaces the manifest, which says
for each tile which slot is valid and what its checksum is. Until the next commit a tile is stored only in the slot that
the manifest does not name. So whenever the process or the machine dies, the manifest's state is there, whole; ``open``
finds it, and verifies each tile when it is first read.

A store that is not ``durable`` has one slot and no manifest, and its files have no name: when the process is gone,
however it ended, so is their space.
"""

from __future__ import annotations

import enum
import json
import os
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tonnage.errors import DiskFailed, Problem, UserError
from tonnage.host.arena import arena
from tonnage.offload.files import PAGE, TileFile

MANIFEST = "manifest.json"
FORMAT = 1
PIECE_BYTES = 8 << 20
"""A tile moves in requests of this size, which several threads carry out."""


@dataclass(frozen=True)
class Shape:
    """What a store needs besides directories."""

    tile_bytes: int
    num_tiles: int
    num_buffers: int = 6
    """Tiles in memory at most: being read, in use, being written."""
    readers: int = 4
    """Threads that read: each has one request under way, and disks want several."""
    writers: int = 4
    durable: bool = True
    """Whether the store can be committed, for twice the space."""

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
        return (2 if self.durable else 1) * -(-self.num_tiles // num_directories) * self.slot_bytes


@dataclass(frozen=True)
class Counters:
    """What a store has moved since it was opened."""

    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    """Time in which at least one read was under way."""
    write_seconds: float = 0.0
    waited_seconds: float = 0.0
    """Time that callers spent waiting, in ``fetch``, ``flush`` and ``commit``."""


class _Is(enum.Enum):
    ON_DISK = enum.auto()
    QUEUED = enum.auto()
    """To be read, as soon as there is a buffer."""
    READING = enum.auto()
    READY = enum.auto()
    """In its buffer, which nobody has."""
    HELD = enum.auto()
    """The caller has its buffer."""
    WRITING = enum.auto()


@dataclass
class _Tile:
    state: _Is = _Is.ON_DISK
    buffer: int = -1
    """Number of its buffer."""
    pieces: int = 0
    """Requests not completed."""
    keep: bool = False
    """Prefetched while it is being written."""
    slot: int | None = None
    """Where its latest content is; None if it was never stored."""
    checksum: int = 0
    committed: int | None = None
    """The slot that the manifest names."""
    verified: bool = True


class TileStore:
    """Tiles over one or several directories. One thread calls; the store's own threads move bytes."""

    def __init__(
        self,
        files: Sequence[TileFile],
        shape: Shape,
        identity: str,
        note: Mapping[str, Any],
        tiles: Sequence[_Tile],
    ) -> None:
        """Use ``create`` or ``open``."""
        self.shape, self.note = shape, dict(note)
        """``note``: what was said at the last commit."""
        self._files, self._identity, self._tiles = files, identity, tiles
        whole = memoryview(arena(shape.buffer_bytes))
        size = shape.slot_bytes
        self._buffers = [whole[n * size : (n + 1) * size] for n in range(shape.num_buffers)]
        self._free = list(range(shape.num_buffers))
        self._queue: deque[int] = deque()
        self._readers = ThreadPoolExecutor(shape.readers, "tile-read")
        self._writers = ThreadPoolExecutor(shape.writers, "tile-write")
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._reads, self._writes = _Meter(), _Meter()
        self._waited = 0.0

    @staticmethod
    def create(
        directories: Sequence[Path],
        shape: Shape,
        log: Callable[[str], None] = lambda message: None,
        *,
        spare_bytes: int = 0,
    ) -> TileStore:
        """A new store, all zeros, in place of any that was in ``directories``.

        ``spare_bytes`` must stay free besides, in the first directory.

        Raises:
            UserError: not enough space; nothing was changed.
        """
        for directory in directories:
            directory.mkdir(parents=True, exist_ok=True)
        _check_space(directories, shape, spare_bytes)
        (directories[0] / MANIFEST).unlink(missing_ok=True)
        for directory in directories:
            for old in directory.glob("tiles-*.bin"):
                old.unlink()
        identity = secrets.token_hex(8)
        files: list[TileFile] = []
        for directory in directories:
            path = directory / f"tiles-{identity}.bin"
            try:
                files.append(TileFile(path, create_bytes=shape.file_bytes(len(directories))))
            except OSError as error:
                for made in files:
                    made.close()
                for directory in directories:
                    (directory / path.name).unlink(missing_ok=True)
                needed = f"{shape.file_bytes(len(directories)) / 1e9:.2f} GB to reserve"
                problem = Problem(
                    where=str(path), found=error.strerror or str(error), needed=needed, change="use another directory"
                )
                raise UserError(problem) from error
        if not shape.durable:
            for file in files:
                file.path.unlink()
        _say_how(files, log)
        return TileStore(files, shape, identity, {}, [_Tile() for _ in range(shape.num_tiles)])

    @staticmethod
    def open(directories: Sequence[Path], shape: Shape, log: Callable[[str], None] = lambda message: None) -> TileStore:
        """The store that was committed last in ``directories``, given in the same order.

        Raises:
            UserError: there is none, it has another shape, or a file is missing.
        """
        path = directories[0] / MANIFEST
        try:
            manifest = json.loads(path.read_text())
        except FileNotFoundError as error:
            problem = Problem(where=str(path), found="no manifest", needed="a store that was committed")
            raise UserError(problem) from error
        found = {key: manifest.get(key) for key in ("format", "tile_bytes", "num_tiles", "directories")}
        needed = {
            "format": FORMAT,
            "tile_bytes": shape.tile_bytes,
            "num_tiles": shape.num_tiles,
            "directories": len(directories),
        }
        if found != needed:
            raise UserError(Problem(where=str(path), found=f"a store of {found}", needed=f"{needed}"))
        files = []
        for directory in directories:
            name = directory / f"tiles-{manifest['id']}.bin"
            if not name.exists() or name.stat().st_size != shape.file_bytes(len(directories)):
                size = f"{name.stat().st_size} bytes" if name.exists() else "no such file"
                needed_bytes = f"{shape.file_bytes(len(directories))} bytes of tiles"
                raise UserError(Problem(where=str(name), found=size, needed=needed_bytes))
            files.append(TileFile(name))
        tiles = [
            _Tile(slot=slot, committed=slot, checksum=checksum, verified=slot is None)
            for slot, checksum in zip(manifest["slots"], manifest["checksums"], strict=True)
        ]
        _say_how(files, log)
        return TileStore(files, shape, manifest["id"], manifest["note"], tiles)

    # The verbs.

    def prefetch(self, tile: int) -> None:
        """Begin to read a tile, if that has not begun."""
        with self._changed:
            self._raise_failure()
            self._want(tile)
            self._start_reads()

    def fetch(self, tile: int) -> memoryview:
        """The tile's content (``tile_bytes``), once it is read; may be changed, and must be stored or dropped.

        Raises:
            DiskFailed: a read or write failed, of this or an earlier request.
        """
        entry = self._tiles[tile]
        with self._changed:
            if entry.state is _Is.HELD:
                raise ValueError(f"tile {tile} was fetched before and not given back")
            self._want(tile)
            if entry.state is _Is.QUEUED:  # before those that were only prefetched
                self._queue.remove(tile)
                self._queue.appendleft(tile)
            self._start_reads()
            if entry.state is not _Is.READY:
                self._wait(lambda: self._ready(tile))
            self._raise_failure()
            entry.state = _Is.HELD
            return self._buffers[entry.buffer][: self.shape.tile_bytes]

    def store(self, tile: int) -> None:
        """Take back a fetched tile and begin to write it."""
        entry = self._tiles[tile]
        with self._changed:
            self._raise_failure()
            if entry.state is not _Is.HELD:
                raise ValueError(f"tile {tile} was not fetched")
            entry.state = _Is.WRITING
            slot = 0 if entry.committed is None else 1 - entry.committed
            buffer = self._buffers[entry.buffer]
            pieces = self._pieces()
            entry.pieces = len(pieces)
            if self.shape.durable:  # else nobody will ask for it
                entry.pieces += 1
                self._writers.submit(self._run, tile, self._take_checksum, entry, buffer)
            for start, stop in pieces:
                self._writers.submit(self._run, tile, self._write_piece, buffer[start:stop], tile, slot, start)
            entry.slot = slot

    def drop(self, tile: int) -> None:
        """Take back a fetched tile that was not changed."""
        entry = self._tiles[tile]
        with self._changed:
            if entry.state is not _Is.HELD:
                raise ValueError(f"tile {tile} was not fetched")
            self._release(entry)
            self._start_reads()

    def flush(self) -> None:
        """Wait until every tile stored so far is written (not: durable)."""
        with self._changed:
            self._wait(lambda: all(entry.state is not _Is.WRITING for entry in self._tiles))
            self._raise_failure()

    def commit(self, note: Mapping[str, Any]) -> None:
        """Make the present content durable, with a note of what it is; the state committed before is given up.

        Raises:
            DiskFailed: something could not be written; the state committed before is still there.
        """
        if not self.shape.durable:
            raise ValueError("a store that is not durable cannot be committed")
        self.flush()
        began = time.perf_counter()
        for file in self._files:
            file.sync()
        manifest = {
            "format": FORMAT,
            "id": self._identity,
            "tile_bytes": self.shape.tile_bytes,
            "num_tiles": self.shape.num_tiles,
            "directories": len(self._files),
            "note": dict(note),
            "slots": [entry.slot for entry in self._tiles],
            "checksums": [entry.checksum for entry in self._tiles],
        }
        _replace_durably(self._files[0].path.with_name(MANIFEST), json.dumps(manifest))
        self.note = dict(note)
        with self._changed:
            for entry in self._tiles:
                entry.committed = entry.slot
            self._waited += time.perf_counter() - began

    def close(self) -> None:
        """Wait for what is under way and close the files. Buffers handed out are no longer valid."""
        with self._changed:
            self._queue.clear()
        self._readers.shutdown()
        self._writers.shutdown()
        for file in self._files:
            file.close()

    @property
    def counters(self) -> Counters:
        """What was moved so far."""
        with self._changed:
            return Counters(
                self._reads.bytes, self._writes.bytes, self._reads.seconds, self._writes.seconds, self._waited
            )

    @property
    def direct(self) -> bool:
        """Whether every directory is read and written past the page cache."""
        return all(file.direct for file in self._files)

    # What happens to a tile. All of this holds the lock, but for the moving of bytes itself.

    def _want(self, tile: int) -> None:
        entry = self._tiles[tile]
        if entry.state is _Is.ON_DISK:
            entry.state = _Is.QUEUED
            self._queue.append(tile)
        elif entry.state is _Is.WRITING:
            entry.keep = True

    def _start_reads(self) -> None:
        while self._queue and self._free:
            tile = self._queue.popleft()
            entry = self._tiles[tile]
            entry.state, entry.buffer = _Is.READING, self._free.pop()
            buffer = self._buffers[entry.buffer]
            if entry.slot is None:
                entry.pieces = 1
                self._readers.submit(self._run, tile, np.frombuffer(buffer, np.uint8).fill, 0)
                continue
            pieces = self._pieces()
            entry.pieces = len(pieces)
            for start, stop in pieces:
                self._readers.submit(self._run, tile, self._read_piece, buffer[start:stop], tile, entry.slot, start)

    def _ready(self, tile: int) -> bool:
        """Whether a tile can be handed out. Makes room if every buffer rests with a tile that was only prefetched."""
        entry = self._tiles[tile]
        if entry.state is _Is.WRITING:
            entry.keep = True
        moving = any(other.state in (_Is.READING, _Is.WRITING) for other in self._tiles)
        if entry.state is _Is.QUEUED and not moving:
            waiting = [other for other in self._tiles if other.state is _Is.READY]
            if not waiting:
                raise ValueError(f"tile {tile} was asked for while the caller has all {len(self._buffers)} buffers")
            self._release(waiting[-1])
            self._start_reads()
        return entry.state is _Is.READY

    def _release(self, entry: _Tile) -> None:
        self._free.append(entry.buffer)
        entry.state, entry.buffer, entry.keep = _Is.ON_DISK, -1, False

    def _run(self, tile: int, action: Callable[..., None], *arguments: Any) -> None:
        """One request, in a thread of the store. The last of a tile completes it."""
        entry = self._tiles[tile]
        self._attempt(action, *arguments)
        with self._changed:
            entry.pieces -= 1
            if entry.pieces:
                return
        if entry.state is _Is.READING and not entry.verified:
            self._attempt(self._verify, tile)
        with self._changed:
            if entry.state is _Is.READING or entry.keep:
                entry.state, entry.keep = _Is.READY, False
            else:
                self._release(entry)
                self._start_reads()
            self._changed.notify_all()

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Carry out an action, unless something failed before; its failure becomes the store's."""
        if self._failure is not None:
            return
        try:
            action(*arguments)
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _verify(self, tile: int) -> None:
        entry = self._tiles[tile]
        found = checksum(self._buffers[entry.buffer])
        if found != entry.checksum:
            file, offset = self._place(tile, entry.slot or 0)
            raise DiskFailed(
                f"{file.path}: tile {tile} at {offset} does not hold what was written: its checksum is {found:08x}, "
                f"the manifest has {entry.checksum:08x}"
            )
        entry.verified = True

    def _take_checksum(self, entry: _Tile, buffer: memoryview) -> None:
        entry.checksum = checksum(buffer)
        entry.verified = True

    def _read_piece(self, buffer: memoryview, tile: int, slot: int, start: int) -> None:
        file, offset = self._place(tile, slot)
        with self._changed:
            self._reads.begin()
        file.read(buffer, offset + start)
        with self._changed:
            self._reads.end(len(buffer))

    def _write_piece(self, buffer: memoryview, tile: int, slot: int, start: int) -> None:
        file, offset = self._place(tile, slot)
        with self._changed:
            self._writes.begin()
        try:
            file.write(buffer, offset + start)
        except DiskFailed as error:
            raise DiskFailed(f"{error}\n  what was committed last is not touched: {self.note or 'nothing'}") from error
        with self._changed:
            self._writes.end(len(buffer))

    def _place(self, tile: int, slot: int) -> tuple[TileFile, int]:
        """File and offset of a slot of a tile."""
        num_files = len(self._files)
        in_file = -(-self.shape.num_tiles // num_files)
        return self._files[tile % num_files], (slot * in_file + tile // num_files) * self.shape.slot_bytes

    def _pieces(self) -> list[tuple[int, int]]:
        size = self.shape.slot_bytes
        return [(start, min(start + PIECE_BYTES, size)) for start in range(0, size, PIECE_BYTES)]

    def _wait(self, done: Callable[[], bool]) -> None:
        began = time.perf_counter()
        while self._failure is None and not done():
            self._changed.wait()
        self._waited += time.perf_counter() - began

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _Meter:
    """Bytes moved, and the time in which at least one request was under way."""

    def __init__(self) -> None:
        self.bytes, self._busy, self._began, self._under_way = 0, 0.0, 0.0, 0

    def begin(self) -> None:
        if self._under_way == 0:
            self._began = time.perf_counter()
        self._under_way += 1

    def end(self, num_bytes: int) -> None:
        self.bytes += num_bytes
        self._under_way -= 1
        if self._under_way == 0:
            self._busy += time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        return self._busy + (time.perf_counter() - self._began if self._under_way else 0.0)


def checksum(buffer: memoryview) -> int:
    """32 bits that tell lost, torn and misplaced writes; as fast as memory, ten times as fast as a CRC of every byte.

    Words are added up, by their place in a page, over runs of 64 pages; the sums get a CRC. Pages that change places
    within a run go unnoticed. The size of ``buffer`` is a multiple of a page.
    """
    words = np.frombuffer(buffer, np.uint64)
    run = 64 * PAGE // 8
    whole = len(words) // run * run
    sums = words[:whole].reshape(-1, 64, PAGE // 8).sum(axis=1, dtype=np.uint64)
    rest = words[whole:].reshape(-1, PAGE // 8).sum(axis=0, dtype=np.uint64)
    return zlib.crc32(rest.data, zlib.crc32(sums.data))


def _say_how(files: Sequence[TileFile], log: Callable[[str], None]) -> None:
    for file in files:
        if not file.direct:
            log(f"{file.path.parent}: no direct access on this file system; its tiles go through the page cache")


def _check_space(directories: Sequence[Path], shape: Shape, spare_bytes: int) -> None:
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
        there = [directory for directory in directories if directory.stat().st_dev == device]
        space = os.statvfs(there[0])
        free = space.f_bavail * space.f_frsize
        if free < num_bytes:
            problems.append(
                Problem(
                    where=", ".join(map(str, there)),
                    found=f"{free / 1e9:.2f} GB free",
                    needed=f"{num_bytes / 1e9:.2f} GB, for {shape.num_tiles} tiles of {shape.slot_bytes / 1e6:.1f} MB"
                    f"{' in two slots' if shape.durable else ''}",
                    change=f"free {(num_bytes - free) / 1e9:.2f} GB there, or use other or more directories",
                )
            )
    if problems:
        raise UserError(*problems)


def _replace_durably(path: Path, text: str) -> None:
    """Put a file in the place of another so that after a crash at any instant one of them is there, whole."""
    temporary = path.with_name(f".{path.name}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            remaining = memoryview(text.encode())
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise DiskFailed(f"{path}: could not be replaced: {error.strerror}") from error
