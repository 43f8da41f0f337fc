"""``tonnage train``: decide, write the run directory, start the workers, follow them, hand back a model.

With ``launch.with: slurm`` the workers are a job, which takes the directory's lock itself and exports the model; with
``ray`` they are Ray's, and take the lock as well; with ``--prepare`` they are whatever torchrun, mpirun or srun start
later.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tonnage.cli.comparison import conclude
from tonnage.cli.plan import show_outcome, show_plan
from tonnage.display.bar import progress_bar
from tonnage.display.terminal import say, terminal, unheard
from tonnage.errors import refusals, user_error
from tonnage.files.paths import word
from tonnage.launch.watch import DONE, STOPPED, to_their_end

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.decide.decision import Decision
    from tonnage.decide.resumption import Cleared, Resumption
    from tonnage.launch.forkserver import ForkServer
    from tonnage.planning.plan import Plan
    from tonnage.rundir.directory import RunDirectory

Until = Literal["plan", "written", "end"]
"""How far to go: decide, write the run directory as well, or train."""
KEYBOARD = ("SIGINT", "tonnage stop")
"""Requests to stop that somebody at a keyboard makes."""


def train(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="A YAML config; none with --resume.", parser=word)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Change keys of the config, as optimizer.lr=1e-4."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after the plan.")] = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only write the run directory, for torchrun, mpirun or srun to start.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on from a run's newest checkpoint.", parser=word)
    ] = None,
    step: Annotated[
        int | None, typer.Option("--from", metavar="STEP", help="With --resume: from an earlier checkpoint.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Start although the plan does not fit into memory.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="With --resume: also if the config or the data mean another run.")
    ] = False,
) -> None:
    """Fine-tune a model as CONFIG says, or go on with a run: --resume RUN [KEY=VALUE]..."""
    from tonnage.api.starting import forkserver_for
    from tonnage.cli.data_report import show_account
    from tonnage.cli.main import USUAL_THRESHOLDS
    from tonnage.config import check_output, check_trackers, read_config
    from tonnage.decide.decision import decide_on
    from tonnage.decide.written import nothing_if_not_started, write_run
    from tonnage.launch.elsewhere import check_launcher
    from tonnage.rundir.directory import RunDirectory

    console = terminal()
    until: Until = "plan" if dry_run else "written" if prepare else "end"
    if resume is not None:
        words = [*([config] if config is not None else []), *(overrides or [])]
        _resume(RunDirectory(resume), words, console, step=step, allow_changes=allow_changes, force=force, until=until)
        return
    if config is None:
        raise user_error("no config", "a YAML config, or --resume RUN", "tonnage train CONFIG")
    if step is not None or allow_changes:
        raise user_error("--from or --allow-changes without --resume", "a run to go on with", "--resume RUN")
    resolved = read_config(config, overrides or [])
    check_trackers(resolved)
    if not dry_run:
        check_output(resolved)
    if until == "end":
        check_launcher(resolved.launch)
    run = RunDirectory(resolved.output)
    with forkserver_for(resolved, USUAL_THRESHOLDS, starts_here=until == "end") as forkserver:
        with progress_bar(console) as progress:
            decision = decide_on(resolved, progress, fresh_output=not dry_run, force=force)
        show_account(decision.prepared.account, console)
        show_plan(decision.plan, console)
        if until == "plan":
            _show_script(run, decision, console)
            return
        with refusals("the run's directory could not be written", run.path), run.locked() as lock:
            check_output(decision.config)  # nobody was here in the meantime
            with nothing_if_not_started(run):
                write_run(run, decision)
                if until == "end" and decision.config.launch.launcher == "local":
                    _work(run, decision, console, lock, forkserver)
                    return
    with nothing_if_not_started(run):
        _work_elsewhere(run, decision, console, until)


def _resume(
    run: RunDirectory,
    words: list[str],
    console: Console,
    *,
    step: int | None,
    allow_changes: bool,
    force: bool,
    until: Until,
) -> None:
    from tonnage.api.starting import forkserver_for
    from tonnage.cli.main import USUAL_THRESHOLDS
    from tonnage.config import read_config
    from tonnage.decide.exports import is_exported
    from tonnage.decide.pushing import push_rest
    from tonnage.decide.resumption import begin_again, check_resumable, decide_resumption
    from tonnage.decide.written import clear_remains, write_run
    from tonnage.launch.elsewhere import check_launcher, refuse_while_in_queue
    from tonnage.planning.plan import Plan

    if no_override := [word for word in words if "=" not in word]:
        raise user_error(
            found=f"{no_override[0]} beside --resume {run.word}",
            needed="the config is the run's own; only KEY=VALUE can follow",
            change=f"tonnage train --resume {run.word}",
        )
    if not run.is_run():
        raise user_error("no run", "a run directory", "start one: tonnage train CONFIG", str(run.path))
    refuse_while_in_queue(run)
    check_resumable(run, words, step)
    config = read_config(run.config, words)
    if until == "end":
        check_launcher(config.launch)
    with forkserver_for(config, USUAL_THRESHOLDS, starts_here=until == "end") as forkserver, run.locked() as lock:
        with progress_bar(console) as progress:
            resumption = decide_resumption(run, words, progress, step=step, allow_changes=allow_changes, force=force)
        _show_resumption(resumption, console)
        decision = resumption.decision
        show_plan(decision.plan, console)
        if until == "plan":
            _show_script(run, decision, console)
            return
        if resumption.is_done:
            clear_remains(run)
            if is_exported(run):
                say(console, "Nothing is left to train. Model: ", (str(run.export), "bold"))
                _report(run, console)  # whoever exported it may have been killed before
                push_rest(run, console.print)
                conclude(run, console)
            else:
                _finish(run, Plan.read(run.plan), DONE, console)
            return
        with refusals("the run's directory could not be written", run.path):
            _show_cleared(run, begin_again(run, resumption), console)
            write_run(run, decision)
        if until == "end" and decision.config.launch.launcher == "local":
            _work(run, decision, console, lock, forkserver)
            return
    _work_elsewhere(run, decision, console, until)


def _work(run: RunDirectory, decision: Decision, console: Console, lock: int, forkserver: ForkServer | None) -> None:
    """Start the workers here, follow them to their end, hand back the model."""
    from tonnage.checkpoint.save import complete_checkpoints, step_of
    from tonnage.decide.outcome import learn
    from tonnage.display.progress import RunDisplay
    from tonnage.launch.local import run_workers
    from tonnage.planning.space import check_space
    from tonnage.report.page import reported_if_it_fails

    plan = decision.plan
    check_space(decision.config, plan, len(complete_checkpoints(run.checkpoints)))
    with (
        reported_if_it_fails(run),
        unheard(),
        RunDisplay(run, plan.num_steps, num_workers=plan.workers, console=console) as display,
    ):
        status = run_workers(
            run,
            plan.workers,
            plan.threads_per_worker,
            poll=display.poll,
            keep_open=[lock],
            timeout=decision.config.launch.timeout,
            forkserver=forkserver,
        )
    checkpoint = run.checkpoint_to_resume()
    learn(run, plan, since=step_of(checkpoint) if checkpoint else 0)
    with unheard():
        _finish(run, plan, status, console)


def _work_elsewhere(run: RunDirectory, decision: Decision, console: Console, until: Until) -> None:
    """Let others start the workers of a run that is written. The lock is theirs to take."""
    from tonnage.cli.follow import follow_job
    from tonnage.config import LocalLaunch, RayLaunch, SlurmLaunch
    from tonnage.display.progress import RunDisplay
    from tonnage.launch import elsewhere, slurm
    from tonnage.planning.plan import Plan
    from tonnage.report.page import reported_if_it_fails

    plan, launch = decision.plan, decision.launch
    if until == "written":
        _show_commands(run, plan, console)
        return
    assert not isinstance(launch, LocalLaunch)
    if isinstance(launch, SlurmLaunch) and not slurm.in_allocation():
        job = slurm.submit(launch, run)
        say(
            console,
            f"Job {job} was submitted, and goes on without this command. To follow it:  tonnage follow {run.word}    "
            f"to cancel it:  scancel {job}",
        )
        follow_job(run, job, plan, console)
        return
    num_workers = None if isinstance(launch, RayLaunch) else plan.workers  # whose number may change
    shown = RunDisplay(run, plan.num_steps, num_workers=num_workers, console=console)
    with reported_if_it_fails(run), shown as display:
        status = to_their_end(elsewhere.started(launch, run), display.poll, display.tell)
    _finish(run, Plan.read(run.plan), status, console)


def _finish(run: RunDirectory, plan: Plan, status: int, console: Console) -> None:
    """What is left when the workers have ended well: the model, and what to do next."""
    from tonnage.checkpoint.save import complete_checkpoints, step_of
    from tonnage.decide.handing import next_of
    from tonnage.decide.pushing import push_rest
    from tonnage.display.progress import show_memory

    show_memory(run, console)
    checkpoint = run.checkpoint_to_resume()
    show_outcome(run, plan, console, since=step_of(checkpoint) if checkpoint else 0)
    if status == STOPPED:
        reason = run.stop_asked.read_text() if run.stop_asked.exists() else "by Slurm"
        if not complete_checkpoints(run.checkpoints):
            console.print("Stopped as asked, before the first step: there is nothing to save.")
            sys.exit(STOPPED)
        if reason in KEYBOARD:  # somebody is waiting for the model; a scheduler is not, and may be about to kill us
            _export(run, console)
        _report(run, console)
        say(console, f"Stopped as asked ({reason}), and saved. To go on:  tonnage train --resume {run.word}")
        sys.exit(STOPPED)
    _export(run, console)
    _report(run, console)
    push_rest(run, console.print)
    say(console, f"Next:  {next_of(run)}")
    conclude(run, console)


def _show_script(run: RunDirectory, decision: Decision, console: Console) -> None:
    """Print the job that would be submitted, if one would be."""
    from tonnage.config import SlurmLaunch
    from tonnage.launch import slurm

    launch = decision.launch
    if isinstance(launch, SlurmLaunch) and not slurm.in_allocation():
        say(console, f"Job script ({run.job_script}):\n")
        say(console, slurm.batch_script(launch, run))


def _show_commands(run: RunDirectory, plan: Plan, console: Console) -> None:
    path, workers = shlex.quote(str(run.path.absolute())), plan.workers
    lines = [
        f"{run.path} is ready for {workers} worker(s). Start them from {Path.cwd()} with one of",
        "",
        f"  torchrun --nproc-per-node {workers} -m tonnage.training.worker {path}",
        f"  mpirun -n {workers} python -m tonnage.training.worker {path}",
        f"  srun -n {workers} python -m tonnage.training.worker {path}",
        "",
        "(docs/launching.md has them for several machines.) The same command goes on after a stop or a crash.",
        f"To watch:  tonnage follow {run.word}    for the model:  tonnage export {run.word} DIR",
    ]
    say(console, "\n".join(lines))


def _show_resumption(resumption: Resumption, console: Console) -> None:
    cursor, plan = resumption.cursor, resumption.decision.plan
    say(
        console,
        "Going on from ",
        (str(resumption.checkpoint), "bold"),
        f": {cursor.step:,} of {plan.num_steps:,} steps are done, pack {cursor.position:,} is next.",
    )
    for line in resumption.news:
        say(console, f"  {line}")


def _show_cleared(run: RunDirectory, cleared: Cleared, console: Console) -> None:
    """Print what was done to the directory of a run that goes on."""
    for path in cleared.interrupted:
        console.print(f"{path.name} was interrupted and is not a checkpoint; it will be removed.")
    for path in cleared.set_aside:
        say(console, "A later checkpoint is kept as ", (str(path), "bold"), "; nothing uses it.")
    if cleared.lost_records:
        console.print(f"{cleared.lost_records} records of lost steps were moved to {run.cut_metrics.name}.")


def _export(run: RunDirectory, console: Console) -> None:
    from tonnage.decide.exports import export_run

    with progress_bar(console) as progress:
        notes = export_run(run, progress)
    for note in notes:
        console.print(note, soft_wrap=True)
    say(console, "Model: ", (str(run.export), "bold"))


def _report(run: RunDirectory, console: Console) -> None:
    """Leave a page about the run in its directory, and say where it is, or why there is none."""
    from tonnage.report.page import leave_report

    if failure := leave_report(run):
        say(console, failure)
    else:
        say(console, "Report: ", (str(run.report), "bold"))
