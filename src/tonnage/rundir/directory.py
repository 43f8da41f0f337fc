"""The run directory: one training job as plain files, and who writes each.

    runs/NAME/
      config.yaml          the launcher: as resolved, every default written out
      plan.json            the launcher: what was decided
      plans/               the launcher: the plan of every other number of workers that an elastic run may have
      data.json            the launcher: the account of the data, and where its cache lies
      rows.json            the launcher: some rows of every source, in pieces that count or are context
      environment.json     the launcher: allow-listed versions and hardware
      tokenizer/           the launcher: tokenizer with its chat template
      prompts.json         the launcher: what the model is asked at every evaluation, if it is asked anything
      questions.json       the launcher: rows that are answered and scored at every evaluation, if any are
      metrics.jsonl        rank 0: one object per step and per evaluation
      samples.jsonl        rank 0: what it answered
      log.txt              rank 0: what happens, one line each, with the time
      tensorboard/         rank 0: what TensorBoard shows, with `track: tensorboard`
      trackers/            rank 0: NAME.json, what a tracker has, and the id of its own run
      wandb/               rank 0: what Weights & Biases keeps until it has sent it, or `wandb sync` does
      loss.json            the launcher: the function that is the loss, if that is the user's own (from Python)
      by-hand              a Session: that steps are taken by a program, which no launcher can go on with
      resume.json          the launcher: the checkpoint to go on from, if it goes on
      metrics.cut.jsonl    the launcher: records of steps that were lost and are trained again
      start/               every rank: how additions began, where that is a part of the weights (PiSSA, LoftQ)
      lock                 held by the launcher and its workers, as long as any of them lives
      workers/             every rank: rank-0.log (its output), rank-0.position (where it is now),
                           rank-0.error.json (why it died); stop-asked, the launcher or `tonnage stop`: who wants
                           workers to save and end, who look for it at every step border;
                           meeting-*.json, rank 0: where it listens, as long as it does;
                           ray.json, ray.log, for Ray: what its trainer says, and what Ray itself writes
      job.sh, job.json     the launcher, for Slurm: the batch script, and the job that was submitted
      offload/             every rank: what rests on disk while it runs (files without a name)
      checkpoints/step-00000500/
      export/              Hugging Face model directory
      evaluation.json      the launcher, at the end: what it was evaluated as, before and after
      outcome.json         the launcher, at the end: what was planned beside what was measured
      report.html          the launcher, at the end: all of it on a page
      tags.json            `tonnage page`: tags and a note that people gave it

The launcher, the progress display and the report only ever read these files, so a run is followed in the
same way whether its workers are children of this process or jobs on another machine. Where workers are started by
torchrun, mpirun or a batch script, worker 0 does what is the launcher's here (``training.external``).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import socket
import stat
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tonnage.errors import UserError, user_error
from tonnage.files.reading import parse_record, read_json, read_record
from tonnage.files.writing import take_lock, write_json, write_whole
from tonnage.rundir.positions import POSITION_BYTES, Position
from tonnage.rundir.records import LossNote, MetricsRecord, ResumeNote, WorkerError, divide, metrics_record

LAUNCHER = "TONNAGE_LAUNCHER"
"""Variable by which workers know the launcher of ours that follows them: ``local``, which also holds the run's lock and
shows their errors, ``ray``, which shows them, or ``slurm``."""
LAUNCHER_PROCESS = "TONNAGE_LAUNCHER_PROCESS"
"""Its process, where that is the parent of the workers."""
COMPLETE = "COMPLETE"
"""The file that makes a directory a checkpoint; written last."""
CHECKPOINT = re.compile(r"step-[0-9]{8,18}")
"""Name of a checkpoint's directory. What is called otherwise is none: nothing reads it, and nothing removes it."""
ORPHANS_SECONDS = 10.0
"""For workers whose launcher was killed to end: their guardian kills them."""
LOOK_SECONDS = 0.1
"""For somebody who has only looked whether a run works (``is_locked``), and so held the lock for a moment."""


class RunDirectory:
    """Names of the files of a run, and the few ways in which they are written and read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.plan = self.path / "plan.json"
        self.plans = self.path / "plans"
        self.data = self.path / "data.json"
        self.rows = self.path / "rows.json"
        self.prompts = self.path / "prompts.json"
        self.questions = self.path / "questions.json"
        self.samples = self.path / "samples.jsonl"
        self.environment = self.path / "environment.json"
        self.tokenizer = self.path / "tokenizer"
        self.metrics = self.path / "metrics.jsonl"
        self.log = self.path / "log.txt"
        self.cut_metrics = self.path / "metrics.cut.jsonl"
        self.resume = self.path / "resume.json"
        self.loss = self.path / "loss.json"
        self.reference = self.path / "reference.npz"
        self.teacher = self.path / "teacher"
        self.features = self.path / "features"
        self.start = self.path / "start"
        self.by_hand = self.path / "by-hand"
        self.lock = self.path / "lock"
        self.job_script = self.path / "job.sh"
        self.job = self.path / "job.json"
        self.workers = self.path / "workers"
        self.stop_asked = self.workers / "stop-asked"
        self.ray = self.workers / "ray.json"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.evaluation = self.path / "evaluation.json"
        self.outcome = self.path / "outcome.json"
        self.report = self.path / "report.html"
        self.tags = self.path / "tags.json"
        self.staged_exports = (self.path / ".export", self.path / ".export.old")
        """Where a new export is written, and where the one that it replaces is moved."""

    def worker_log(self, rank: int) -> Path:
        """Standard output and error of one worker."""
        return self.workers / f"rank-{rank}.log"

    def worker_error(self, rank: int) -> Path:
        """The error of one worker, there only if it died of one."""
        return self.workers / f"rank-{rank}.error.json"

    def worker_position(self, rank: int) -> Path:
        """The position of one worker: a fixed-size file that its worker keeps mapped."""
        return self.workers / f"rank-{rank}.position"

    def tracker_note(self, name: str) -> Path:
        """How far a tracker has been told, and the id of its own run; there only if it is told anything."""
        return self.path / "trackers" / f"{name}.json"

    def plan_for(self, num_workers: int) -> Path:
        """The plan of another number of workers, there only if the run may have it."""
        return self.plans / f"workers-{num_workers}.json"

    def clear_traces(self, *, logs: bool = True, of_work: bool = True) -> None:
        """Remove what workers of an earlier launch left: it would be taken for news of this one.

        Without ``logs`` not what they printed; without ``of_work`` only how they failed, as when all is done.
        """
        self.workers.mkdir(parents=True, exist_ok=True)
        patterns = ["rank-*.error.json", ".rank-*.error.json.*"]
        patterns += ["rank-*.position", self.stop_asked.name, *(["rank-*.log"] if logs else [])] if of_work else []
        for path in [path for pattern in patterns for path in self.workers.glob(pattern)]:
            path.unlink(missing_ok=True)

    @property
    def word(self) -> str:
        """Its path as one word of a command that a shell is to carry out."""
        path = str(self.path)
        return shlex.quote(f"./{path}" if path.startswith(("-", "=")) else path)

    def beginnings(self) -> list[Path]:
        """What is written of a run before ``config.yaml`` makes it one, if a launcher of ours held the lock."""
        if os.path.lexists(self.config) or "pid" not in self._holder():
            return []
        files = (self.data, self.rows, self.prompts, self.questions, self.environment, self.plan, self.resume)
        more = (self.loss, self.by_hand, self.lock, self.job_script)
        return [*files, *more, self.tokenizer, self.plans, self.workers]

    def is_run(self) -> bool:
        """Whether a run was started here."""
        return os.path.lexists(self.config) or os.path.lexists(self.metrics)

    def check_decided(self) -> None:
        """Refuse a directory in which no run was decided on. Raises ``UserError``."""
        if not (self.config.exists() and self.plan.exists()):
            change = "name a directory that tonnage has written, such as runs/NAME"
            raise user_error("no run", "a run directory", change, str(self.path))

    def checkpoint_to_resume(self) -> Path | None:
        """The checkpoint that workers go on from; None where a run starts.

        Raises:
            UserError: ``resume.json`` names none.
        """
        if not self.resume.exists():
            return None
        name = read_record(self.resume, ResumeNote).checkpoint
        if not CHECKPOINT.fullmatch(name):
            observed = f"checkpoint is {name[:60]!r}"
            raise user_error(
                observed, "a name such as step-00000500", f"tonnage train --resume {self.word}", str(self.resume)
            )
        return self.checkpoints / name

    def own_loss(self) -> LossNote | None:
        """Of which function the run's loss is; None where it is cross-entropy. Raises ``UserError``."""
        return read_record(self.loss, LossNote) if self.loss.exists() else None

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Keep every other launcher out of this directory; gives the descriptor that workers inherit.

        The lock belongs to whoever has the file open: it outlives a launcher that was killed for as long as its
        workers live, and needs no cleaning up. A launcher that finds workers without a master waits for their end.

        Raises:
            UserError: another process works here; says which, and where. Or everybody may write here.
        """
        was_there = self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        if self.path.stat().st_mode & stat.S_IWOTH:
            raise user_error(
                found="a directory that everybody may write",
                needed="a run's directory that is yours: workers carry out what they read in it",
                change=f"chmod o-w {self.word}" if self.is_run() else "write output=... with another name",
                where=str(self.path),
            )
        with self._gone_again(was_there):
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise user_error(
                    "no regular file", "a file to lock", "write output=... with another name", str(self.lock)
                )
            began = time.monotonic()
            while True:
                try:
                    take_lock(descriptor, self.lock)
                    break
                except UserError:
                    self._remove_made(was_there)
                    raise
                except BlockingIOError as error:
                    if time.monotonic() > began + (ORPHANS_SECONDS if self._holder_is_gone() else LOOK_SECONDS):
                        raise self.is_taken() from error
                    time.sleep(LOOK_SECONDS / 2)
            with self._gone_again(was_there):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _gone_again(self, was_there: bool) -> Iterator[None]:
        """Where there is no room for the lock, leave no directory that was made for it."""
        try:
            yield
        except OSError:
            self._remove_made(was_there)
            raise

    def _remove_made(self, was_there: bool) -> None:
        """Remove what was made to lock a directory, unless that ``was_there`` before."""
        if not was_there:
            with suppress(OSError):
                self.lock.unlink(missing_ok=True)
                self.path.rmdir()

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
        except OSError:  # a file system without locks: nobody can have this one
            return False
        finally:
            os.close(descriptor)
        return False

    def is_taken(self, otherwise: str = "") -> UserError:
        """That another process works in this directory: which, and where. ``otherwise``: what else could be done."""
        holder = self._holder()
        return user_error(
            found=f"another run works in this directory (process {holder.get('pid', '?')} on "
            f"{holder.get('host', 'an unknown host')})",
            needed="one run at a time",
            change=f"wait for its end, or stop it: tonnage stop {self.word}{otherwise}",
            where=str(self.path),
        )

    def is_locked_elsewhere(self) -> bool:
        """Whether another process works here. One that is gone, and whose workers end as they notice, does not."""
        return self.is_locked() and not self.is_locked_here() and not self._holder_is_gone()

    def is_locked_here(self) -> bool:
        """Whether it is this process that works in this directory."""
        holder = self._holder()
        own = {"pid": os.getpid(), "host": socket.gethostname()}
        return self.is_locked() and holder == own

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
        except (PermissionError, KeyError, TypeError, ValueError, OverflowError):
            pass
        return False

    def rewind_metrics(self, step: int) -> int:
        """Cut the metrics after ``step``, so that a run going on from there writes them once; returns records cut.

        What is cut goes to ``metrics.cut.jsonl``. A last line that a crash cut short, and lines that no run wrote, go
        as well.
        """
        if not self.metrics.exists():
            return 0
        earlier, cut = divide(self._metrics_bytes(), MetricsRecord, step)
        if cut:
            with self.cut_metrics.open("ab") as file:
                file.writelines(line.rstrip(b"\n") + b"\n" for line in cut)
            write_whole(self.metrics, b"".join(earlier))
        return len(cut)

    def _metrics_bytes(self) -> bytes:
        """What stands in ``metrics.jsonl``. Raises ``UserError`` where that is no file, but for instance a device."""
        if self.metrics.exists() and not self.metrics.is_file():
            raise user_error(
                "no regular file", "the records of the run", "restore the file, or remove it", str(self.metrics)
            )
        return self.metrics.read_bytes()

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records of ``metrics.jsonl``; a line that a crash cut short is passed over.

        Raises:
            UserError: a line says what no run writes; names it and the key.
        """
        lines = self._metrics_bytes().split(b"\n") if self.metrics.exists() else []
        records = (metrics_record(line, f"{self.metrics}:{number}") for number, line in enumerate(lines, start=1))
        return [record for record in records if record is not None]

    def note_stop(self, who: str) -> None:
        """Note that ``who`` asked for a stop, where there is room for that."""
        with suppress(OSError):
            self.stop_asked.write_text(who)

    def add_to_log(self, message: str) -> None:
        """A line of its log, whole, from whatever process; a full disk is no reason to fail."""
        with suppress(OSError), self.log.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def write_error(self, rank: int, error: BaseException, exit_status: int, seconds: float | None = None) -> None:
        """Write down why a worker dies, at ``seconds`` (now)."""
        record = WorkerError(
            rank=rank,
            exit_status=exit_status,
            kind=type(error).__name__,
            message=str(error),
            trace="".join(traceback.format_exception(error)),
            seconds=time.time() if seconds is None else seconds,
            problems=list(error.problems) if isinstance(error, UserError) else [],
        )
        write_json(self.worker_error(rank), asdict(record))

    def read_errors(self) -> list[WorkerError]:
        """Errors of all workers that died of one, the earliest first. Raises ``UserError`` for one that is none."""
        errors = [read_record(path, WorkerError) for path in self.workers.glob("rank-*.error.json")]
        return sorted(errors, key=lambda error: error.seconds)

    def read_position(self, rank: int) -> Position:
        """Where a worker is now; the default position if it has not started, or what is read is half written."""
        try:
            with self.worker_position(rank).open("rb") as file:
                return parse_record(file.read(POSITION_BYTES).rstrip(b"\0 \n"), Position, "")
        except (OSError, UserError):
            return Position()


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    complete = (path.parent for path in checkpoints.glob(f"step-*/{COMPLETE}"))
    return sorted((path for path in complete if CHECKPOINT.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))
