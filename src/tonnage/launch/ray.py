"""The workers through Ray Train: on this machine, or on the nodes of a cluster that come and go.

    tonnage train ──► ray_trainer ──► Ray Train's controller ──► actors (ray_workers) ──► workers
         │  a process of its own                                                             │
         └── follows: workers/ray.json, the run directory ◄──────────────────────────────────┘

Ray is an extra, and only the trainer's process and the actors load it. All that passes between it and this command is
files: a stop is asked for by one, and how it ended is written in another.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tonnage.config import RayLaunch
from tonnage.errors import Problem, TonnageError, UserError, WorkerFailed, user_error
from tonnage.files.reading import read_json
from tonnage.launch.failures import as_error, tail, without_account
from tonnage.launch.local import Crew
from tonnage.launch.watch import AtWork, signal_name
from tonnage.rundir.directory import RunDirectory

OUTCOMES = {"status", "problems", "lost"}
"""In ``ray.json`` when the run is over."""
SILENCE_SECONDS = 30.0
"""After which a trainer that says nothing is taken to be dead."""
READ_SECONDS = 0.5
START_SECONDS = 60.0
"""For Ray to start the first worker where there is room and nobody else uses it."""
GIVE_UP_SECONDS = 10.0
"""For the trainer to end when there are no workers that could save."""


def check_installed() -> None:
    """Refuse an environment without Ray. Raises ``UserError``."""
    if importlib.util.find_spec("ray") is None:
        raise user_error(
            found="launch.with is ray, and Ray is not installed",
            needed="Ray Train",
            change="pip install 'tonnage[ray]', or set launch.with to local",
            where="launch.with",
        )


@contextlib.contextmanager
def started(launch: RayLaunch, run: RunDirectory, *, command: Sequence[str] = ()) -> Iterator[AtWork]:
    """Workers of Ray. ``command`` is what each executes, by default the training worker.

    On leaving the context nothing of them is left running. Raises ``UserError``.
    """
    check_installed()
    run.clear_traces()
    run.ray.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    path, numbers = str(run.path.absolute()), (str(launch.num_workers), str(launch.num_gpus))
    trainer = [sys.executable, "-m", "tonnage.launch.ray_trainer", path, *numbers, *command]
    with Crew(run, 1) as crew:
        crew.start(trainer, 0, environment, log=run.workers / "ray.log")
        yield RayWorkers(launch, run, crew)


class RayWorkers(AtWork):
    """Workers that Ray starts, as far as the process tells that speaks to it: the only one of ``crew``."""

    def __init__(self, launch: RayLaunch, run: RunDirectory, crew: Crew) -> None:
        self._launch, self._run, self._crew = launch, run, crew
        self._began, self._read = time.monotonic(), 0.0
        self._asked_at: float | None = None
        self._idle_since: float | None = None

    def look(self) -> int | None:
        if not self._crew.update():
            return _outcome(self._run, self._launch.num_workers, self._crew.workers[0].exit_status)
        if self._asked_at is None and self._run.stop_asked.exists():
            self._asked_at = time.monotonic()
        if self._has_no_room() and self._asked_at is not None and time.monotonic() > self._asked_at + GIVE_UP_SECONDS:
            self.kill()
            raise KeyboardInterrupt
        return None

    def ask_to_stop(self, who: str) -> None:
        if self._asked_at is None:
            self._run.stop_asked.write_text(who)
            self._asked_at = time.monotonic()

    def kill(self) -> None:
        self._crew.stop(0)
        self._run.ray.unlink(missing_ok=True)  # it would say for half a minute that somebody works on the run

    def _has_no_room(self) -> bool:
        """Whether Ray has no room for the workers. Raises ``UserError`` once that has been so for too long."""
        now = time.monotonic()
        if now < self._read + READ_SECONDS:
            return self._idle_since is not None
        self._read, note = now, _note(self._run)
        if note.get("room", self._launch.fewest_workers) >= self._launch.fewest_workers:
            self._idle_since = None
            is_held_up = "asked" in note and not self._run.worker_log(0).exists() and now > self._began + START_SECONDS
            self.waits_for = (
                f"waiting for Ray to place {note['asked']} ({note['there']}, in part in use)" if is_held_up else ""
            )
            return False
        self._idle_since = self._idle_since or now
        self.waits_for = f"waiting for Ray: {note['asked']} asked for, room for {note['room']} ({note['there']})"
        if now > self._idle_since + self._launch.wait_seconds:
            raise user_error(
                found=f"room for {note['room']} worker(s) for {self._launch.wait_seconds:g} s: {note['there']}",
                needed=note["asked"],
                change="add nodes, or lower launch.workers, launch.cpus_per_worker or launch.gpus_per_worker; "
                "launch.wait_seconds is how long a run waits",
                where="launch",
            )
        return True


def is_working(run: RunDirectory) -> bool:
    """Whether a trainer works on this run, be it between two groups of workers: it says so every few seconds."""
    note = _note(run)
    try:
        age = time.time() - run.ray.stat().st_mtime
    except OSError:
        return False
    return not OUTCOMES & note.keys() and age < SILENCE_SECONDS


def _outcome(run: RunDirectory, num_workers: int, exit_status: int | None) -> int:
    """How the run ended. Returns and raises as ``AtWork.look``."""
    note = _note(run)
    if exit_status != 0 or not OUTCOMES & note.keys():
        raise _trainer_failed(run, exit_status)
    if problems := note.get("problems"):
        raise UserError(*(Problem(**problem) for problem in problems))
    errors = run.read_errors()
    if note.get("lost"):  # what Ray lost is the cause of what the others complain of
        raise _lost(note["lost"], run, num_workers)
    if "lost" in note or note["status"] == UserError.exit_status:
        mistakes = [account for account in errors if account.exit_status == UserError.exit_status]
        for account in mistakes or errors:
            raise as_error(account, num_workers, run.worker_log(account.rank))
        raise without_account("the workers ended without an account", run.worker_log(0))
    return int(note["status"])


def _lost(what: str, run: RunDirectory, num_workers: int) -> TonnageError:
    lines = [f"Ray lost what the run needs: {what}"]
    for account in run.read_errors()[:1]:
        lines += ["", str(as_error(account, num_workers, run.worker_log(account.rank)))]
    return WorkerFailed("\n".join([*lines, "", f"to go on: tonnage train --resume {run.word}"]))


def _trainer_failed(run: RunDirectory, exit_status: int | None) -> TonnageError:
    """The error where Ray itself did not start or broke, with the last lines of its log."""
    log = run.workers / "ray.log"
    last = tail(log)
    if any("ConnectionError" in line or "Could not find any running Ray instance" in line for line in last):
        return user_error(
            found=f"no Ray cluster: {last[-1].strip()}",
            needed="a running cluster of which this machine is a node",
            change="ray start --address=HEAD here, another launch.address, or none for Ray on this machine",
            where="launch.address",
        )
    ended = signal_name(-exit_status) if exit_status and exit_status < 0 else f"exit status {exit_status}"
    return without_account(f"the process that speaks to Ray ended with {ended}", log)


def _note(run: RunDirectory) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        note = read_json(run.ray)
        if isinstance(note, dict):
            return note
    return {}
