"""What can go wrong, and whose fault it is.

    TonnageError            anything tonnage raises on purpose
    ├── UserError           the user can mend it: exit status 2, no traceback, every problem listed at once
    ├── DiskFailed          a disk could not read or write: exit status 1, what was saved before is whole
    ├── WorkerFailed        a worker process died: exit status 1, its first error shown whole
    └── Stalled             a worker got nowhere for too long: exit status 1, with the position of every worker

Anything else that escapes is a defect of ours: exit status 1, with the traceback.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that must change: what was found, what was needed, and what to do about it."""

    found: str
    needed: str
    change: str = ""
    where: str = ""
    """A file, a file with a line (``config.yaml:12``), or a dotted key (``data.train``)."""

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.found}" if self.where else self.found, f"  needed: {self.needed}"]
        if self.change:
            lines.append(f"  change: {self.change}")
        return "\n".join(lines)


class TonnageError(Exception):
    """Root of everything tonnage raises on purpose."""

    exit_status = 1


class UserError(TonnageError):
    """One or more problems that the user can mend, reported together."""

    exit_status = 2

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class DiskFailed(TonnageError):
    """A file could not be read or written, or does not hold what was written. The message names it and the place."""


class WorkerFailed(TonnageError):
    """A worker died. The message holds the first error, whole, with its rank."""


class Stalled(TonnageError):
    """A run got nowhere for longer than it may. The message says where every worker is."""
