"""From a config, or from a run that goes on, to workers at work, as ``tonnage train`` begins them."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.config import Config, LocalLaunch, check_output, check_trackers, read_config
from tonnage.data.progress import silent
from tonnage.errors import refusals, user_error
from tonnage.files.writing import CLOSED_TO_OTHERS, write_json
from tonnage.launch import elsewhere, local
from tonnage.launch.elsewhere import check_launcher, refuse_while_in_queue
from tonnage.launch.forkserver import ForkServer, can_fork
from tonnage.launch.watch import AtWork
from tonnage.rundir.directory import RunDirectory, complete_checkpoints

if TYPE_CHECKING:
    from tonnage.data import Progress
    from tonnage.decide.decision import Decision
    from tonnage.planning.plan import Plan
    from tonnage.rundir.records import LossNote
    from tonnage.training.own_loss import Loss


@dataclass(frozen=True)
class Started:
    """A run whose workers are at work."""

    run: RunDirectory
    plan: Plan
    at_work: AtWork
    closing: ExitStack
    """Ends what ``at_work`` needs."""
    progress: Progress = silent
    since: int = 0
    """The step after which the run goes on; 0 for a new one."""
    is_local: bool = True
    """Whether workers are on this machine."""
    news: tuple[str, ...] = ()
    """Of a run that goes on: what is not as it was before."""


def begin(config: Config, progress: Progress = silent, *, force: bool = False, loss: Loss | None = None) -> Started:
    """Decide, write the run's directory, start the workers, which train ``loss`` if it is given.

    Raises ``UserError``, in which case nothing of the run is left.
    """
    from tonnage.decide.decision import decide_on
    from tonnage.decide.written import nothing_if_not_started, write_run

    check_launcher(config.launch)
    check_place_of_loss(config, loss)
    check_trackers(config)
    check_output(config)
    run = RunDirectory(config.output)
    with closed_to_others(), ExitStack() as closing:
        forkserver = closing.enter_context(forkserver_for(config, gc.get_threshold(), starts_here=_is_one_thread()))
        decision = decide_on(config, progress, fresh_output=True, force=force)
        note = None if loss is None else tried(loss, decision)
        with refusals("the run's directory could not be written", run.path):
            lock = (held := closing.enter_context(ExitStack())).enter_context(run.locked())
            check_output(decision.config)  # nobody was here in the meantime
            closing.enter_context(nothing_if_not_started(run))
            write_run(run, decision)
            if note is not None:
                write_json(run.loss, asdict(note))
        if decision.config.launch.launcher != "local":
            held.close()  # whoever trains takes it
        return _start(run, decision, lock, forkserver, closing, progress)


def check_place_of_loss(config: Config, loss: Loss | None) -> None:
    """Refuse a loss of one's own where workers could not tell who gave it. Raises ``UserError``."""
    if loss is not None and config.launch.launcher != "local":
        observed = f"a loss of one's own, and launch.with is {config.launch.launcher}"
        raise user_error(
            observed, "workers of this machine: its code runs in them", 'launch={"with": "local"}', "launch.with"
        )


def tried(loss: Loss, decision: Decision) -> LossNote:
    """What a run keeps of a loss of one's own, which was tried on its rows. Raises ``UserError``."""
    from tonnage.training.own_loss import OwnLoss, check_sum, note_of, rows_of

    config, rows = decision.config, decision.prepared.train
    if config.objective.kind != "supervised":
        observed = f"a loss of one's own, and objective.kind {config.objective.kind}"
        raise user_error(observed, "one of them", "leave objective out, or loss", "loss")
    OwnLoss.check_documents(decision.plan.layout.context)
    own, note = OwnLoss.of(loss, config.data.carry), note_of(loss)
    order = (rows.pack_at(position, config.seed) for position in range(rows.num_packs))
    check_sum(own, rows_of(rows, order))
    return note


def go_on(
    run: RunDirectory,
    words: Sequence[str],
    progress: Progress = silent,
    *,
    step: int | None = None,
    allow_changes: bool = False,
    force: bool = False,
    loss: Loss | None = None,
) -> Started | None:
    """Go on with a run from its newest checkpoint or that of ``step``; ``words`` change its config. ``loss`` is the
    function that it was started with.

    Returns None where nothing was left to train; the model is exported then. Raises ``UserError``.
    """
    from tonnage.decide.exports import export_run, is_exported
    from tonnage.decide.resumption import begin_again, check_loss, check_resumable, decide_resumption
    from tonnage.decide.written import clear_remains, write_run
    from tonnage.report.page import leave_report

    refuse_while_in_queue(run)
    check_resumable(run, words, step)
    note = None
    if loss is not None:
        from tonnage.training.own_loss import note_of

        note = note_of(loss)
    check_loss(run, note)
    config = read_config(run.config, words)
    check_launcher(config.launch)
    check_place_of_loss(config, loss)
    with closed_to_others(), ExitStack() as closing:
        forkserver = closing.enter_context(forkserver_for(config, gc.get_threshold(), starts_here=_is_one_thread()))
        lock = (held := closing.enter_context(ExitStack())).enter_context(run.locked())
        resumption = decide_resumption(
            run, words, progress, step=step, allow_changes=allow_changes, force=force, loss=note
        )
        if resumption.is_done:
            clear_remains(run)
            if not is_exported(run):
                export_run(run, progress)
            leave_report(run)  # whoever exported it may have been killed before
            return None
        with refusals("the run's directory could not be written", run.path):
            begin_again(run, resumption)
            write_run(run, resumption.decision)
        if resumption.decision.config.launch.launcher != "local":
            held.close()  # whoever trains takes it
        step, news = resumption.cursor.step, resumption.news
        return _start(run, resumption.decision, lock, forkserver, closing, progress, step, news)


def _start(
    run: RunDirectory,
    decision: Decision,
    lock: int,
    forkserver: ForkServer | None,
    closing: ExitStack,
    progress: Progress,
    since: int = 0,
    news: Sequence[str] = (),
) -> Started:
    from tonnage.planning.space import check_space

    plan, launch = decision.plan, decision.launch
    if isinstance(launch, LocalLaunch):
        check_space(decision.config, plan, len(complete_checkpoints(run.checkpoints)))
        workers: AbstractContextManager[AtWork] = local.started(
            run,
            plan.workers,
            plan.threads_per_worker,
            keep_open=[lock],
            timeout=launch.timeout,
            forkserver=forkserver,
        )
    else:
        workers = elsewhere.started(launch, run)
    at_work, is_local = closing.enter_context(workers), isinstance(launch, LocalLaunch)
    return Started(run, plan, at_work, closing.pop_all(), progress, since, is_local, tuple(news))


def forkserver_for(
    config: Config, thresholds: tuple[int, int, int], *, starts_here: bool
) -> AbstractContextManager[ForkServer | None]:
    """A forkserver for workers that start here, begun before anything is computed; None where ``starts_here`` is false,
    others start the workers, or this process cannot be copied.

    ``thresholds`` are those of Python's collector of garbage in workers.
    """
    if not starts_here or config.launch.launcher != "local":
        return nullcontext()
    from tonnage.decide.models import type_of
    from tonnage.training.worker import import_all

    with suppress(OSError):  # no room for a copy of this process: workers are started, each by itself
        if can_fork():
            return ForkServer(partial(import_all, type_of(config.model)), thresholds)
    return nullcontext()


def _is_one_thread() -> bool:
    """Whether the program that calls has done nothing yet that a copy of it could not go on from: begun threads of the
    system, as every library does that computes, or loops."""
    with suppress(OSError):
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            return False
    if (numba := sys.modules.get("numba")) is not None:
        with suppress(ValueError):  # which says that no loop has begun
            numba.threading_layer()
            return False
    return True


@contextmanager
def closed_to_others() -> Iterator[None]:
    """Within it no file is made that group and others may write; the program's own mask comes back."""
    before = os.umask(CLOSED_TO_OTHERS)
    os.umask(before | CLOSED_TO_OTHERS)
    try:
        yield
    finally:
        os.umask(before)
