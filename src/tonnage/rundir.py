"""The run directory: one training job as plain files, and who writes each.

    runs/NAME/
      config.yaml          the launcher: as resolved, every default written out
      plan.json            the launcher: what was decided
      plans/               the launcher: the plan of every other number of workers that an elastic run may have
      data.json            the launcher: the account of the data, and where its cache lies
      environment.json     the launcher: allow-listed versions and hardware
      tokenizer/           the launcher: tokenizer with its chat template
      metrics.jsonl        rank 0: one object per step and per evaluation
      log.txt              rank 0: what happens, one line each, with the time
      resume.json          the launcher: the checkpoint to go on from, if it goes on
      metrics.cut.jsonl    the launcher: records of steps that were lost and are trained again
      lock                 held by the launcher and its workers, as long as any of them lives
      workers/             every rank: rank-0.log (its output), rank-0.position (where it is now),
                           rank-0.error.json (why it died); stop-asked, the launcher: workers were told to stop;
                           meeting-*.json, rank 0: where it listens, as long as it does;
                           ray.json, ray.log, for Ray: what its trainer says, and what Ray itself writes
      job.sh, job.json     the launcher, for Slurm: the batch script, and the job that was submitted
      offload/             every rank: what rests on disk while it runs (files without a name)
      checkpoints/step-00000500/
      export/              Hugging Face model directory

The launcher, the progress display and the report only ever read these files, so a run is followed in the
same way whether its workers are children of this process or jobs on another machine. Where workers are started by
torchrun, mpirun or a batch script, worker 0 does what is the launcher's here (``train.external``).
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tonnage.errors import Problem, UserError

LAUNCHER = "TONNAGE_LAUNCHER"
"""Variable by which workers know that a launcher of ours shows their errors: ``local``, which also holds the run's
lock, or ``ray``."""
POSITION_BYTES = 512
ORPHANS_SECONDS = 10.0
"""For workers whose launcher was killed to end: their guardian kills them."""


@dataclass(frozen=True)
class WorkerError:
    """Why a worker died, as it wrote it down itself."""

    rank: int
    exit_status: int
    kind: str
    message: str
    trace: str
    seconds: float
    """Wall-clock time of the failure (seconds since the epoch): the earliest is the cause."""
    problems: list[dict[str, str]] = field(default_factory=list)
    """What the user can mend, if that is what it died of: the fields of each ``Problem``."""


@dataclass(frozen=True)
class Position:
    """Where a worker is now."""

    phase: str = "starting"
    step: int = 0
    micro_batch: int = 0
    num_micro_batches: int = 0
    seconds: float = 0.0
    """Wall-clock time of the last change."""
    alive: float = 0.0
    """Wall-clock time of the last sign that the process runs at all."""

    def __str__(self) -> str:
        where = f"{self.phase}, step {self.step}" if self.step else self.phase
        return where + (f", micro-batch {self.micro_batch} of {self.num_micro_batches}" if self.micro_batch else "")


class RunDirectory:
    """Names of the files of a run, and the few ways in which they are written and read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.plan = self.path / "plan.json"
        self.plans = self.path / "plans"
        self.data = self.path / "data.json"
        self.environment = self.path / "environment.json"
        self.tokenizer = self.path / "tokenizer"
        self.metrics = self.path / "metrics.jsonl"
        self.log = self.path / "log.txt"
        self.cut_metrics = self.path / "metrics.cut.jsonl"
        self.resume = self.path / "resume.json"
        self.lock = self.path / "lock"
        self.job_script = self.path / "job.sh"
        self.job = self.path / "job.json"
        self.workers = self.path / "workers"
        self.stop_asked = self.workers / "stop-asked"
        self.ray = self.workers / "ray.json"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.tensorboard = self.path / "tensorboard"

    def worker_log(self, rank: int) -> Path:
        """Standard output and error of one worker."""
        return self.workers / f"rank-{rank}.log"

    def worker_error(self, rank: int) -> Path:
        """The error of one worker, there only if it died of one."""
        return self.workers / f"rank-{rank}.error.json"

    def worker_position(self, rank: int) -> Path:
        """The position of one worker: a fixed-size file that its worker keeps mapped."""
        return self.workers / f"rank-{rank}.position"

    def plan_for(self, num_workers: int) -> Path:
        """The plan of another number of workers, there only if the run may have it."""
        return self.plans / f"workers-{num_workers}.json"

    def clear_traces(self, *, logs: bool = True) -> None:
        """Remove what workers of an earlier launch left: it would be taken for news of this one."""
        self.workers.mkdir(parents=True, exist_ok=True)
        patterns = ["rank-*.error.json", "rank-*.position", self.stop_asked.name, *(["rank-*.log"] if logs else [])]
        for path in [path for pattern in patterns for path in self.workers.glob(pattern)]:
            path.unlink(missing_ok=True)

    def is_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists() or self.metrics.exists()

    def checkpoint_to_resume(self) -> Path | None:
        """The checkpoint that workers go on from; None where a run starts."""
        return self.checkpoints / read_json(self.resume)["checkpoint"] if self.resume.exists() else None

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Keep every other launcher out of this directory; gives the descriptor that workers inherit.

        The lock belongs to whoever has the file open: it outlives a launcher that was killed for as long as its
        workers live, and needs no cleaning up. A launcher that finds workers without a master waits for their end.

        Raises:
            UserError: another process works here; says which, and where.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline = time.monotonic() + ORPHANS_SECONDS
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not self._holder_is_gone() or time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            yield descriptor
        except BlockingIOError as error:
            holder = self._holder()
            raise UserError(
                Problem(
                    found=f"another run works in this directory (process {holder.get('pid', '?')} on "
                    f"{holder.get('host', 'an unknown host')})",
                    needed="one run at a time",
                    change="wait for its end, stop it, or write output=... with another name",
                    where=str(self.path),
                )
            ) from error
        finally:
            os.close(descriptor)

    def is_locked(self) -> bool:
        """Whether a run works in this directory now."""
        try:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _holder(self) -> dict[str, Any]:
        try:
            holder = read_json(self.lock)
        except (OSError, ValueError):
            return {}
        return holder if isinstance(holder, dict) else {}

    def _holder_is_gone(self) -> bool:
        holder = self._holder()
        if holder.get("host") != socket.gethostname():
            return False
        try:
            os.kill(int(holder["pid"]), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def rewind_metrics(self, step: int) -> int:
        """Cut the metrics after ``step``, so that a run going on from there writes them once; returns records cut.

        What is cut goes to ``metrics.cut.jsonl``. A last line that a crash cut short goes as well.
        """
        if not self.metrics.exists():
            return 0
        kept: list[bytes] = []
        cut: list[bytes] = []
        for line in self.metrics.read_bytes().splitlines(keepends=True):
            try:
                is_kept = line.endswith(b"\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                is_kept = False
            (kept if is_kept else cut).append(line)
        if cut:
            with self.cut_metrics.open("ab") as file:
                file.writelines(line.rstrip(b"\n") + b"\n" for line in cut)
            temporary = self.metrics.with_name(f".{self.metrics.name}")
            temporary.write_bytes(b"".join(kept))
            temporary.replace(self.metrics)
        return len(cut)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records of ``metrics.jsonl``; a line that a crash cut short is passed over."""
        records = []
        for line in self.metrics.read_text().splitlines() if self.metrics.exists() else ():
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
        return records

    def write_error(self, rank: int, error: BaseException, exit_status: int, seconds: float | None = None) -> None:
        """Write down why a worker dies, at ``seconds`` (now)."""
        record = WorkerError(
            rank=rank,
            exit_status=exit_status,
            kind=type(error).__name__,
            message=str(error),
            trace="".join(traceback.format_exception(error)),
            seconds=time.time() if seconds is None else seconds,
            problems=[asdict(problem) for problem in error.problems] if isinstance(error, UserError) else [],
        )
        write_json(self.worker_error(rank), asdict(record))

    def read_errors(self) -> list[WorkerError]:
        """Errors of all workers that died of one, the earliest first."""
        errors = [WorkerError(**read_json(path)) for path in self.workers.glob("rank-*.error.json")]
        return sorted(errors, key=lambda error: error.seconds)

    def read_position(self, rank: int) -> Position:
        """Where a worker is now; the default position if it has not started."""
        try:
            text = self.worker_position(rank).read_bytes().rstrip(b"\0 \n")
            return Position(**json.loads(text))
        except (OSError, ValueError, TypeError):
            return Position()


class PositionFile:
    """A worker's own note of where it is: 512 bytes, kept mapped, so that writing costs no system call."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b" " * POSITION_BYTES)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), POSITION_BYTES)
        self._position = Position()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Wall-clock time of the last change."""
        return self._position.seconds

    def update(self, **changes: Any) -> None:
        """Change some fields of the position; without any, say that there is progress where it is."""
        now = time.time()
        self._write({**changes, "seconds": now, "alive": now})

    def beat(self) -> None:
        """Say that the process runs, whether or not it gets anywhere."""
        self._write({"alive": time.time()})

    def _write(self, changes: Mapping[str, Any]) -> None:
        with self._lock:
            self._position = replace(self._position, **changes)
            self._map[:] = json.dumps(asdict(self._position)).encode().ljust(POSITION_BYTES)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON so that readers see the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text())
