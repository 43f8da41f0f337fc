"""Saving: published last, beside training, one at a time; failures are raised and nothing earlier is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tonnage.checkpoint import resume
from tonnage.checkpoint import save as module
from tonnage.checkpoint.resume import choose, restore
from tonnage.checkpoint.save import (
    COMPLETE,
    Cursor,
    Saver,
    _yield_to_training,
    checkpoint_path,
    complete_checkpoints,
    interrupted_saves,
    publish,
)
from tonnage.checkpoint.verify import listed_files
from tonnage.errors import UserError
from tonnage.files.writing import sync
from tonnage.parallel.world import World, join_world


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


def state(value: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    weights = {"w": torch.full((64, 8), value), "b": torch.full((8,), -value)}
    return weights, {f"{n}.{part}": torch.full_like(w, value + 1) for n, w in weights.items() for part in "mv"}


def restored(path: Path, world: World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer = state(0.0)
    restore(path, model, optimizer, world)
    return model, optimizer


class Gate:
    """Holds the writing of files until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.event = threading.Event()
        write_file = vars(module)["write_file"]

        def held(*arguments: Any) -> Any:
            assert self.event.wait(30)
            return str(write_file(*arguments))

        monkeypatch.setattr(module, "write_file", held)


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saver = Saver(tmp_path, 2, world)
    model, optimizer = state(1.0)
    saver.save(Cursor(5, 40, 5), model, optimizer, {"seed": 3})
    for tensor in (*model.values(), *optimizer.values()):
        tensor.fill_(99.0)  # training goes on
    assert saver.news() == []
    assert complete_checkpoints(tmp_path) == []
    gate.event.set()
    saver.wait()
    (saved,) = saver.news()
    assert saver.news() == []
    assert (saved.step, saved.path) == (5, checkpoint_path(tmp_path, 5))
    assert 0 < saved.blocked_seconds < saved.save_seconds
    assert saved.num_bytes == sum(file.stat().st_size for file in saved.path.iterdir())
    for got, want in zip(restored(saved.path, world), state(1.0), strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert json.loads((saved.path / "state.json").read_text())["seed"] == 3


def test_the_next_save_waits_and_uses_the_same_buffer(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    said: list[str] = []
    saver = Saver(tmp_path, 2, world, log=said.append)
    saver.save(Cursor(1, 8, 1), *state(1.0), {})
    buffer = saver._buffer.data_ptr()
    assert saver._buffer.numel() == 4 * 3 * (64 * 8 + 8)
    threading.Timer(0.2, gate.event.set).start()
    saver.save(Cursor(2, 16, 2), *state(2.0), {})
    saver.wait()
    first, second = saver.news()
    assert second.blocked_seconds > 0 < first.blocked_seconds
    assert any("step 2 waits" in line for line in said)
    assert saver._buffer.data_ptr() == buffer
    for step in (1, 2):
        assert torch.equal(restored(checkpoint_path(tmp_path, step), world)[0]["w"], torch.full((64, 8), float(step)))


def test_what_is_a_copy_already_is_not_copied_again(tmp_path: Path, world: World) -> None:
    saver = Saver(tmp_path, 2, world)
    model, optimizer = state(1.0)
    saver.save(Cursor(1, 8, 1), model, optimizer, {}, copies=[f"optimizer.{name}" for name in optimizer])
    saver.wait()
    assert saver._buffer.numel() == 4 * (64 * 8 + 8)
    for got, want in zip(restored(checkpoint_path(tmp_path, 1), world), state(1.0), strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_save_that_fails_is_raised_and_the_last_one_stays(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(tmp_path, 1, world)
    saver.save(Cursor(1, 8, 1), *state(1.0), {}, wait=True)

    def full(path: Path, *_: Any) -> str:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_file", full)
    saver.save(Cursor(2, 16, 2), *state(2.0), {})
    with pytest.raises(UserError, match=r"step-00000002: (.|\n)*No space left(.|\n)*--resume"):
        saver.wait()
    assert complete_checkpoints(tmp_path) == [checkpoint_path(tmp_path, 1)]
    assert list(checkpoint_path(tmp_path, 2).iterdir()) == []  # what half fitted makes room again
    assert torch.equal(restored(checkpoint_path(tmp_path, 1), world)[0]["w"], torch.full((64, 8), 1.0))


def test_an_old_checkpoint_that_cannot_be_deleted_takes_nothing_with_it(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where a file that another process has open leaves its directory full."""
    messages = list[str]()
    saver = Saver(tmp_path, 1, world, log=messages.append)
    saver.save(Cursor(1, 8, 1), *state(1.0), {}, wait=True)

    def not_empty(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr(shutil, "rmtree", not_empty)
    saver.save(Cursor(2, 16, 2), *state(2.0), {}, wait=True)
    monkeypatch.undo()
    assert [saved.step for saved in saver.news()] == [1, 2]
    assert any("could not be deleted" in message for message in messages)
    (whole,) = complete_checkpoints(tmp_path)
    assert torch.equal(restored(whole, world)[0]["w"], state(2.0)[0]["w"])


def test_ctrl_c_waits_until_a_save_is_whole(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes from the memory that whoever goes on would change."""
    gate = Gate(monkeypatch)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    threading.Timer(0.6, gate.event.set).start()
    with pytest.raises(KeyboardInterrupt):
        Saver(tmp_path, 1, world).save(Cursor(1, 8, 1), *state(1.0), {}, wait=True)
    assert complete_checkpoints(tmp_path)


def test_interrupted_saves_are_ignored_reported_and_removed(tmp_path: Path, world: World) -> None:
    Saver(tmp_path, 9, world).save(Cursor(3, 8, 1), *state(1.0), {}, wait=True)
    broken = checkpoint_path(tmp_path, 4)
    broken.mkdir()
    (broken / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    assert choose(tmp_path) == checkpoint_path(tmp_path, 3)
    assert interrupted_saves(tmp_path) == [broken]
    said: list[str] = []
    saver = Saver(tmp_path, 9, world, log=said.append)
    assert said == ["removing step-00000004, a save that was interrupted"]
    assert not broken.exists()
    saver.save(Cursor(4, 16, 2), *state(2.0), {}, wait=True)
    assert choose(tmp_path) == broken
    with pytest.raises(UserError, match="complete checkpoint is there already"):
        saver.save(Cursor(4, 16, 2), *state(2.0), {}, wait=True)


def test_the_newest_complete_checkpoint_is_never_deleted(tmp_path: Path, world: World) -> None:
    saver = Saver(tmp_path, 0, world)  # a config says at least 1; the room does not rely on it
    for step in (1, 2, 3):
        saver.save(Cursor(step, 8 * step, step), *state(float(step)), {}, wait=True)
        assert complete_checkpoints(tmp_path) == [checkpoint_path(tmp_path, step)]


def test_complete_is_written_after_everything_is_on_disk(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of what reaches the disk, as the kernel is asked for it."""
    order: list[str] = []
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    rename = Path.rename

    def synced(path: Path) -> None:
        order.append(path.name)
        sync(path)

    def renamed(self: Path, target: Path) -> Path:
        order.append(f"-> {target.name}")
        return rename(self, target)

    monkeypatch.setattr(module, "sync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    Saver(tmp_path, 2, world, sync_too=(metrics,)).save(Cursor(1, 8, 1), *state(1.0), {}, wait=True)
    name = "step-00000001"
    assert order == ["state.json", "metrics.jsonl", name, f".{COMPLETE}", f"-> {COMPLETE}", name, tmp_path.name]


def test_files_that_nobody_hashed_are_hashed_when_published(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    publish(tmp_path)
    assert set(json.loads((tmp_path / COMPLETE).read_text())["files"]) == {"a.json"}


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def after_yielding(nice: int) -> int:
    """How nice a thread is that writes for a process which is so nice."""
    found: list[int] = []

    def yield_to_training() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        _yield_to_training()
        found.append(niceness())

    thread = threading.Thread(target=yield_to_training)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_whoever_writes_is_nicer_than_training_however_nice_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    own = niceness()
    wanted = {own: min(own + 5, 19), 12: 17, 17: 19, 19: 19} | ({-5: 0} if os.geteuid() == 0 else {})
    assert {nice: after_yielding(nice) for nice in wanted if os.geteuid() == 0 or nice >= own} == {
        nice: found for nice, found in wanted.items() if os.geteuid() == 0 or nice >= own
    }

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "setpriority", refuse)
    _yield_to_training()


NICE = """
import os, sys
from pathlib import Path
import torch
from tonnage.checkpoint.save import Cursor, Saver, complete_checkpoints
from tonnage.files.writing import sync
from tonnage.parallel.world import join_world
with join_world() as world:
    if os.geteuid() == 0:  # who may do everything
        os.setgroups([])
        os.setuid(65534)
    os.nice(19)
    saver = Saver(Path(sys.argv[1]), 1, world)
    saver.save(Cursor(2, 16, 2), {"w": torch.ones(3)}, {}, {})
    saver.wait()
    print([path.name for path in complete_checkpoints(Path(sys.argv[1]))])
"""


@pytest.mark.matrix
def test_a_user_who_is_as_nice_as_can_be_saves() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        command = [sys.executable, "-c", NICE, folder]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert result.stdout == "['step-00000002']\n"


def test_whoever_waits_for_others_that_read_is_told_that_they_do(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has all files to read, the other none: both say that there is progress, and leave together."""
    saver = Saver(tmp_path, 1, world)
    saver.save(Cursor(1, 8, 1), *state(1.0), {}, wait=True)
    (checkpoint,) = complete_checkpoints(tmp_path)
    monkeypatch.setattr(resume, "TELL_SECONDS", 0.0)
    chunks = 5

    def slowly(file: object, advanced: Callable[[int], None]) -> None:
        for _ in range(chunks):
            time.sleep(0.01)
            advanced(1)

    monkeypatch.setattr(resume, "check_hash", slowly)
    files = listed_files(checkpoint)
    border, sums, progress = threading.Barrier(2, timeout=20), dict[int, float](), Counter[int]()

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank, self.size = (0, 1) if rank == 0 else (len(files), 1)
            self._number = rank

        def sum(self, value: float) -> tuple[float]:
            sums[self._number] = value
            border.wait()
            total = sum(sums.values())
            border.wait()
            return (total,)

    def check(number: int) -> None:
        def told() -> None:
            progress[number] += 1

        resume.check_content(checkpoint, Rank(number), told)  # type: ignore[arg-type]

    threads = [threading.Thread(target=check, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert progress[0] == progress[1] == chunks * len(files)
