"""Save a run: every rank its own file, beside training, published only when whole.

    checkpoints/step-00000500/
      shard-00001-model-00001-of-00001.safetensors    rank 0's parts of every tensor (``shards``)
      shard-00002-model-00001-of-00001.safetensors    rank 1's ...
      state.json                                      step, data cursor, config and what else is not a tensor; the
                                                      sizes and hashes of the files above
      COMPLETE                                        written last: size and hash of every file

Tensor names: ``model.NAME`` for parameters, ``optimizer.NAME.m``, ``.v`` and ``.low`` for the optimizer's state.
A directory without COMPLETE is not a checkpoint. There is no pickle in any file.

    every rank   copy the parts to the host buffer │ training goes on
                                                   └─ write, hash, fsync ──► note
    rank 0                                            ... all notes there ──► state.json, COMPLETE, old ones deleted

The copy is all that training waits for, and the host buffer all that it costs. Ranks tell rank 0 through small files
beside their shards, not through collectives: those belong to training, and those of two threads would mix. A rank
that cannot write raises at its next step.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Len
from torch import Tensor

from tonnage.checkpoint.shards import FAST_HASH, TensorPart, hash_file, held_parts, in_file_order, write_file
from tonnage.errors import ROOM, UserError, refused, user_error
from tonnage.files.reading import read_json, read_object
from tonnage.files.writing import sync, write_json
from tonnage.host.locked import host_memory, lock
from tonnage.parallel.world import World
from tonnage.rundir.directory import CHECKPOINT
from tonnage.rundir.directory import COMPLETE as COMPLETE
from tonnage.rundir.directory import complete_checkpoints as complete_checkpoints
from tonnage.rundir.directory import step_of as step_of

STATE = "state.json"
FORMAT = 1
"""Of ``state.json`` and the names of tensors: a change that an older reader would misread is a new number."""
WRITER_NICENESS, LEAST_PRIORITY = 5, 19
"""By how much the thread that writes is nicer than the one that trains, where the system has priorities for threads:
training goes first. No more than the system knows."""
LONGEST_WAIT_SECONDS = 1800.0
"""For the parts of other ranks, after our own is written."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole, and what it cost."""

    step: int
    path: Path
    num_bytes: int
    """Of all files."""
    blocked_seconds: float
    """Training stood still, on this rank: the copy, and the wait for an earlier save that was still going on."""
    save_seconds: float
    """From the first byte copied to COMPLETE on disk."""

    def __str__(self) -> str:
        figures = f"{self.num_bytes / 1e9:.2f} GB in {self.save_seconds:.1f} s"
        return f"saved {self.path.name}: {figures}, training waited {self.blocked_seconds:.2f} s"


@dataclass(frozen=True)
class Cursor:
    """How far a run is; with seed and config, all that is needed to go on with the very next pack."""

    step: int = 0
    """Steps done."""
    position: int = 0
    """Global position of the next pack: packs trained so far, whatever the number of ranks was."""
    num_updates: int = 0
    """Updates of the optimizer: fewer than steps where steps were skipped."""
    skips: int = 0
    """Steps skipped in a row, up to now."""
    loss_scale: float = 1.0
    good_steps: int = 0
    """Steps in a row, not skipped, at this loss scale."""
    best_figure: str = ""
    """The figure by which evaluations are compared; empty before the first."""
    best_step: int = -1
    """The step after which it was best; -1 before the first evaluation."""
    best_value: float = 0.0
    stale: int = 0
    """Evaluations since the best one."""

    @staticmethod
    def of(state: Mapping[str, Any]) -> Cursor:
        """The cursor in what a checkpoint holds besides tensors."""
        return Cursor(**{field.name: state[field.name] for field in fields(Cursor) if field.name in state})


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written."""

    bytes: Annotated[int, Ge(0)]
    xxh3_128: Annotated[str, Len(32, 32)]


@dataclass(frozen=True)
class CursorForm:
    """What ``state.json`` holds at least."""

    format: int
    step: Annotated[int, Ge(0)]
    position: Annotated[int, Ge(0)]
    num_updates: Annotated[int, Ge(0)]
    skips: Annotated[int, Ge(0)]
    loss_scale: Annotated[float, Gt(0)]
    good_steps: Annotated[int, Ge(0)]
    best_figure: str = ""
    best_step: Annotated[int, Ge(-1)] = -1
    best_value: float = 0.0
    stale: Annotated[int, Ge(0)] = 0
    shards: dict[str, WrittenFile] | None = None
    """The files of tensors; None in a checkpoint of an older version."""


@dataclass(frozen=True)
class DataFacts:
    """What ``state.json`` says of the data that the run is trained on."""

    key: str
    num_packs: Annotated[int, Gt(0)]
    num_tokens: Annotated[int, Ge(0)]
    supervised_tokens: Annotated[int, Ge(0)]


@dataclass(frozen=True)
class RunForm:
    """What ``state.json`` holds besides where a run has written it."""

    config: dict[str, Any]
    data: DataFacts
    packs_per_step: Annotated[int, Gt(0)]
    num_steps: Annotated[int, Ge(0)]


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


class Saver:
    """Saves a run into ``checkpoints``, one checkpoint at a time, keeping the newest ``keep``, and with ``keep_best``
    those of the steps that are the best to them.

    Every rank makes one, at the same time: what an interrupted save left behind is removed then. ``sync_too`` are
    files, such as the metrics, that must be on disk before a checkpoint counts. ``progress`` is called, from another
    thread, whenever something was written.
    """

    def __init__(
        self,
        checkpoints: Path,
        keep: int,
        world: World,
        *,
        keep_best: bool = False,
        sync_too: Sequence[Path] = (),
        log: Callable[[str], None] = lambda message: None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._checkpoints, self._keep, self._world = checkpoints, keep, world
        self._keep_best = keep_best
        self._sync_too, self._log, self._progress = sync_too, log, progress
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._written: threading.Event | None = None
        """Set when the save under way has ended; None if there is none. Its thread is not asked: CPython 3.11 takes it
        for ended once Ctrl-C has interrupted a join."""
        self._error: BaseException | None = None
        self._whole: Saved | None = None
        self._blocked_seconds = 0.0
        self._untold: list[Saved] = []
        if world.rank == 0:
            for path in interrupted_saves(checkpoints):
                log(f"removing {path.name}, a save that was interrupted")
                shutil.rmtree(path)
        world.barrier()

    def save(
        self,
        cursor: Cursor,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        *,
        wait: bool = False,
        copies: Collection[str] = (),
    ) -> None:
        """Save the state as it is now; every rank calls this.

        Returns when the state is out of the way or, with ``wait``, when the checkpoint is whole; then there is no copy.
        ``copies``: names (``model.NAME``, ``optimizer.NAME``) of tensors that nobody changes any more, so they are out
        of the way already.
        ``facts`` is everything else that is not a tensor; it goes into ``state.json`` with the cursor.

        Raises:
            UserError: this save (with ``wait``) or the one before it could not be written.
        """
        began = time.perf_counter()
        step = cursor.step
        path = checkpoint_path(self._checkpoints, step)
        if self._written is not None and not self._written.is_set():
            self._log(f"step {step} waits for the save before it: saves take longer than the steps between them")
        self.wait()
        if (path / COMPLETE).exists():
            raise user_error("a complete checkpoint is there already", "a step not saved yet", where=str(path))
        tensors = {f"model.{name}": tensor for name, tensor in model.items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer.items()}
        parts = held_parts(tensors, self._world.mesh)
        text = json.dumps({"format": FORMAT, **asdict(cursor), **facts})
        if not wait:
            parts = self._stage(parts, copies)

        def write() -> None:
            try:
                if not wait:
                    _yield_to_training()
                self._write(path, step, parts, text, began)
            except BaseException as error:
                self._error = error
            finally:
                written.set()

        self._written = written = threading.Event()
        threading.Thread(target=write, name=f"save of step {step}", daemon=True).start()
        if wait:
            try:
                written.wait()
            except BaseException:  # Ctrl-C in a notebook: what is being written must not change before it is whole
                written.wait()
                raise
        self._blocked_seconds = time.perf_counter() - began
        if wait:
            self.wait()
            self._world.barrier()

    def news(self) -> list[Saved]:
        """Checkpoints that became whole since the last call (on rank 0); never waits.

        Raises:
            UserError: what went wrong meanwhile.
        """
        self._collect()
        told, self._untold = self._untold, []
        return told

    def wait(self) -> None:
        """Wait until no save is going on. Raises as ``news``."""
        if self._written is not None:
            self._written.wait()
            self._collect()

    @property
    def host_bytes(self) -> int:
        """Memory of this host that saves in the background keep."""
        return self._buffer.numel()

    def _collect(self) -> None:
        if self._written is None or not self._written.is_set():
            return
        self._written = None
        if self._error is not None:
            raise self._error
        if self._whole is not None:
            self._untold.append(replace(self._whole, blocked_seconds=self._blocked_seconds))
            self._whole = None

    def _stage(self, parts: Sequence[TensorPart], copies: Collection[str]) -> list[TensorPart]:
        """The parts; those that are not copies are copied into a buffer of this host that every save uses again."""
        staged = [part for part in parts if part.name in copies]
        parts = [part for part in parts if part.name not in copies]
        on_device = any(part.tensor.device.type == "cuda" for part in parts)
        needed = sum(part.tensor.nbytes for part in parts)
        if self._buffer.numel() < needed:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = host_memory(needed)
            if on_device and (status := lock(self._buffer)):
                self._log(f"saves copy slowly: {needed / 1e9:.2f} GB could not be locked (CUDA error {status})")
        end = 0
        for part in in_file_order(parts):
            slot = self._buffer[end : end + part.tensor.nbytes].view(part.tensor.dtype).view(part.tensor.shape)
            slot.copy_(part.tensor, non_blocking=True)
            staged.append(replace(part, tensor=slot))
            end += part.tensor.nbytes
        if on_device:
            torch.cuda.synchronize()
        return staged

    def _write(self, path: Path, step: int, parts: Sequence[TensorPart], state: str, began: float) -> None:
        """Write this rank's file; rank 0 then publishes the checkpoint."""
        rank, size = self._world.rank, self._world.size
        names = [shard_name(number) for number in range(size)]
        try:
            path.mkdir(parents=True, exist_ok=True)
            digest = write_file(path / names[rank], parts, lambda _: self._progress())
            write_json(_note(path / names[rank]), {FAST_HASH: digest, "bytes": (path / names[rank]).stat().st_size})
            if rank:
                return
            notes = {name: _wait_for(_note(path / name)) for name in names}
            (path / STATE).write_text(json.dumps(json.loads(state) | {"shards": notes}, indent=1) + "\n")
            publish(path, notes, sync_too=self._sync_too)
        except OSError as error:
            if not os.path.lexists(path / COMPLETE):
                with contextlib.suppress(OSError):
                    (path / names[rank]).unlink(missing_ok=True)  # makes room, for the message at least
            raise explained(
                error,
                path,
                "the checkpoint",
                needed=f"{sum(part.tensor.nbytes for part in parts):,} bytes for this rank's part",
                change="make room, or lower checkpoint.keep; then go on from the last checkpoint: "
                "tonnage train --resume RUN",
            ) from error
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        self._whole = Saved(step, path, num_bytes, 0.0, time.perf_counter() - began)
        try:
            prune(self._checkpoints, self._keep, best_too=self._keep_best)
        except OSError as error:  # what is half deleted does not count, and is swept when the run begins again
            self._log(f"an older checkpoint could not be deleted: {error}")


def _yield_to_training() -> None:
    """Give this thread a lower priority than the one that started it, whose own its user has chosen."""
    if sys.platform != "linux":  # a thread has no priority of its own
        return
    own = threading.get_native_id()
    with contextlib.suppress(OSError):  # where that is forbidden it writes as it is
        nice = os.getpriority(os.PRIO_PROCESS, own)
        os.setpriority(os.PRIO_PROCESS, own, min(LEAST_PRIORITY, nice + WRITER_NICENESS))


def shard_name(rank: int) -> str:
    """Name of the file that a rank writes (DCP's, which counts from 1)."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def _note(shard: Path) -> Path:
    """The file in which a rank says that its shard is on disk, and its hash."""
    return shard.with_name(f".{shard.name}.json")


def _wait_for(note: Path) -> dict[str, Any]:
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while not note.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"another rank has not written its part ({note.name})")
        time.sleep(0.02)
    record = read_json(note)
    assert isinstance(record, dict)
    return record


def publish(path: Path, sums: Mapping[str, Mapping[str, Any]] | None = None, *, sync_too: Sequence[Path] = ()) -> None:
    """Force everything to disk, then write COMPLETE with the size and hash of every file.

    ``sums`` are the sizes and hashes of files that are on disk already.
    """
    sums = sums or {}
    for name in sums:
        _note(path / name).unlink(missing_ok=True)
    files = dict(sums)
    for file in sorted(path.iterdir()):
        if file.name not in sums:
            sync(file)
            files[file.name] = {FAST_HASH: hash_file(file, FAST_HASH), "bytes": file.stat().st_size}
    for file in sync_too:
        if file.exists():
            sync(file)
    sync(path)
    write_json(path / f".{COMPLETE}", {"files": dict(sorted(files.items()))})
    sync(path / f".{COMPLETE}")
    (path / f".{COMPLETE}").rename(path / COMPLETE)
    sync(path)
    sync(path.parent)


def explained(error: OSError, path: Path, what: str, *, needed: str, change: str) -> UserError:
    """The ``UserError`` for ``what`` that could not be written to ``path``; ``needed`` and ``change`` are for a disk
    that is full."""
    what = f"{what} could not be written"
    error_shown = refused(error, what, path)
    if error_shown is None:
        return user_error(f"{what}: {error.strerror}", "a disk that takes it", change, str(path))
    (problem,) = error_shown.problems
    return UserError(replace(problem, needed=needed if error.errno in ROOM else problem.needed, change=change))


def interrupted_saves(checkpoints: Path) -> list[Path]:
    """Checkpoints that were never whole, or whose removal was interrupted."""
    named = (path for path in checkpoints.glob("step-*") if CHECKPOINT.fullmatch(path.name))
    return sorted(
        path for path in named if path.is_dir() and not path.is_symlink() and not os.path.lexists(path / COMPLETE)
    )


def read_state(path: Path, *forms: type[Any]) -> dict[str, Any]:
    """What a checkpoint holds besides tensors: its cursor at least, and what else ``forms`` ask for.

    Raises:
        UserError: it holds something else; names the key.
    """
    for form in forms:
        read_object(path / STATE, form)
    return read_object(path / STATE, CursorForm)


def prune(checkpoints: Path, keep: int, *, best_too: bool = False) -> None:
    """Delete all complete checkpoints but the newest ``keep``, which is at least 1, and with ``best_too`` those of the
    steps that were the best when one of these was saved."""
    complete = complete_checkpoints(checkpoints)
    newest = complete[max(0, len(complete) - max(1, keep)) :]
    best = {read_state(path).get("best_step") for path in newest} if best_too else set()
    for path in complete[: len(complete) - len(newest)]:
        if step_of(path) in best:
            continue
        if path.is_symlink():  # somebody keeps it elsewhere
            path.unlink()
            continue
        (path / COMPLETE).unlink()  # first: what is half deleted must not count
        shutil.rmtree(path)
