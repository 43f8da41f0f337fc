"""The tile store on real files: what it keeps, and what it says when it cannot."""

from __future__ import annotations

import errno
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tonnage.errors import DiskFailed, UserError
from tonnage.offload.files import PAGE, TileFile
from tonnage.offload.store import PIECE_BYTES, StoreShape, TileStore

SIZE = 3 * PAGE + 100
"""Bytes of a tile: not whole pages."""


def content(generation: int, tile: int, size: int) -> np.ndarray:
    return np.random.default_rng((generation, tile)).integers(0, 256, size, dtype=np.uint8)


def fill(store: TileStore, generation: int, tiles: range) -> None:
    for tile in tiles:
        np.frombuffer(store.fetch(tile), np.uint8)[:] = content(generation, tile, store.shape.tile_bytes)
        store.store(tile)


def takes_direct(directory: Path) -> bool:
    return TileFile(directory / "probe", create_bytes=PAGE).direct


def holds(store: TileStore, generation: int, tiles: range) -> bool:
    same = True
    for tile in tiles:
        store.prefetch((tile + 1) % store.shape.num_tiles)
        got = np.frombuffer(store.fetch(tile), np.uint8)
        same &= np.array_equal(got, content(generation, tile, store.shape.tile_bytes))
        store.drop(tile)
    return same


@pytest.fixture(params=["direct", "cached"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on a file system that takes direct access, and one on which it is refused."""
    if request.param == "cached":
        real = os.open

        def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
            if flags & getattr(os, "O_DIRECT", 0):
                raise OSError(errno.EINVAL, "Invalid argument", str(path))
            return real(path, flags, mode)

        monkeypatch.setattr(os, "open", refuse)
    elif not takes_direct(tmp_path):
        pytest.skip("this file system takes no direct access")
    return tmp_path


def test_tiles_come_back_as_they_were_stored(directory: Path, request: pytest.FixtureRequest) -> None:
    said: list[str] = []
    tiles = range(11)
    store = TileStore([directory / "a", directory / "b"], StoreShape(SIZE, 11, num_buffers=3), said.append)
    assert len(said) == (2 if "cached" in request.node.name else 0)
    assert all("no direct access" in line for line in said)
    for tile in tiles:
        assert not any(store.fetch(tile))
        store.drop(tile)
    for generation in (1, 2, 3):
        fill(store, generation, tiles)
        assert holds(store, generation, tiles)
    counters = store.counters
    assert counters.bytes_written == 3 * 11 * 4 * PAGE
    assert 4 * 11 < counters.bytes_read / (4 * PAGE) <= 5 * 11 + 3
    store.close()


def test_a_tile_of_many_pieces_in_one_file(tmp_path: Path) -> None:
    store = TileStore([tmp_path], StoreShape(2 * PIECE_BYTES + 5 * PAGE, 2, num_buffers=1))
    fill(store, 1, range(2))
    assert holds(store, 1, range(2))
    store.close()


def test_every_order_of_verbs_sees_the_latest_content(tmp_path: Path) -> None:
    chance = random.Random(0)
    store = TileStore([tmp_path], StoreShape(SIZE, 7, num_buffers=4))
    latest, held = dict.fromkeys(range(7), 0), set[int]()
    for generation in range(1, 400):
        tile = chance.randrange(7)
        verb = chance.choice(("prefetch", "prefetch", "fetch", "give back", "give back"))
        if verb == "prefetch":
            store.prefetch(tile)
        elif verb == "fetch" and tile not in held and len(held) < 3:
            got = np.frombuffer(store.fetch(tile), np.uint8)
            want = content(latest[tile], tile, SIZE) if latest[tile] else np.zeros(SIZE, np.uint8)
            assert np.array_equal(got, want)
            held.add(tile)
            if chance.random() < 0.7:
                got[:] = content(generation, tile, SIZE)
                latest[tile] = generation
                store.store(tile)
                held.remove(tile)
        elif verb == "give back" and held:
            tile = held.pop()
            store.drop(tile)
    store.close()


def test_asking_for_more_tiles_than_buffers_is_refused(tmp_path: Path) -> None:
    store = TileStore([tmp_path], StoreShape(SIZE, 5, num_buffers=2))
    store.fetch(0)
    with pytest.raises(ValueError, match="not given back"):
        store.fetch(0)
    for tile in range(5):
        store.prefetch(tile)
    store.fetch(4)  # in the buffer of one that was only prefetched
    with pytest.raises(ValueError, match="all 2 buffers"):
        store.fetch(1)
    with pytest.raises(ValueError, match="not fetched"):
        store.store(2)
    store.close()


def test_short_reads_and_writes_are_carried_on_with(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    read, write = os.preadv, os.pwritev

    def cut_read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        return read(descriptor, [buffers[0][:PAGE]], offset)

    def cut_write(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return write(descriptor, [buffers[0][:PAGE]], offset)

    store = TileStore([directory], StoreShape(SIZE, 3))
    monkeypatch.setattr(os, "preadv", cut_read)
    monkeypatch.setattr(os, "pwritev", cut_write)
    fill(store, 1, range(3))
    store.flush()
    assert holds(store, 1, range(3))
    assert calls >= 4
    store.close()


def test_a_direct_transfer_cut_inside_a_page_starts_again_at_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not takes_direct(tmp_path):
        pytest.skip("this file system takes no direct access")
    write, offsets = os.pwritev, []

    def cut_write(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        moved = write(descriptor, buffers, offset)
        return moved - 1000 if len(offsets) == 1 else moved

    store = TileStore([tmp_path], StoreShape(SIZE, 1))
    monkeypatch.setattr(os, "pwritev", cut_write)
    fill(store, 1, range(1))
    store.flush()
    assert offsets == [0, 3 * PAGE]
    assert holds(store, 1, range(1))
    store.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failing_disk_is_named(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TileStore([tmp_path], StoreShape(SIZE, 5, num_buffers=2))
    fill(store, 1, range(5))
    store.flush()

    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(DiskFailed) as caught:
        fill(store, 2, range(5))
    assert "Input/output error" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    if call == "pwritev":
        with pytest.raises(DiskFailed):
            store.flush()
    store.close()


def test_a_write_that_failed_is_told_by_the_tile_itself_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TileStore([tmp_path], StoreShape(SIZE, 3, num_buffers=3))

    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", fail)
    fill(store, 1, range(1))
    with pytest.raises(DiskFailed):
        store.fetch(0)
    store.close()


def test_a_file_that_ends_too_early_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TileStore([tmp_path], StoreShape(SIZE, 2))
    fill(store, 1, range(2))
    store.flush()
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: 0)
    with pytest.raises(DiskFailed, match="the file ends"):
        store.fetch(1)
    store.close()


def test_too_little_space_is_refused_with_numbers_before_anything_is_written(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    num_tiles = 2 * space.f_bavail * space.f_frsize // SIZE
    with pytest.raises(UserError, match="GB free"):
        TileStore([tmp_path / "a", tmp_path / "b"], StoreShape(SIZE, num_tiles))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_nothing_is_left_behind_and_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    (tmp_path / "tiles-old.bin").write_bytes(b"x")
    store = TileStore([tmp_path], StoreShape(SIZE, 4, num_buffers=2))
    assert store.shape.file_bytes(1) == 4 * store.shape.slot_bytes
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_spare_space_is_asked_for_too(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    with pytest.raises(UserError, match="GB free"):
        TileStore([tmp_path], StoreShape(SIZE, 4), spare_bytes=space.f_bavail * space.f_frsize + 10**9)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system: {error}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_fills_stops_the_store(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="GB free"):
        TileStore([small_disk], StoreShape(SIZE, 100))

    def cannot(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", cannot)  # so that the space is not reserved
    store = TileStore([small_disk], StoreShape(SIZE, 20))
    (small_disk / "other").write_bytes(b"x" * (900 << 10))
    with pytest.raises(DiskFailed, match="No space left"):
        fill(store, 1, range(20))
    store.close()
