"""Commands carried out in children of one process, each within bounds, and what became of them.

The parent imports everything once. A child has a process group of its own, reads what it is told to (nothing, or "y"
for ever), writes into files, and is watched: its wall clock, its processor time and its memory. What it leaves running
becomes a child of the parent (a subreaper), is named and ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SECONDS = 10.0
"""Of processor time, and of the wall clock where a child only waits."""
PATIENCE = 60.0
"""Of the wall clock, for a child that works on a busy machine."""
BYTES = 2 << 30
"""More than a child began with."""
LINES = 20_000
"""Of "y"."""
FILE_BYTES = 1 << 30
LOOK_SECONDS = 0.005
LEAVE_SECONDS = 3.0
"""For what a command started to end after it."""
PR_SET_CHILD_SUBREAPER = 36
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    status: int
    """Exit status; below 0 the signal that ended it."""
    out: str
    err: str
    seconds: float
    """Of its processor time."""
    wrong: str = ""
    """What the parent saw: too long, too much memory, something left running."""


class TerminalFile(io.TextIOWrapper):
    """A file that passes for a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def adopt_orphans() -> None:
    """Let whatever children leave behind become children of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def forked(
    work: Callable[[], int],
    folder: Path,
    *,
    says_yes: bool,
    terminal: bool,
    seconds: float = SECONDS,
    lines: int = LINES,
) -> Ended:
    """Have a child do ``work``, whose result is its exit status; ``folder`` is where its output goes.

    ``says_yes``: standard input is so many ``lines`` of "y"; else it is closed. ``terminal``: what it prints to is one.
    """
    yes = yes_file(folder, lines) if says_yes else None
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        _be_child(work, folder, yes, terminal, seconds)
    return watched(child, folder, seconds=seconds)


def yes_file(folder: Path, lines: int) -> Path:
    """A file that says "y" line after line."""
    path = folder / "yes"
    path.write_text("y\n" * lines)
    return path


def _renew_threads() -> None:
    """Have torch make its pool of threads anew while there is one thread: two that come to it first after a fork race,
    and one of them finds none ("Invalid thread pool!")."""
    import torch

    torch.set_num_threads(torch.get_num_threads())


def _be_child(work: Callable[[], int], folder: Path, yes: Path | None, terminal: bool, seconds: float) -> None:
    status = 1
    try:
        os.setsid()
        os.close(0)
        if yes is not None:
            os.open(yes, os.O_RDONLY)  # the lowest number that is free: 0
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, number)
            os.close(file)
        kind = TerminalFile if terminal else io.TextIOWrapper
        sys.stdin = os.fdopen(0, closefd=False) if yes is not None else None
        sys.stdout = kind(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
        sys.stderr = kind(io.FileIO(2, "w", closefd=False), encoding="utf-8", write_through=True)
        limit(seconds)
        _renew_threads()
        status = work()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def limit(seconds: float = SECONDS) -> None:
    """The bounds that the system itself keeps; memory is watched from outside, and this is behind that."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds * 3) + 1, int(seconds * 3) + 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + 2 * BYTES,) * 2)


def _data_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * PAGE


def watched(child: int, folder: Path, *, seconds: float = SECONDS) -> Ended:
    """Wait for a child within its bounds; its output is in ``folder``."""
    strangers = _children() - {child}
    began, wrong, first = time.monotonic(), "", 0
    used, waited, before = 0.0, 0.0, began
    pause = LOOK_SECONDS
    while True:
        ended, how, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        time.sleep(pause)
        pause = min(0.05, pause * 1.3)
        with contextlib.suppress(OSError, ValueError, IndexError):
            resident, shared = map(int, Path(f"/proc/{child}/statm").read_text().split()[1:3])
            own = (resident - shared) * PAGE
            first = first or own
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            now, spent = time.monotonic(), (int(fields[11]) + int(fields[12])) / TICKS
            if spent == used and fields[0] == "S":
                waited += now - before
            used, before = spent, now
            if own - first > BYTES:
                wrong = f"more than {BYTES:,} bytes of memory"
            elif spent > seconds:
                wrong = f"more than {seconds:g} s of processor time"
            elif waited > seconds:
                wrong = f"waited for more than {seconds:g} s"
        if time.monotonic() - began > max(PATIENCE, 3 * seconds):
            wrong = wrong or f"more than {PATIENCE:g} s"
        if wrong:
            with contextlib.suppress(OSError):
                os.killpg(child, signal.SIGKILL)
            ended, how, usage = os.wait4(child, 0)
            break
    left = _left_running(strangers)
    if left and not wrong:
        wrong = f"left running: {'; '.join(left)}"
    out, err = ((folder / name).read_text("utf-8", errors="surrogateescape") for name in ("out", "err"))
    status = os.waitstatus_to_exitcode(how)
    return Ended(status, out, err, usage.ru_utime + usage.ru_stime, wrong)


def _left_running(strangers: set[int]) -> list[str]:
    """End what is still there after a while, but for ``strangers``; returns how it was called."""
    until = time.monotonic() + LEAVE_SECONDS
    while there := _still_running(_children() - strangers):
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    found = []
    for pid in there:
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200])
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return found


def _children() -> set[int]:
    """Children of this process, those that have ended among them."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def _still_running(children: set[int]) -> set[int]:
    """Those that run; the others are waited for."""
    found = set(children)
    for pid in children:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                found.discard(pid)
    return found
