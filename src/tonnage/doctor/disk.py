"""How fast the disk under a directory reads, writes, and does both at once.

Two files, one to read and one to write, are moved in large requests past the page cache, as the disk tiers do it
(``offload.files``), by threads that do nothing else. Writing counts until all is on the disk. The files have no name
once they are open, so nothing stays behind, however this ends.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tonnage.doctor.cache import DiskRates
from tonnage.errors import user_error
from tonnage.host.arena import arena
from tonnage.offload.files import TileFile

REQUEST_BYTES = 8 << 20
LEAST_BYTES = 64 << 20
"""Of a file."""
NUM_THREADS = (2, 4)
"""For each file; the faster number counts."""
FILLING_SECONDS = 8.0
"""A disk that cannot write both files in this time is measured on as much as it could."""

Move = Callable[[memoryview, int], None]
Progress = Callable[[str], None]


def disk_rates(directory: Path, num_bytes: int, seconds: float, tell: Progress = lambda _: None) -> DiskRates:
    """Measure with files of ``num_bytes`` together, for ``seconds`` each way besides the time to fill the files.

    Smaller files are used where less than four times as much is free. ``tell`` is told what begins.

    Raises:
        UserError: almost nothing is free, or the directory cannot be written.
        DiskFailed: the disk failed.
    """
    with _files(directory, num_bytes) as (source, target, most):
        tell("disk: filling")
        requests = _fill((source, target), most)
        each = seconds / len(NUM_THREADS)
        ways: dict[str, list[Move]] = {
            "read": [source.read],
            "write": [target.write],
            "mixed": [source.read, target.write],
        }
        rates = {}
        for name, jobs in ways.items():
            tell(f"disk: {name}")
            rates[name] = max(_rate(jobs, number, requests, each, target) for number in NUM_THREADS)
        return DiskRates(**rates, direct=source.direct and target.direct)


@contextmanager
def _files(directory: Path, num_bytes: int) -> Iterator[tuple[TileFile, TileFile, int]]:
    """Two open files without names, and the requests that each has room for."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free = os.statvfs(directory)
        num_bytes = min(num_bytes, free.f_bavail * free.f_frsize // 4)
        if num_bytes < 2 * LEAST_BYTES:
            raise user_error(
                where=str(directory),
                found=f"{free.f_bavail * free.f_frsize / 1e6:.0f} MB free",
                needed=f"{8 * LEAST_BYTES / 1e6:.0f} MB, to measure the disk with",
                change="make room, or measure another with --directory",
            )
        requests = num_bytes // 2 // REQUEST_BYTES
        files = tuple(_unnamed(directory, requests * REQUEST_BYTES) for _ in range(2))
    except OSError as error:
        raise user_error(
            where=str(directory),
            found=f"no file can be made there ({error.strerror})",
            needed="a directory that can be written",
            change="choose another with --directory",
        ) from error
    try:
        yield files[0], files[1], requests
    finally:
        for file in files:
            file.close()


def _unnamed(directory: Path, num_bytes: int) -> TileFile:
    path = directory / f".tonnage-doctor-{uuid.uuid4().hex}"
    try:
        return TileFile(path, create_bytes=num_bytes)
    finally:
        path.unlink(missing_ok=True)


def _fill(files: tuple[TileFile, ...], most: int) -> int:
    """Write files of ``most`` requests, as far as there is time; the requests that each has now.

    Space that was only reserved would be read without the disk.
    """
    buffer, end = _buffer(), time.perf_counter() + FILLING_SECONDS
    filled = 0
    while filled < most and (time.perf_counter() < end or filled * REQUEST_BYTES < LEAST_BYTES):
        for file in files:
            file.write(buffer, filled * REQUEST_BYTES)
        filled += 1
    for file in files:
        file.sync()
    return filled


def _rate(jobs: list[Move], num_threads: int, requests: int, seconds: float, written: TileFile) -> float:
    """Bytes a second that ``num_threads`` threads for each of ``jobs`` move, in ``seconds`` or one request each."""
    moved: list[int] = []
    errors: list[BaseException] = []
    buffers = [_buffer() for _ in range(num_threads * len(jobs))]
    end = time.perf_counter() + seconds

    def work(move: Move, thread: int, buffer: memoryview) -> None:
        number = thread
        try:
            while number == thread or (time.perf_counter() < end and not errors):  # once at least, however late it is
                move(buffer, number % requests * REQUEST_BYTES)
                moved.append(REQUEST_BYTES)
                number += num_threads
        except BaseException as error:
            errors.append(error)

    arguments = [(move, thread) for move in jobs for thread in range(num_threads)]
    began = time.perf_counter()
    threads = [
        threading.Thread(target=work, args=(*argument, buffer))
        for argument, buffer in zip(arguments, buffers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    written.sync()
    return sum(moved) / (time.perf_counter() - began)


@cache
def _noise() -> bytes:
    """What is written: some disks take zeros faster than anything else."""
    return os.urandom(REQUEST_BYTES)


def _buffer() -> memoryview:
    """A page-aligned buffer of random bytes."""
    pages = arena(REQUEST_BYTES)
    pages.write(_noise())
    return memoryview(pages)
