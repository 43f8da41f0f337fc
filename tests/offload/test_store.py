"""The tile store on real files: what it keeps, what it survives, and what it says when it cannot."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.survivor import content
from tonnage.errors import DiskFailed, UserError
from tonnage.offload.files import PAGE, TileFile
from tonnage.offload.store import MANIFEST, PIECE_BYTES, Shape, TileStore, checksum

SIZE = 3 * PAGE + 100
"""Bytes of a tile: not whole pages."""


def fill(store: TileStore, generation: int, tiles: range) -> None:
    for tile in tiles:
        np.frombuffer(store.fetch(tile), np.uint8)[:] = content(generation, tile, store.shape.tile_bytes)
        store.store(tile)


def takes_direct(directory: Path) -> bool:
    return TileFile(directory / "probe", create_bytes=PAGE).direct


def rewrite(store: TileStore, generation: int, tiles: range) -> None:
    fill(store, generation, tiles)
    store.commit({"step": generation})


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


def test_tiles_come_back_as_they_were_stored(directory: Path) -> None:
    said: list[str] = []
    tiles = range(11)
    store = TileStore.create([directory / "a", directory / "b"], Shape(SIZE, 11, num_buffers=3), said.append)
    assert store.direct == (not said)
    assert all("no direct access" in line for line in said)
    for tile in tiles:
        assert not any(store.fetch(tile))
        store.drop(tile)
    for generation in (1, 2, 3):
        fill(store, generation, tiles)
        assert holds(store, generation, tiles)
        if generation == 2:
            store.commit({"generation": generation})
    counters = store.counters
    assert counters.bytes_written == 3 * 11 * 4 * PAGE
    assert 4 * 11 < counters.bytes_read / (4 * PAGE) <= 5 * 11 + 3
    assert counters.read_seconds > 0
    assert counters.write_seconds > 0
    store.close()
    again = TileStore.open([directory / "a", directory / "b"], Shape(SIZE, 11, num_buffers=2))
    assert again.note == {"generation": 2}
    assert holds(again, 2, tiles)
    again.close()


def test_a_tile_of_many_pieces_in_one_file(tmp_path: Path) -> None:
    size = 2 * PIECE_BYTES + 5 * PAGE
    store = TileStore.create([tmp_path], Shape(size, 2, num_buffers=1))
    fill(store, 1, range(2))
    assert holds(store, 1, range(2))
    (file,) = tmp_path.glob("tiles-*.bin")
    assert file.stat().st_size == store.shape.file_bytes(1) == 2 * 2 * size
    assert file.stat().st_blocks * 512 >= file.stat().st_size
    store.close()


def test_every_order_of_verbs_sees_the_latest_content(tmp_path: Path) -> None:
    chance = random.Random(0)
    store = TileStore.create([tmp_path], Shape(SIZE, 7, num_buffers=4))
    latest, committed, held = dict.fromkeys(range(7), 0), dict.fromkeys(range(7), 0), set[int]()
    for generation in range(1, 400):
        tile = chance.randrange(7)
        verb = chance.choice(("prefetch", "prefetch", "fetch", "give back", "give back", "commit"))
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
        elif verb == "commit" and chance.random() < 0.3:
            store.commit({})
            committed = dict(latest)
    store.commit({})
    committed = dict(latest)
    store.close()
    again = TileStore.open([tmp_path], Shape(SIZE, 7))
    for tile, generation in committed.items():
        want = content(generation, tile, SIZE) if generation else np.zeros(SIZE, np.uint8)
        assert np.array_equal(np.frombuffer(again.fetch(tile), np.uint8), want)
        again.drop(tile)
    again.close()


def test_what_was_not_committed_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    store = TileStore.create([tmp_path], Shape(SIZE, 5))
    fill(store, 1, range(5))
    store.commit({"step": 1})
    fill(store, 2, range(3))
    fill(store, 3, range(5))
    store.flush()
    store.close()
    again = TileStore.open([tmp_path], Shape(SIZE, 5))
    assert holds(again, 1, range(5))
    again.close()


def test_asking_for_more_tiles_than_buffers_is_refused(tmp_path: Path) -> None:
    store = TileStore.create([tmp_path], Shape(SIZE, 5, num_buffers=2))
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

    store = TileStore.create([directory], Shape(SIZE, 3))
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

    store = TileStore.create([tmp_path], Shape(SIZE, 1))
    monkeypatch.setattr(os, "pwritev", cut_write)
    fill(store, 1, range(1))
    store.flush()
    assert offsets == [0, 3 * PAGE]
    assert holds(store, 1, range(1))
    store.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failing_disk_is_named_and_leaves_the_last_commit(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TileStore.create([tmp_path], Shape(SIZE, 5, num_buffers=2))
    fill(store, 1, range(5))
    store.commit({"step": 7})

    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as context:
        context.setattr(os, call, fail)
        with pytest.raises(DiskFailed) as caught:
            rewrite(store, 2, range(5))
    assert "Input/output error" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert ("not touched: {'step': 7}" in str(caught.value)) == (call == "pwritev")
    with pytest.raises(DiskFailed):
        store.prefetch(0)
    store.close()
    again = TileStore.open([tmp_path], Shape(SIZE, 5))
    assert again.note == {"step": 7}
    assert holds(again, 1, range(5))
    again.close()


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    store = TileStore.create([tmp_path], Shape(SIZE, 2))
    fill(store, 1, range(2))
    store.commit({})
    (file,) = tmp_path.glob("tiles-*.bin")
    os.truncate(file, PAGE)
    with pytest.raises(DiskFailed, match="the file ends"):
        store.fetch(1)
    store.close()
    with pytest.raises(UserError, match=f"{PAGE} bytes"):
        TileStore.open([tmp_path], Shape(SIZE, 2))


def test_content_that_changed_on_disk_is_found(tmp_path: Path) -> None:
    store = TileStore.create([tmp_path], Shape(SIZE, 3))
    fill(store, 1, range(3))
    store.commit({})
    store.close()
    (file,) = tmp_path.glob("tiles-*.bin")
    with file.open("r+b") as handle:
        handle.seek(store.shape.slot_bytes + 5000)
        byte = handle.read(1)
        handle.seek(store.shape.slot_bytes + 5000)
        handle.write(bytes([byte[0] ^ 1]))
    again = TileStore.open([tmp_path], Shape(SIZE, 3))
    assert np.array_equal(np.frombuffer(again.fetch(0), np.uint8), content(1, 0, SIZE))
    with pytest.raises(DiskFailed, match="tile 1 at 16384 does not hold what was written"):
        again.fetch(1)
    again.close()


def test_checksum_sees_single_bits_and_misplaced_pages() -> None:
    chance = np.random.default_rng(0)
    for pages in (1, 64, 200):
        data = chance.integers(0, 256, pages * PAGE, dtype=np.uint8)
        before = checksum(memoryview(data.data))
        for place in chance.integers(0, len(data), 50):
            data[place] ^= 1
            assert checksum(memoryview(data.data)) != before
            data[place] ^= 1
        assert checksum(memoryview(data.data)) == before
    data[: 64 * PAGE], data[64 * PAGE : 128 * PAGE] = data[64 * PAGE : 128 * PAGE].copy(), data[: 64 * PAGE].copy()
    assert checksum(memoryview(data.data)) != before


def test_another_shape_or_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no manifest"):
        TileStore.open([tmp_path], Shape(SIZE, 3))
    store = TileStore.create([tmp_path], Shape(SIZE, 3))
    store.commit({})
    store.close()
    with pytest.raises(UserError) as caught:
        TileStore.open([tmp_path], Shape(SIZE, 4))
    assert "'num_tiles': 3" in str(caught.value)
    assert "'num_tiles': 4" in str(caught.value)


def test_too_little_space_is_refused_with_numbers_before_anything_is_written(tmp_path: Path) -> None:
    old = TileStore.create([tmp_path / "a"], Shape(SIZE, 3))
    old.commit({"step": 1})
    old.close()
    before = sorted(path.name for path in (tmp_path / "a").iterdir())
    space = os.statvfs(tmp_path)
    num_tiles = 2 * space.f_bavail * space.f_frsize // SIZE
    with pytest.raises(UserError) as caught:
        TileStore.create([tmp_path / "a", tmp_path / "b"], Shape(SIZE, num_tiles))
    assert "GB free" in str(caught.value)
    assert "in two slots" in str(caught.value)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == before


def test_a_new_store_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    for num_tiles in (3, 4):
        store = TileStore.create([tmp_path], Shape(SIZE, num_tiles))
        fill(store, num_tiles, range(num_tiles))
        store.commit({})
        store.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_store_that_is_not_durable_leaves_nothing_behind(tmp_path: Path) -> None:
    store = TileStore.create([tmp_path], Shape(SIZE, 4, num_buffers=2, durable=False))
    assert store.shape.file_bytes(1) == 4 * store.shape.slot_bytes
    assert list(tmp_path.iterdir()) == []
    for generation in (1, 2):
        fill(store, generation, range(4))
        assert holds(store, generation, range(4))
    with pytest.raises(ValueError, match="not durable"):
        store.commit({})
    store.close()


def test_spare_space_is_asked_for_too(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    with pytest.raises(UserError, match="GB free"):
        TileStore.create([tmp_path], Shape(SIZE, 4), spare_bytes=space.f_bavail * space.f_frsize + 10**9)


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


def test_a_disk_that_fills_stops_with_the_last_commit_intact(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="GB free"):
        TileStore.create([small_disk], Shape(SIZE, 100))

    def cannot(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", cannot)  # so that the space is not reserved
    store = TileStore.create([small_disk], Shape(SIZE, 20))
    fill(store, 1, range(20))
    store.commit({"step": 1})
    (small_disk / "other").write_bytes(b"x" * (600 << 10))
    with pytest.raises(DiskFailed, match="No space left"):
        rewrite(store, 2, range(20))
    store.close()
    again = TileStore.open([small_disk], Shape(SIZE, 20))
    assert again.note == {"step": 1}
    assert holds(again, 1, range(20))
    again.close()


def test_kill_at_any_instant_leaves_a_whole_state(tmp_path: Path) -> None:
    """SIGKILL a process that rewrites and commits without pause; each time the store is what its note says."""
    directories, num_tiles, size = [tmp_path / "a", tmp_path / "b"], 5, 40 * PAGE
    command = [sys.executable, str(Path(__file__).with_name("survivor.py"))]
    command += [os.pathsep.join(map(str, directories)), str(num_tiles), str(size)]
    chance = random.Random(0)
    last = 0
    for _ in range(8):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        first_line = process.stdout.readline()
        assert first_line, process.communicate()[1]
        threading.Event().wait(chance.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        said, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        acknowledged = int((first_line + said).split()[-1])
        store = TileStore.open(directories, Shape(size, num_tiles))
        generation = store.note["generation"]
        assert generation >= acknowledged > last
        assert holds(store, generation, range(num_tiles))
        store.close()
        last = generation
    assert (tmp_path / "a" / MANIFEST).exists()
