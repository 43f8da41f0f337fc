"""What is known of the runs below a folder: read again only where their files have changed.

Of a run that is looked at, the metrics are read on from where they ended at the last look, and kept as columns of
numbers. A file that has become shorter is read again: a run that goes on from a checkpoint has cut its records.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json

from tonnage.errors import UserError, user_error
from tonnage.files.reading import RECORD_BYTES
from tonnage.page.folder import Folder, read_end
from tonnage.page.rows import Decided, Row, Traces, decided, locked_files, refused, row, trace, traces
from tonnage.report.curves import Measured
from tonnage.report.gathered import BEGUN
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.records import MetricsRecord, metrics_record

MOST_MEASURED = 24
"""Runs whose steps are kept."""
REST_SECONDS = 30.0
"""Between two looks at the files of a run on which nobody works."""
LOCK_SECONDS = 1.0
"""Between two readings of the list of locks, which takes the system some time."""
LOG_BYTES = 256 << 10
"""Of a log, those at its end that are shown."""
PIECE_BYTES = 4 << 20


@dataclass
class _Known:
    traced: Traces
    row: Row
    plan: Decided
    looked: float
    """When all of its files were looked at (``time.monotonic``)."""

    def is_at_work(self, locks: frozenset[int]) -> bool:
        """Whether somebody worked on it at the last look, or has its lock now."""
        return self.row.state == "training" or self.traced.lock.inode in locks


@dataclass
class Curves:
    """The measured steps of a run, and how far its file was read."""

    measured: Measured
    inode: int = 0
    offset: int = 0
    version: int = 0
    """Rises when what was measured is read again from the beginning."""


class Watched:
    """The runs below a folder, as they are known."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._known: dict[str, _Known] = {}
        self._curves: OrderedDict[str, Curves] = OrderedDict()
        self._lock = threading.Lock()
        self._locks, self._listed = frozenset[int](), -LOCK_SECONDS

    def rows(self) -> list[Row]:
        locks = self._locked_files()
        names = self.folder.runs()
        rows = []
        with self._lock:
            for name in names:
                try:
                    rows.append(self._resting(name, locks) or self._row(name, self.folder.run(name), locks))
                except UserError as error:
                    rows.append(refused(name, f"not shown: {error.problems[0].found}"))
            self._known = {name: self._known[name] for name in names if name in self._known}
        return rows

    def look(self, name: str) -> tuple[Row, Curves]:
        """A run as it is now, and its steps up to now.

        Raises:
            UserError: there is no such run, or a line of its metrics is no record.
        """
        run = self.folder.run(name)
        with self._lock:
            curves = self._curves.setdefault(name, Curves(Measured()))
            self._curves.move_to_end(name)
            while len(self._curves) > MOST_MEASURED:
                self._curves.popitem(last=False)
            _read_on(run, curves)
            return self._row(name, run, self._locked_files()), replace(curves)

    def _locked_files(self) -> frozenset[int]:
        """As the system listed them a moment ago."""
        if time.monotonic() - self._listed >= LOCK_SECONDS:
            self._locks, self._listed = locked_files(), time.monotonic()
        return self._locks

    def _resting(self, name: str, locks: frozenset[int]) -> Row | None:
        """The row of a run on which nobody works: nobody holds its lock, nothing is new in its directory, and a while
        ago nothing was new in its files."""
        known, path = self._known.get(name), f"{self.folder.path}/{name}"
        if known is None or known.is_at_work(locks) or trace(path) != known.traced.directory:
            return None
        if time.monotonic() - known.looked >= REST_SECONDS:
            known.looked = time.monotonic()
            return known.row if traces(RunDirectory(path)) == known.traced else None
        return known.row

    def _row(self, name: str, run: RunDirectory, locks: frozenset[int]) -> Row:
        known, traced = self._known.get(name), traces(run)
        if known is not None and known.traced == traced and not known.is_at_work(locks):
            return known.row
        plan = known.plan if known is not None and known.traced.plan == traced.plan else decided(run)
        known = self._known[name] = _Known(traced, row(name, run, plan, locks), plan, time.monotonic())
        return known.row

    def log(self, name: str) -> str:
        """The end of a run's log. Raises ``UserError`` where there is no run."""
        return _end(self.folder.run(name).log)

    def output(self, name: str, rank: int) -> str:
        """The end of what a worker printed. Raises ``UserError`` where there is no run."""
        return _end(self.folder.run(name).worker_log(rank))

    def restarts(self, name: str) -> list[int]:
        """The steps with which a run was begun again. Raises ``UserError`` where there is no run."""
        return [int(step) for _, step in BEGUN.findall(self.log(name))][1:]


def _end(path: Any) -> str:
    content = read_end(path, LOG_BYTES)
    if len(content) == LOG_BYTES:
        content = content.partition(b"\n")[2]
    return content.decode(errors="replace")


def _read_on(run: RunDirectory, curves: Curves) -> None:
    """Take in what was written since the last look; a last line that is still being written waits for its end."""
    if not run.metrics.is_file():
        return
    status = run.metrics.stat()
    if status.st_size < curves.offset or (curves.inode and status.st_ino != curves.inode):
        curves.measured, curves.offset, curves.version = Measured(), 0, curves.version + 1
    curves.inode = status.st_ino
    if status.st_size > RECORD_BYTES:
        needed = f"records of at most {RECORD_BYTES:,} bytes"
        raise user_error(f"{status.st_size:,} bytes", needed, where=str(run.metrics))
    with run.metrics.open("rb") as file:
        file.seek(curves.offset)
        while piece := file.read(PIECE_BYTES):
            whole, newline, rest = piece.rpartition(b"\n")
            file.seek(-len(rest), 1)
            if not newline:
                break
            _take(run, curves.measured, [line for line in whole.split(b"\n") if line])
            curves.offset += len(whole) + 1


def _take(run: RunDirectory, measured: Measured, lines: list[bytes]) -> None:
    """Add the records of whole lines: all at once, or, where any is none, one by one. Raises ``UserError``."""
    try:
        content = b"[%s]" % b",".join(lines)
        _of_metrics().validate_json(content, strict=True)
        measured.take(from_json(content, allow_inf_nan=False))
    except (ValueError, OverflowError, RecursionError):  # pydantic's is a ValueError
        checked = (metrics_record(line, str(run.metrics)) for line in lines)
        measured.take([record for record in checked if record is not None])


@cache
def _of_metrics() -> TypeAdapter[list[MetricsRecord]]:
    return TypeAdapter(list[MetricsRecord])
