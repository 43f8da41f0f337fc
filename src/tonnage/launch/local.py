"""N workers as processes of this machine: start them, watch them, end them.

    launcher ──┬── worker 0 .. N-1    each in a process group of its own, output to workers/rank-N.log
               └── guardian           kills the groups if the launcher vanishes (guardian.py)

Where there is a fork server (forkserver.py) it forks the workers; else each is a Python of its own, which imports
everything.

The training worker ends by itself as well when its launcher is gone (training.worker): the guardian may be gone too, or
not have been told of it yet.

The launcher only starts, watches and signals: what a worker does, and how the workers find one another from
the variables they are given (RANK, WORLD_SIZE, MASTER_ADDR ...), is theirs and torch's. Everything it knows
of a worker's inside it reads from the run directory.

What ends a run:

* All workers exit with 0 (done) or 3 (stopped as asked, saved): so does the launcher.
* A worker fails: the others get SIGTERM, then SIGKILL after ``GRACE_SECONDS``; the earliest failure is
  raised. A worker's own account (``rank-N.error.json``) carries the time of its failure. A worker that left
  none is dated to when it was last seen alive: peers of a killed one complain of lost connections *later*.
* All workers stand still (stopped, swapped out) for ``launch.timeout``, so none is left to say so: they are killed.
* Somebody asks for it in the run directory (``tonnage stop``): the workers look there at every step border.
* A signal to the launcher (Ctrl-C, SIGTERM, SIGUSR1 as schedulers send before they end a job, a lost terminal): the
  workers get SIGTERM once and take the time they need to finish their step and save: at most a step, the save that is
  under way, and a save. A second signal kills them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tonnage.errors import TonnageError, WorkerFailed
from tonnage.launch import guardian
from tonnage.launch.failures import as_error, name_of, without_account
from tonnage.launch.forkserver import Forked, ForkServer
from tonnage.launch.watch import DONE, STOPPED, WATCH_SECONDS, AtWork, signal_name, to_their_end
from tonnage.rundir.directory import LAUNCHER, LAUNCHER_PROCESS, RunDirectory
from tonnage.rundir.stalls import StallWatchdog

GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL for the peers of a worker that failed: they wait for it in a collective."""
ADDRESS = "127.0.0.1"


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[bytes] | Forked
    last_seen_alive: float = field(default_factory=time.time)
    exit_status: int | None = None
    """As of ``subprocess``: the negative signal number if a signal ended it; None while it runs."""


def run_workers(
    run: RunDirectory,
    num_workers: int,
    threads: int,
    *,
    poll: Callable[[], None] | None = None,
    command: Sequence[str] | None = None,
    keep_open: Sequence[int] = (),
    timeout: float | None = None,
    forkserver: ForkServer | None = None,
) -> int:
    """Run workers on this machine until all have ended.

    ``command`` is what each worker executes, by default the training worker on ``run``; a ``forkserver`` forks those
    that are modules (``python -m``). ``poll`` is called about ten times a second. ``threads`` is the number of CPU
    threads of each worker. ``keep_open`` are descriptors that workers inherit, such as that of the run's lock.
    ``timeout`` is for how many seconds all workers may stand still; None for those that note no positions.

    Returns 0 when done, 3 when stopped as asked with everything saved. Raises ``UserError`` or ``WorkerFailed`` with
    the first failure, ``KeyboardInterrupt`` if a stop was asked for and workers ended before they could save. No worker
    is left running, whichever way this ends.
    """
    workers = started(
        run, num_workers, threads, command=command, keep_open=keep_open, timeout=timeout, forkserver=forkserver
    )
    return to_their_end(workers, poll)


@contextlib.contextmanager
def started(
    run: RunDirectory,
    num_workers: int,
    threads: int,
    *,
    command: Sequence[str] | None = None,
    keep_open: Sequence[int] = (),
    timeout: float | None = None,
    forkserver: ForkServer | None = None,
) -> Iterator[AtWork]:
    """Workers on this machine, for whoever looks at them again and again; arguments as of ``run_workers``.

    On leaving the context no worker is left running.
    """
    command = command or [sys.executable, "-m", "tonnage.training.worker", str(run.path)]
    run.clear_traces()
    watchdog = None if timeout is None else StallWatchdog(run, num_workers, timeout)
    with reserved_port() as port, Crew(run, num_workers, keep_open, forkserver) as crew:
        for rank in range(num_workers):
            crew.start(command, rank, _environment(rank, num_workers, threads, port))
        yield LocalWorkers(run, crew, watchdog)


class LocalWorkers(AtWork):
    def __init__(self, run: RunDirectory, crew: Crew, watchdog: StallWatchdog | None) -> None:
        self._run, self._crew, self._watchdog = run, crew, watchdog
        self._is_asked = False

    def look(self) -> int | None:
        crew = self._crew
        is_working = crew.update()
        if crew.failed():
            crew.update()  # who has ended since was not ended by us, and may have been the first
            crew.stop(GRACE_SECONDS)
        elif is_working:
            if self._watchdog is not None and (message := self._watchdog.stalled(crew.processes())):
                crew.stop(GRACE_SECONDS)
                raise WorkerFailed(message)
            return None
        if failed := crew.failed():
            if self._is_asked and all(worker.exit_status == -signal.SIGTERM for worker in failed):
                raise KeyboardInterrupt  # ended before they were ready to save
            raise crew.first_failure(failed)
        return STOPPED if any(worker.exit_status == STOPPED for worker in crew.workers) else DONE

    def ask_to_stop(self, who: str) -> None:
        if self._is_asked:
            return
        self._is_asked = True
        self._run.note_stop(who)  # and if that fails, the signal tells them
        self._crew.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._crew.stop(0)


class Crew:
    """The workers of one run and their guardian. On leaving the context nothing of it is left running."""

    def __init__(
        self, run: RunDirectory, num_workers: int, keep_open: Sequence[int] = (), forkserver: ForkServer | None = None
    ) -> None:
        self._run = run
        self._forkserver = forkserver
        self._keep_open = tuple(keep_open)
        self._num_workers = num_workers
        self.workers: list[Worker] = []

    def __enter__(self) -> Crew:
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guardian.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0)
        with contextlib.suppress(BrokenPipeError):
            self._guardian.communicate()

    def start(
        self,
        command: Sequence[str],
        rank: int,
        environment: dict[str, str],
        *,
        directory: Path | None = None,
        log: Path | None = None,
    ) -> None:
        """Start one worker in ``directory``, its output added to ``log``, by default that of its rank."""
        process: subprocess.Popen[bytes] | Forked
        with (log or self._run.worker_log(rank)).open("ab") as output:
            if self._forkserver is not None and list(command[:2]) == [sys.executable, "-m"]:
                process = self._forkserver.fork(
                    command[2],
                    command[3:],
                    environment,
                    output=output.fileno(),
                    keep_open=self._keep_open,
                    directory=directory,
                )
            else:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    pass_fds=self._keep_open,
                )
        self._tell_guardian(f"+{process.pid}")
        self.workers.append(Worker(rank, process))

    def update(self) -> bool:
        """Look at every worker; whether any still runs."""
        for worker in self._running():
            status = worker.process.poll()
            if status is None:
                worker.last_seen_alive = time.time()
                continue
            worker.exit_status = status
            _kill_group(worker.process.pid)  # processes that the worker started
            self._tell_guardian(f"-{worker.process.pid}")
        return bool(self._running())

    def processes(self) -> list[int | None]:
        """The process of every worker; None for one that has ended."""
        return [worker.process.pid if worker.exit_status is None else None for worker in self.workers]

    def failed(self) -> list[Worker]:
        """Workers that ended other than well."""
        return [worker for worker in self.workers if worker.exit_status not in (None, DONE, STOPPED)]

    def signal(self, number: signal.Signals) -> None:
        for worker in self._running():
            worker.process.send_signal(number)

    def end_processes(self, grace_seconds: float) -> None:
        """SIGTERM, then SIGKILL, to all workers that still run; what became of them is for ``update`` to see."""
        deadline = time.monotonic() + grace_seconds
        if grace_seconds:
            self.signal(signal.SIGTERM)
            while any(worker.process.poll() is None for worker in self._running()) and time.monotonic() < deadline:
                time.sleep(WATCH_SECONDS / 2)
        for worker in self._running():
            if worker.process.poll() is None:
                _kill_group(worker.process.pid)

    def stop(self, grace_seconds: float) -> None:
        """End all workers and wait for them. Dying of this is not a failure."""
        asked = self._running()
        self.end_processes(grace_seconds)
        for worker in asked:
            status = worker.process.wait()
            ours = status in (-signal.SIGTERM, -signal.SIGKILL) or status in (DONE, STOPPED)
            worker.exit_status = STOPPED if ours else status
            _kill_group(worker.process.pid)

    def first_failure(self, failed: Sequence[Worker]) -> TonnageError:
        """The earliest failure, as an error that says everything that is known of it.

        It may be that of a worker that left its account and was ended, on the way out, because a peer had failed.
        """
        accounts = {account.rank: account for account in self._run.read_errors()}
        candidates = [*failed, *(worker for worker in self.workers if worker.rank in accounts)]

        def seconds(worker: Worker) -> float:
            account = accounts.get(worker.rank)
            return worker.last_seen_alive if account is None else account.seconds

        first = min(candidates, key=seconds)
        account, log = accounts.get(first.rank), self._run.worker_log(first.rank)
        if account is not None:
            return as_error(account, self._num_workers, log)
        return without_account(self.describe(first), log)

    def describe(self, worker: Worker) -> str:
        """How a worker ended that left no account."""
        who = name_of(worker.rank, self._num_workers)
        assert worker.exit_status is not None
        if worker.exit_status >= 0:
            return f"{who} ended with exit status {worker.exit_status} and left no error"
        hints = _SIGNAL_HINTS.get(-worker.exit_status, [])
        return "\n".join([f"{who} was killed by {signal_name(-worker.exit_status)}", *hints])

    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.exit_status is None]

    def _tell_guardian(self, line: str) -> None:
        assert self._guardian.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # someone killed it: the launcher still ends its workers itself
            self._guardian.stdin.write(line + "\n")
            self._guardian.stdin.flush()


_SIGNAL_HINTS = {
    int(signal.SIGKILL): [
        "  most often the operating system does this when memory runs out: look in `dmesg`",
        "  change: fewer workers (launch.workers), a smaller memory.micro_batch or data.max_length",
    ],
    int(signal.SIGSEGV): ["  a fault in native code; the stack is in the worker's output"],
    int(signal.SIGTERM): ["  something outside this run asked it to end (a scheduler, a time limit, a person)"],
}


@contextlib.contextmanager
def reserved_port(address: str = ADDRESS) -> Iterator[int]:
    """A port of this machine on which worker 0 can listen and nobody else will, until the context is left.

    On Linux a bound socket that never listens keeps a port from everyone who does not ask to reuse the
    address; torch's store does ask. Elsewhere that is not so, and the port is only known to have been free
    a moment ago.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port


def _environment(rank: int, num_workers: int, threads: int, port: int) -> dict[str, str]:
    """What a worker finds in its environment: where it stands among the others, and its cores."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        LAUNCHER: "local",
        LAUNCHER_PROCESS: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
