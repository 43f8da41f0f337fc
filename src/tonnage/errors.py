"""What can go wrong, and whose fault it is.

    TonnageError            anything tonnage raises on purpose
    ├── UserError           the user can mend it: exit status 2, no traceback, every problem listed at once
    │   └── OutputLost      what is printed could not be written: a full disk, or a reader who left (141, in silence)
    ├── DiskFailed          a disk could not read or write: exit status 1, what was saved before is whole
    ├── WorkerFailed        a worker process died: exit status 1, its first error shown whole
    └── Stalled             a worker got nowhere for too long: exit status 1, with the position of every worker

Anything else that escapes is a defect of ours: exit status 1, with the traceback.
"""

from __future__ import annotations

import errno
import html
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


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
    """One or more problems that the user can mend, reported together.

    ``problems`` are those: each with ``where`` it is, what was ``found``, what was ``needed``, and what to ``change``.

    Example:
        >>> try:
        ...     tonnage.plan("tiny", "rows.jsonl", optimizer={"lr": "fast"})
        ... except tonnage.UserError as error:
        ...     print(error.problems[0].found)
        optimizer.lr is 'fast'
    """

    exit_status = 2

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))

    def _repr_markdown_(self) -> str:
        """For notebooks: a list of the problems."""
        return "\n".join(f"* {problem}".replace("\n  ", "  \n  ") for problem in self.problems)

    def _repr_html_(self) -> str:
        """For notebooks: the problems as they are printed."""
        return f"<pre>{html.escape(str(self))}</pre>"


def user_error(found: str, needed: str, change: str = "", where: str = "") -> UserError:
    """One problem, of its parts, as an error."""
    return UserError(Problem(found, needed, change, where))


class DiskFailed(TonnageError):
    """A file could not be read or written, or does not hold what was written. The message names it and the place."""


class WorkerFailed(TonnageError):
    """A worker died. The message holds the first error, whole, with its rank."""


class Stalled(TonnageError):
    """A run got nowhere for longer than it may. The message says where every worker is."""


class OutputLost(UserError):
    """Standard output takes nothing more."""

    def __init__(self, problem: Problem, *, reader_left: bool = False) -> None:
        """``reader_left``: it was a pipe whose reader has ended, as `head` does; nobody wants to hear of it."""
        super().__init__(problem)
        self.reader_left = reader_left
        if reader_left:
            self.exit_status = 141  # as of a program that SIGPIPE ended


LONGEST_NAME = 200
"""Letters of a path that are told."""
ROOM = (errno.ENOSPC, errno.EDQUOT)
REFUSALS = {
    errno.ENOSPC: ("room on the disk", "make room, or name a place on another disk"),
    errno.EDQUOT: ("room within the quota", "make room, or name a place on another disk"),
    errno.EFBIG: ("a file system and a limit (ulimit -f) that take files of this size", "name another place"),
    errno.EROFS: ("a place with write access", "name another place"),
    errno.EACCES: ("a place with read and write access", "change its owner or its mode, or name another place"),
    errno.EPERM: ("a place with read and write access", "change its owner or its mode, or name another place"),
    errno.EIO: ("a disk that reads and writes", "look at the system's log (dmesg), and name another place"),
    errno.ESTALE: ("a file server that answers", "mount it again, or name another place"),
    errno.ENODEV: ("a device that is there", "name another place"),
    errno.ENXIO: ("a device that is there", "name another place"),
    errno.EBUSY: ("a file that nobody else holds", "wait for its end, or name another place"),
    errno.ENAMETOOLONG: ("a name of at most 255 bytes in a path of at most 4,095", "write a shorter name"),
    errno.ENOENT: (
        "a file that is there, in a directory that takes new ones",
        "put it back if it was removed, or name another place",
    ),
    errno.ENOTSUP: ("a regular file, or none", "name another place: it is a link, a device or a pipe"),
    errno.ENOTDIR: ("directories all along the path", "name another place: a part of it is a file"),
    errno.EISDIR: ("a file", "name a file: it is a directory"),
    errno.EEXIST: ("a directory", "name another place: it is a file"),
    errno.ELOOP: ("links that lead somewhere", "mend the link, or name another place"),
    errno.EMFILE: ("more open files", "raise the limit: ulimit -n"),
    errno.ENFILE: ("more open files on this machine", "end something else"),
    errno.ENOMEM: ("memory", "end something else"),
}
"""What the system refuses for a reason that the user can mend -> what it takes, and what to do. Any other number is
news of a defect of ours."""


def refused(error: OSError, failure: str = "", path: str | Path | None = None, *, change: str = "") -> UserError | None:
    """The ``UserError`` for something that the system refused and the user can mend; None if the user cannot.

    ``failure`` says what could not be done (``the export could not be written``). ``path`` is where; by default it is
    the one that the error names. ``change`` replaces the usual advice.
    """
    if error.errno not in REFUSALS:
        return None
    needed, usual = REFUSALS[error.errno]
    where = path or _named(error)
    where = where if len(str(where)) <= LONGEST_NAME else f"{str(where)[:LONGEST_NAME]}..."
    reason = os.strerror(error.errno)
    observed = f"{failure}: {reason}" if failure else reason
    if error.errno in ROOM and where:
        with suppress(OSError):
            existing = next((place for place in (Path(where), *Path(where).parents) if place.exists()), Path(where))
            observed += f" ({shutil.disk_usage(existing).free:,} bytes are free)"
    return UserError(Problem(observed, needed, change or usual, str(where or "")))


def _named(error: OSError) -> str:
    name = error.filename2 or error.filename
    return os.fsdecode(name) if isinstance(name, str | bytes) else ""


def _lies_together(named: str, path: Path) -> bool:
    """Whether the file that an error names, if any, is ``path``, in it, or on the way to it."""
    if not named:
        return True
    one, other = Path(named).absolute(), path.absolute()
    return one.is_relative_to(other) or other.is_relative_to(one) or one.parent == other.parent


_NUMBER_IN_WORDS = re.compile(r"\(os error (\d+)\)")


@contextmanager
def refusals(failure: str, path: str | Path | None = None) -> Iterator[None]:
    """Turn what the system refuses within the block into a ``UserError`` that names ``failure`` and ``path`` (see
    ``refused``). If the error names an unrelated file, the ``UserError`` names that file alone.

    Libraries that are written in Rust (tokenizers, safetensors) raise errors of their own, whose text holds the
    system's error number; those count as well.
    """
    try:
        yield
    except OSError as error:
        is_other = path is not None and not _lies_together(_named(error), Path(path))
        explained = refused(error) if is_other else refused(error, failure, path)
        if explained is None:
            raise
        raise explained from error
    except Exception as error:
        number_in_words = None if isinstance(error, TonnageError) else _NUMBER_IN_WORDS.search(str(error))
        number = int(number_in_words[1]) if number_in_words else 0
        if (explained := refused(OSError(number, os.strerror(number)), failure, path)) is None:
            raise
        raise explained from error
