"""What runs on the nodes of a Ray cluster: one actor of Ray Train for each worker, which starts it and watches it.

    Ray's controller ──► actor 0 .. N-1      a thread of each: ``train_worker``
                           └── worker         a process of its own, the same as under torchrun
                           └── guardian       kills it if the actor vanishes, and with a node's daemon its actors do

A worker in a process of its own has the main thread, the signals and the memory that it has everywhere, can be ended
without the actor, and leaves Ray's libraries outside. Ray chooses the ranks and says where rank 0 listens.

The actors look at the run's directory and at each other: once a second rank 0's tells the others which checkpoints are
new, so that all report the same ones, and whether the run is over. Checkpoints are reported by path; nothing is copied.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray.train
import ray.util
from ray.train.backend import Backend, BackendConfig
from ray.train.collective import broadcast_from_rank_zero

from tonnage.errors import Problem, UserError, WorkerFailed
from tonnage.files.writing import close_to_others
from tonnage.launch.local import GRACE_SECONDS, Crew, reserved_port
from tonnage.launch.watch import DONE, STOPPED, WATCH_SECONDS
from tonnage.rundir.directory import LAUNCHER, RunDirectory, complete_checkpoints, step_of
from tonnage.rundir.stalls import StallWatchdog

LOOK_SECONDS = 0.25
ROUND_SECONDS = 2.0
"""Between two exchanges of the actors."""
CAUSE_SECONDS = 2.0
"""For the mistake that made the others fail to be written down."""
REFUSED = UserError.exit_status


class RunRefused(Exception):
    """The run cannot be carried out here, however often it is tried; the problems as JSON."""

    def problems(self) -> list[Problem]:
        return [Problem(**problem) for problem in json.loads(self.args[0])]


class WorkerLost(Exception):
    """A worker ended before its work was done. The run directory says why."""


class Rendezvous(BackendConfig):  # type: ignore[misc]
    """Tells Ray Train to make the workers find one another, and to leave process groups to them."""

    def __init__(self, run: str) -> None:
        self.backend = "own"
        self.run = run

    @property
    def backend_cls(self) -> type[Backend]:
        return _Meeting

    @property
    def train_func_context(self) -> Any:
        """None: an actor never touches a GPU."""
        return nullcontext


class _Meeting(Backend):  # type: ignore[misc]
    """At every start and end of a group of workers."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Rendezvous) -> None:
        """Refuse nodes that do not see the run; give all of them rank 0's address."""
        blind = [host for host in worker_group.execute(_host_without, backend_config.run) if host]
        if blind:
            problem = Problem(
                found=f"no run at {backend_config.run} on {', '.join(dict.fromkeys(blind))}",
                needed="a run directory on a file system that all nodes share",
                change="write output=... on one, or mount it there",
                where="output",
            )
            raise RunRefused(json.dumps([asdict(problem)]))
        address, port = worker_group.execute_single(0, _reserve_port)
        worker_group.execute(_announce, address, port)

    def on_shutdown(self, worker_group: Any, backend_config: Rendezvous) -> None:
        """End the workers before their actors: they save first if all are well, as where the group is resized."""
        all_run = all(worker_group.execute(_is_running))
        worker_group.execute(_end, save=all_run)


class _Actor:
    """What an actor's process keeps between the calls of Ray: its worker, and the port that is kept for it."""

    crew: Crew | None = None
    timeout = 0.0
    kept = contextlib.ExitStack()


def train_worker(settings: Mapping[str, Any]) -> int:
    """Run one worker to its end: 0 done, 3 stopped as asked, 2 refused; only rank 0's counts.

    Raises:
        WorkerLost: it ended otherwise.
    """
    close_to_others()
    run, context = RunDirectory(settings["run"]), ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    if broadcast_from_rank_zero(run.stop_asked.exists()):  # between two starts
        return STOPPED
    reported = _Reports(run, settings["since"])
    directory = Path(settings["directory"])
    with Crew(run, size) as crew:
        _Actor.crew, _Actor.timeout = crew, settings["timeout"]
        command = settings["command"] or [sys.executable, "-m", "tonnage.training.worker", str(run.path)]
        crew.start(
            command, rank, _environment(rank, size, context), directory=directory if directory.is_dir() else None
        )
        asked_to_stop, looked, watchdog = False, 0.0, StallWatchdog(run, size, settings["timeout"])
        end: int | None = None
        while end is None:
            is_running = crew.update()
            status = crew.workers[0].exit_status
            if not is_running and status not in (DONE, STOPPED, REFUSED):
                _note_loss(run, crew, size)
                if not _refusals(run):
                    raise WorkerLost(crew.describe(crew.workers[0]))
            if is_running and rank == 0 and watchdog.stalled([*crew.processes(), *[None] * (size - 1)]):
                crew.end_processes(GRACE_SECONDS)
            if not asked_to_stop and run.stop_asked.exists():
                crew.signal(signal.SIGTERM)
                asked_to_stop = True
            if time.monotonic() - looked > ROUND_SECONDS or (not is_running and rank == 0):
                state = None
                if rank == 0:  # which says what is new, and how the run has ended, or None while it goes on
                    state = (reported.new(), REFUSED if _refusals(run) else crew.workers[0].exit_status)
                new, end = broadcast_from_rank_zero(state)
                reported.report(new, rank)
                looked = time.monotonic()
            time.sleep(LOOK_SECONDS)
        if end == REFUSED:
            crew.stop(GRACE_SECONDS)
        while crew.update():
            time.sleep(WATCH_SECONDS)
        if crew.failed() and not _refusals(run):
            _note_loss(run, crew, size)
            raise WorkerLost(crew.describe(crew.workers[0]))
        return end


class _Reports:
    """Which checkpoints Ray knows of."""

    def __init__(self, run: RunDirectory, since: int) -> None:
        self._run = run
        known = ray.train.get_checkpoint()
        self._step = since if known is None else max(since, step_of(Path(known.path)))

    def new(self) -> list[str]:
        """Complete checkpoints that were not reported yet, oldest first."""
        return [path.name for path in complete_checkpoints(self._run.checkpoints) if step_of(path) > self._step]

    def report(self, names: list[str], rank: int) -> None:
        """Report them; every rank calls this, and rank 0 says where they are."""
        for name in names:
            self._step = step_of(Path(name))
            path = self._run.checkpoints / name
            ray.train.report(
                self._metrics(self._step) if rank == 0 else {},
                checkpoint=ray.train.Checkpoint.from_directory(path) if rank == 0 and path.exists() else None,
                checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
            )

    def _metrics(self, step: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for record in self._run.read_metrics():
            if record.get("step") == step:
                found |= {key: value for key, value in record.items() if isinstance(value, int | float)}
        return found


def _refusals(run: RunDirectory) -> bool:
    """Whether a worker has met a mistake of the user's, which no new start would mend."""
    return any(account.exit_status == REFUSED for account in run.read_errors())


def _note_loss(run: RunDirectory, crew: Crew, size: int) -> None:
    """Write down the end of a worker that could not do so itself; then wait for what may have caused it."""
    worker = crew.workers[0]
    if not run.worker_error(worker.rank).exists():
        run.write_error(worker.rank, WorkerFailed(crew.describe(worker)), 1, worker.last_seen_alive)
    deadline = time.monotonic() + CAUSE_SECONDS
    while size > 1 and time.monotonic() < deadline and not _refusals(run):
        time.sleep(WATCH_SECONDS)


def _environment(rank: int, size: int, context: Any) -> dict[str, str]:
    return {
        **os.environ,
        LAUNCHER: "ray",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def _host_without(run: str) -> str:
    """This actor's node, if it does not see a run there."""
    return "" if RunDirectory(run).plan.exists() else str(ray.util.get_node_ip_address())


def _reserve_port() -> tuple[str, int]:
    """Where rank 0's worker will listen; nobody else gets the port."""
    return str(ray.util.get_node_ip_address()), _Actor.kept.enter_context(reserved_port(""))


def _announce(address: str, port: int) -> None:
    os.environ.update({"MASTER_ADDR": address, "MASTER_PORT": str(port)})


def _is_running() -> bool:
    crew = _Actor.crew
    return crew is not None and any(worker.process.poll() is None for worker in crew.workers)


def _end(save: bool) -> None:
    """End this actor's worker; with ``save``, after it has saved at the end of its step."""
    if _Actor.crew is not None:
        _Actor.crew.end_processes(_Actor.timeout if save else GRACE_SECONDS)
