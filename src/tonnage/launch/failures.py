"""From what workers left behind to one error: the earliest failure, with everything that is known of it."""

from __future__ import annotations

from pathlib import Path

from tonnage.errors import Problem, Stalled, TonnageError, UserError, WorkerFailed
from tonnage.rundir.records import WorkerError

TAIL_LINES = 15


def as_error(account: WorkerError, num_workers: int, log: Path) -> TonnageError:
    """A worker's own account of its end. ``log`` is where its output is."""
    if account.exit_status == UserError.exit_status:
        return UserError(*account.problems or [Problem(account.message, "a run without this error")])
    if account.kind == Stalled.__name__:
        return WorkerFailed(account.message)
    if account.kind == WorkerFailed.__name__:  # written by whoever started it
        return without_account(account.message, log)
    lines = [f"{name_of(account.rank, num_workers)} failed: {account.kind}: {account.message}", ""]
    return WorkerFailed("\n".join([*lines, account.trace.rstrip(), "", f"its output is in {log}"]))


def without_account(what: str, log: Path) -> WorkerFailed:
    """``what`` happened and nobody wrote down why: the last lines of ``log``."""
    lines = [what]
    if last := tail(log):
        lines += ["", "the last it wrote:", *(f"  {line}" for line in last)]
    return WorkerFailed("\n".join([*lines, "", f"its output is in {log}"]))


def name_of(rank: int, num_workers: int) -> str:
    """A worker as messages name it."""
    return f"worker {rank} (of {num_workers})"


def tail(path: Path) -> list[str]:
    """The last lines of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            return file.read().decode(errors="replace").rstrip().splitlines()[-TAIL_LINES:]
    except OSError:
        return []
