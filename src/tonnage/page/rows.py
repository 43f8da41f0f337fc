"""What the list says of a run: its state and figures, read from the ends of its files.

A list of hundreds of long runs must come at once, so no file is read whole: of the metrics the last lines, and for the
sparkline a line each at some places between. What a run is doing is told as its launcher and ``tonnage follow`` tell
it: by the lock that whoever works on it holds, and by the positions that its workers note.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from tonnage.errors import UserError
from tonnage.files.reading import read_record
from tonnage.launch.ray import is_working
from tonnage.page.folder import read_end
from tonnage.page.tags import read_tags
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import Position
from tonnage.rundir.records import WorkerError, is_step, peak_memory
from tonnage.rundir.stalls import ENDED, progress

State = Literal["waiting", "training", "stopped", "failed", "done"]
TAIL_BYTES, LINE_BYTES = 8 << 10, 4 << 10
SPARKS = 28
"""Places of the metrics at which a loss is read for the sparkline."""
RECENT_STEPS = 20
"""Steps whose median time the remaining time is reckoned from."""
SIGN_SECONDS = 60.0
"""Since the last sign of life of workers on another machine, after which they are taken for gone."""
LOCKS = Path("/proc/locks")
"""The files that processes of this machine hold locked; systems other than Linux list none."""
PLAN_BYTES = 16 << 20
LONGEST_MESSAGE = 2000


@dataclass(frozen=True)
class Decided:
    """What was decided of a run before it began, as far as a list says it."""

    model: str = ""
    trains: str = ""
    num_steps: int = 0
    workers: int = 1


@dataclass(frozen=True)
class Row:
    run: str
    """Its path below the folder."""
    state: State
    doing: str
    """The phase of the worker that is furthest behind, while they work."""
    message: str
    """Why it failed or waits."""
    step: int
    num_steps: int
    loss: float | None
    evaluation: float | None
    spark: tuple[float | None, ...]
    tokens_per_second: float | None
    memory_bytes: float | None
    remaining_seconds: float | None
    changed: float
    """Wall-clock time at which it last wrote something (seconds since the epoch)."""
    model: str
    trains: str
    workers: int
    tags: tuple[str, ...] = ()
    note: str = ""


def decided(run: RunDirectory) -> Decided:
    """What ``plan.json`` and the first lines of ``config.yaml`` tell; files that are no such files tell nothing."""
    try:
        plan = from_json(read_end(run.plan, PLAN_BYTES) or b"{}")
        model = re.search(rb"^model: (.+)$", read_end(run.config, PLAN_BYTES), re.MULTILINE)
        named = model[1].decode(errors="replace").strip("'\" ") if model else ""
        name = named.rstrip("/").rpartition("/")[2] if named.startswith((".", "/", "~")) else named
        parameters = int(plan.get("model", {}).get("num_parameters") or 0)
        name += (
            f", {parameters / 1e9:.3g}B" if parameters >= 1e9 else f", {parameters / 1e6:.3g}M" if parameters else ""
        )
        trains = plan.get("reasons", {}).get("trains") or "all weights"
        return Decided(name, str(trains), int(plan.get("num_steps") or 0), int(plan.get("workers") or 1))
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return Decided()


def row(name: str, run: RunDirectory, plan: Decided, locks: frozenset[int]) -> Row:
    """What is known of a run now. ``locks``: inodes of the files that processes of this machine have locked."""
    lines = read_end(run.metrics, TAIL_BYTES).split(b"\n")[:-1]
    records = [record for record in map(_record, lines) if record is not None]
    steps = [record for record in records if is_step(record)]
    last: dict[str, Any] = steps[-1] if steps else {}
    evaluations = [record for record in records if "eval_loss" in record]
    step = _integer(last.get("step"))
    positions = [run.read_position(rank) for rank in range(min(plan.workers, 4096))]
    state, doing, message = _state(run, positions, locks, left=plan.num_steps - step)
    seconds = [value for record in steps[-RECENT_STEPS:] if (value := _number(record.get("step_seconds"))) is not None]
    remaining = (plan.num_steps - step) * median(seconds) if seconds and state == "training" else None
    tags = read_tags(run)
    return Row(
        run=name,
        state=state,
        doing=doing,
        message=message[:LONGEST_MESSAGE],
        step=step,
        num_steps=plan.num_steps,
        loss=_number(last.get("loss")),
        evaluation=_number(evaluations[-1]["eval_loss"]) if evaluations else None,
        spark=_spark(run.metrics),
        tokens_per_second=_number(last.get("tokens_per_second")),
        memory_bytes=_memory(last),
        remaining_seconds=remaining,
        changed=_changed(run),
        model=plan.model,
        trains=plan.trains,
        workers=plan.workers,
        tags=tuple(tags.tags),
        note=tags.note,
    )


def refused(name: str, why: str) -> Row:
    """A run of which nothing is shown."""
    return Row(name, "failed", "", why, 0, 0, None, None, (), None, None, None, 0.0, "", "", 1)


class Trace(NamedTuple):
    """Of a file: what changes when it is written; zeros where there is none."""

    num_bytes: int = 0
    nanoseconds: int = 0
    inode: int = 0


def trace(path: Path | str) -> Trace:
    try:
        status = os.stat(path)  # noqa: PTH116  # a path of text is looked up in half the time
    except OSError:
        return Trace()
    return Trace(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True)
class Traces:
    """What changes whenever a row may."""

    directory: Trace
    lock: Trace
    plan: Trace
    others: tuple[Trace, ...]


def traces(run: RunDirectory) -> Traces:
    others = (run.metrics, run.tags, run.outcome, run.job, run.ray, run.stop_asked, run.worker_position(0), run.workers)
    return Traces(trace(run.path), trace(run.lock), trace(run.plan), tuple(map(trace, others)))


def locked_files() -> frozenset[int]:
    """Inodes of the files that processes of this machine hold locked, as the system lists them.

    To try a lock is to hold it for a moment, in which a launcher would be refused; so nobody tries here.
    """
    try:
        lines = LOCKS.read_text().splitlines()
    except OSError:
        return frozenset()
    fields = (line.split() for line in lines if "FLOCK" in line and "->" not in line)
    return frozenset(int(words[5].rpartition(":")[2]) for words in fields if len(words) > 5)


def _state(
    run: RunDirectory, positions: Sequence[Position], locks: frozenset[int], left: int
) -> tuple[State, str, str]:
    """State, what it is doing, and a message."""
    slowest = min(positions, key=progress, default=Position())
    is_begun = any(position.seconds for position in positions)
    if _is_worked_on(run, positions, locks):
        prefix = "stopping: " if run.stop_asked.exists() else ""
        return "training", prefix + (slowest.phase if is_begun or prefix else "preparing"), ""
    if errors := _errors(run):
        first = errors[0]
        return "failed", "", f"worker {first.rank}: {first.kind}: {first.message}"
    if left <= 0 and (run.outcome.exists() or all(position.phase == "done" for position in positions)):
        return "done", "", ""
    if is_begun and all(position.phase in ENDED for position in positions):
        return ("done" if left <= 0 else "stopped"), "", ""
    if is_begun:
        return "failed", "", f"its workers ended without a word: {slowest}"
    if run.metrics.exists():
        return ("done" if left <= 0 else "stopped"), "", ""
    if run.job.exists():
        return "waiting", "", "submitted to Slurm, and not begun"
    return "waiting", "", "prepared, and not begun"


def _is_worked_on(run: RunDirectory, positions: Sequence[Position], locks: frozenset[int]) -> bool:
    try:
        if run.lock.stat().st_ino in locks:
            return True
    except OSError:
        pass
    newest = max((position.alive for position in positions if position.phase not in ENDED), default=0.0)
    is_elsewhere = run.job.exists() or run.ray.exists() or not LOCKS.exists()
    return (is_elsewhere and time.time() - newest < SIGN_SECONDS) or is_working(run)


def _errors(run: RunDirectory) -> list[WorkerError]:
    errors = []
    for path in run.workers.glob("rank-*.error.json"):
        try:
            errors.append(read_record(path, WorkerError))
        except UserError:
            continue
    return sorted(errors, key=lambda error: error.seconds)


def _spark(metrics: Path) -> tuple[float | None, ...]:
    """Losses at places of the file that are equally far apart, the last among them."""
    try:
        descriptor = os.open(metrics, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    losses: dict[int, float | None] = {}
    try:
        size = os.fstat(descriptor).st_size
        for place in range(SPARKS + 1):
            start = size * place // SPARKS if place < SPARKS else max(0, size - LINE_BYTES)
            piece = os.pread(descriptor, LINE_BYTES, start)
            lines = piece.split(b"\n")[-2:0:-1] if place == SPARKS else piece.split(b"\n", 3)[1 if start else 0 : -1]
            for line in lines:
                if (record := _record(line)) is not None and is_step(record):
                    losses[_integer(record["step"])] = _number(record["loss"])
                    break
    except OSError:
        return ()
    finally:
        os.close(descriptor)
    return tuple(losses[step] for step in sorted(losses))


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = from_json(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100
    return float(f"{float(value):.6g}") if is_number and math.isfinite(float(value)) else None  # type: ignore[arg-type]


def _integer(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0


def _memory(record: dict[str, Any]) -> float | None:
    try:
        return _number(peak_memory(record))
    except AttributeError:  # what a stranger wrote there is no mapping
        return None


def _changed(run: RunDirectory) -> float:
    return max(trace(path).nanoseconds for path in (run.metrics, run.plan, run.worker_position(0))) / 1e9
