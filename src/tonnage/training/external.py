"""What comes before the work where torchrun, mpirun or srun started the workers and no launcher of ours is there.

The workers find one another first. Then worker 0 does what a launcher would: it takes the run's lock, removes the
traces of an earlier launch, and brings the directory to where the run goes on, the newest complete checkpoint, or the
start where there is none. So the same command begins a run, goes on after a crash, and does nothing once the run is
done. The others wait for its word, and none touches the directory before: it may belong to a launch that works there.

What is wrong with the launch as a whole (another number of workers than planned, a directory in use, machines that do
not see the same files or have other versions) is an error on every worker, before a weight is loaded.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from tonnage.checkpoint.resume import choose
from tonnage.checkpoint.save import complete_checkpoints, step_of
from tonnage.config import Config
from tonnage.errors import Problem, UserError, user_error
from tonnage.files.writing import write_json
from tonnage.host.nodes import Node, describe_node, disagreements, leave_token, sees_token, wrong_clocks
from tonnage.parallel.meeting import meet
from tonnage.parallel.place import Place
from tonnage.planning.plan import Plan
from tonnage.planning.space import check_space
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.samples import rewind_samples

QUESTION, VERDICT, READ, CLOCKS, ENDED = "question", "verdict", "verdict read", "clocks", "ended"
FAREWELL_SECONDS = 10.0
"""How long worker 0 waits until the others have read why it ends: with it goes the store that says so."""
SEE_SECONDS = 30.0
"""For a file written on one machine to be seen on another: network file systems keep what they know for a while."""


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
                if place.size != plan.workers:  # that for the workers that are here is the run's from now on
                    plan = Plan.read(run.plan_for(place.size))
                    plan.write(run.plan)
                check_space(config, plan, len(complete_checkpoints(run.checkpoints)), workers=place.local_size or 1)
                _check_nodes(run, place, config, plan, store)
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
            _answer(run, place, store)
            problems = [Problem(**problem) for problem in json.loads(store.get(VERDICT))]
            store.add(READ, 1)
            if problems:
                raise UserError(*problems)
        yield store


def stop_after_first(store: Store, place: Place, seconds: float) -> None:
    """Let worker 0 end first where a run was stopped, within a time: mpirun and srun may kill the workers that are left
    as soon as one of them ends with another status than 0, and worker 0 still has the report to write."""
    with contextlib.suppress(RuntimeError):  # the store is gone, and worker 0 with it
        if place.rank == 0:
            store.set(ENDED, "")
            return
        deadline = time.monotonic() + seconds
        while not store.check([ENDED]) and time.monotonic() < deadline:
            time.sleep(0.05)


def check_size(run: RunDirectory, place: Place, plan: Plan) -> None:
    """Refuse a number of workers that nothing was planned for. Raises ``UserError``."""
    if place.size != plan.workers and not run.plan_for(place.size).exists():
        again = f"--resume {run.word}" if complete_checkpoints(run.checkpoints) else "CONFIG"
        observed = f"{place.size} worker(s) were started, and the run is planned for {plan.workers}"
        command = f"tonnage train {again} --prepare launch.workers={place.size}"
        change = f"start {plan.workers}, or plan for {place.size}: {command}"
        raise user_error(observed, f"{plan.workers} worker(s)", change, str(run.plan))


def _check_nodes(run: RunDirectory, place: Place, config: Config, plan: Plan, store: Store) -> None:
    """On worker 0: ask every worker what it sees, and compare.

    Raises:
        UserError: names the machines that see other files or have other versions.
    """
    token = f"seen-{secrets.token_hex(8)}"
    is_directory = Path(config.model).exists() or config.model.startswith(("/", "./", "../"))  # else it is the hub's
    paths = {
        "model": config.model if is_directory else None,
        "prepared data": plan.data.train_path,
        "prepared validation data": plan.data.validation_path,
        "prepared general data": plan.data.general_path,
    }
    nodes, blind, mute, unheard = [describe_node(paths)], [], [], []
    leave_token(run.workers, token)
    try:
        store.set(QUESTION, json.dumps({"token": token, "paths": paths, "seconds": time.time()}))
        for rank in range(1, place.size):
            answer = json.loads(store.get(f"{QUESTION}/{rank}"))
            nodes.append(Node(**answer["node"]))
            if not answer["sees"]:
                blind.append(rank)
            elif not answer["wrote"]:
                mute.append(rank)
            elif not sees_token(run.workers, f"{token}-{rank}", SEE_SECONDS):
                unheard.append(rank)
        unseen = {
            "what worker 0 writes into the run's directory is not there": blind,
            "the run's directory cannot be written": mute,
            "what is written into the run's directory is not seen by worker 0": unheard,
        }
        if problems := disagreements(nodes, {what: ranks for what, ranks in unseen.items() if ranks}):
            raise UserError(*problems)
        store.set(CLOCKS, wrong_clocks(nodes))
    finally:
        for path in run.workers.glob(f"{token}*"):
            path.unlink(missing_ok=True)


def _answer(run: RunDirectory, place: Place, store: Store) -> None:
    """On the other workers: look, and say what is there. Nothing is asked where worker 0 failed before."""
    question = json.loads(store.get(QUESTION))
    if not question:
        return
    node = describe_node(question["paths"], time.time() - question["seconds"])
    wrote, sees = True, sees_token(run.workers, question["token"], SEE_SECONDS)
    if sees:
        try:
            leave_token(run.workers, f"{question['token']}-{place.rank}")
        except OSError:
            wrote = False
    store.set(f"{QUESTION}/{place.rank}", json.dumps({"node": asdict(node), "sees": sees, "wrote": wrote}))


def go_on(run: RunDirectory) -> None:
    """Bring the directory to its newest complete checkpoint, or to the start of the run if there is none.

    Raises:
        UserError: the newest checkpoint is damaged.
    """
    step = 0
    if complete_checkpoints(run.checkpoints):
        checkpoint = choose(run.checkpoints)
        step = step_of(checkpoint)
        write_json(run.resume, {"checkpoint": checkpoint.name})
    else:
        run.resume.unlink(missing_ok=True)
    run.rewind_metrics(step)
    rewind_samples(run, step)


def _tell(store: Store, place: Place, problems: tuple[Problem, ...] | list[Problem]) -> None:
    """Let the others know why there will be no run, and wait until they do."""
    if not store.check([QUESTION]):
        store.set(QUESTION, "{}")
    store.set(VERDICT, json.dumps([asdict(problem) for problem in problems]))
    deadline = time.monotonic() + FAREWELL_SECONDS
    while store.add(READ, 0) < place.size - 1 and time.monotonic() < deadline:
        time.sleep(0.05)
