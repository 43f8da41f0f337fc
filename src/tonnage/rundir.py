"""The run directory: one training job as plain files, and who writes each.

    runs/NAME/
      config.yaml          the launcher: as resolved, every default written out
      plan.json            the launcher: what was decided
      data.json            the launcher: the account of the data, and where its cache lies
      environment.json     the launcher: allow-listed versions and hardware
      tokenizer/           the launcher: tokenizer with its chat template
      metrics.jsonl        rank 0: one object per step and per evaluation
      log.txt              rank 0: what happens, one line each, with the time
      workers/             every rank: rank-0.log (its output), rank-0.position (where it is now),
                           rank-0.error.json (why it died); stop-asked, the launcher: workers were told to stop
      offload/             every rank: what rests on disk while it runs (files without a name)
      checkpoints/step-00000500/
      export/              Hugging Face model directory

The launcher, the progress display and the report only ever read these files, so a run is followed in the
same way whether its workers are children of this process or jobs on another machine.
"""

from __future__ import annotations

import json
import mmap
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tonnage.errors import UserError

POSITION_BYTES = 512


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


class RunDirectory:
    """Names of the files of a run, and the few ways in which they are written and read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.plan = self.path / "plan.json"
        self.data = self.path / "data.json"
        self.environment = self.path / "environment.json"
        self.tokenizer = self.path / "tokenizer"
        self.metrics = self.path / "metrics.jsonl"
        self.log = self.path / "log.txt"
        self.workers = self.path / "workers"
        self.stop_asked = self.workers / "stop-asked"
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

    def is_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists() or self.metrics.exists()

    def write_error(self, rank: int, error: BaseException, exit_status: int) -> None:
        """Write down why a worker dies."""
        record = WorkerError(
            rank=rank,
            exit_status=exit_status,
            kind=type(error).__name__,
            message=str(error),
            trace="".join(traceback.format_exception(error)),
            seconds=time.time(),
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

    def update(self, **changes: Any) -> None:
        """Change some fields of the position."""
        self._position = Position(**{**asdict(self._position), **changes, "seconds": time.time()})
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
