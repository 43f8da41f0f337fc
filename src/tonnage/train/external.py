"""What comes before the work where torchrun, mpirun or srun started the workers and no launcher of ours is there.

The workers find one another first. Then worker 0 does what a launcher would: it takes the run's lock, removes the
traces of an earlier launch, and brings the directory to where the run goes on, the newest complete checkpoint, or the
start where there is none. So the same command begins a run, goes on after a crash, and does nothing once the run is
done. The others wait for its word, and none touches the directory before: it may belong to a launch that works there.

What is wrong with the launch as a whole (another number of workers than planned, a directory in use) is an error on
every worker, before a weight is loaded.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from tonnage.checkpoint.resume import choose
from tonnage.checkpoint.save import complete_checkpoints, step_of
from tonnage.config import Config
from tonnage.errors import Problem, UserError
from tonnage.parallel.meeting import meet
from tonnage.parallel.place import Place
from tonnage.plan.plan import Plan
from tonnage.plan.space import check_space
from tonnage.rundir import RunDirectory, write_json

VERDICT, READ = "verdict", "verdict read"
FAREWELL_SECONDS = 10.0
"""How long worker 0 waits until the others have read why it ends: with it goes the store that says so."""


@contextlib.contextmanager
def admitted(run: RunDirectory, place: Place, config: Config, plan: Plan) -> Iterator[Store]:
    """Join the other workers; while the context is open, the run directory is theirs alone. Gives their store.

    Raises:
        UserError: on every worker, if the run cannot be carried out by this launch.
    """
    check_size(run, place, plan)
    run.workers.mkdir(parents=True, exist_ok=True)
    with meet(place, run.workers, config.launch.timeout) as store, contextlib.ExitStack() as held:
        if place.rank == 0:
            try:
                held.enter_context(run.locked())
                check_space(config, plan, len(_saved(run)), workers=place.local_size or 1)
                run.clear_traces(logs=False)
                go_on(run)
            except UserError as error:
                _tell(store, place, error.problems)
                raise
            except Exception as error:
                _tell(store, place, [Problem(f"worker 0 failed: {error}", "a run directory that it can write")])
                raise
            store.set(VERDICT, "[]")
        else:
            problems = [Problem(**problem) for problem in json.loads(store.get(VERDICT))]
            store.add(READ, 1)
            if problems:
                raise UserError(*problems)
        yield store


def check_size(run: RunDirectory, place: Place, plan: Plan) -> None:
    """Refuse another number of workers than planned, or data that this machine lacks. Raises ``UserError``."""
    if place.size != plan.workers:
        again = f"--resume {run.path}" if _saved(run) else "CONFIG"
        raise UserError(
            Problem(
                found=f"{place.size} worker(s) were started, and the run is planned for {plan.workers}",
                needed=f"{plan.workers} worker(s)",
                change=f"start {plan.workers}, or plan for {place.size}: "
                f"tonnage train {again} --prepare launch.workers={place.size}",
                where=str(run.plan),
            )
        )
    for path in (plan.data.train_path, plan.data.validation_path):
        if path is not None and not Path(path).exists():
            raise UserError(
                Problem(
                    found=f"the prepared data are not on this machine: {path}",
                    needed="a directory that all workers see",
                    change="prepare the run with data.cache on a file system that is shared",
                    where="data.cache",
                )
            )


def go_on(run: RunDirectory) -> None:
    """Bring the directory to its newest complete checkpoint, or to the start of the run if there is none.

    Raises:
        UserError: the newest checkpoint is damaged.
    """
    step = 0
    if _saved(run):
        checkpoint = choose(run.checkpoints)
        step = step_of(checkpoint)
        write_json(run.resume, {"checkpoint": checkpoint.name})
    else:
        run.resume.unlink(missing_ok=True)
    run.rewind_metrics(step)


def _saved(run: RunDirectory) -> list[Path]:
    return complete_checkpoints(run.checkpoints)


def _tell(store: Store, place: Place, problems: tuple[Problem, ...] | list[Problem]) -> None:
    """Let the others know why there will be no run, and wait until they do."""
    store.set(VERDICT, json.dumps([asdict(problem) for problem in problems]))
    deadline = time.monotonic() + FAREWELL_SECONDS
    while store.add(READ, 0) < place.size - 1 and time.monotonic() < deadline:
        time.sleep(0.05)
