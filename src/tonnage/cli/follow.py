"""``tonnage follow``: watch a run that works elsewhere: a Slurm job, torchrun, mpirun, another terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from tonnage.cli.comparison import conclude
from tonnage.cli.parameters import RunPath
from tonnage.display.terminal import say, terminal
from tonnage.errors import user_error
from tonnage.launch.watch import STOPPED

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.planning.plan import Plan
    from tonnage.rundir.directory import RunDirectory

LOOK_SECONDS = 0.1
INTERRUPTED = 130


def follow(run: RunPath) -> None:
    """Watch a run that was started elsewhere until it ends. Ctrl-C ends the watching, not the run."""
    from tonnage.display.progress import RunDisplay
    from tonnage.launch.failures import as_error
    from tonnage.launch.ray import is_working
    from tonnage.launch.slurm import job_of
    from tonnage.planning.plan import Plan
    from tonnage.rundir.directory import RunDirectory

    console, directory = terminal(), RunDirectory(run)
    if not directory.plan.exists():
        raise user_error("no run", "a run directory", "start one: tonnage train CONFIG", run)
    plan = Plan.read(directory.plan)
    if (job := job_of(directory)) is not None:
        follow_job(directory, job, plan, console)
        return
    num_workers = None if directory.plans.exists() else plan.workers
    with RunDisplay(directory, plan.num_steps, num_workers=num_workers, console=console) as display:
        while directory.is_locked() or is_working(directory):
            display.poll()
            time.sleep(LOOK_SECONDS)
    for account in directory.read_errors():
        raise as_error(account, plan.workers, directory.worker_log(account.rank))


def follow_job(run: RunDirectory, job: str, plan: Plan, console: Console) -> None:
    """Show a Slurm job's run until the job is over. Ctrl-C asks whether to end the job; it goes on unless told so."""
    from tonnage.decide.handing import next_of
    from tonnage.display.progress import RunDisplay, show_memory
    from tonnage.launch import slurm

    stopping = False
    while True:
        try:
            with RunDisplay(run, plan.num_steps, num_workers=plan.workers, console=console) as display:
                status = slurm.follow(slurm.SlurmJob(run, job, plan.workers), poll=display.poll, tell=display.tell)
            break
        except KeyboardInterrupt:
            if stopping:
                slurm.cancel(job)
                console.print(f"Job {job} was cancelled.")
                raise
            if not _wants_to_stop(job, console):
                say(
                    console,
                    f"Job {job} goes on. To follow it:  tonnage follow {run.word}    to cancel it:  scancel {job}",
                )
                sys.exit(INTERRUPTED)
            stopping = True
            slurm.stop(run, job)
    show_memory(run, console)
    if status == STOPPED:
        say(console, f"Stopped as asked, and saved. To go on:  tonnage train --resume {run.word}")
        sys.exit(STOPPED)
    say(console, "Model: ", (str(run.export), "bold"))
    say(console, f"Next:  {next_of(run)}")
    conclude(run, console)


def _wants_to_stop(job: str, console: Console) -> bool:
    """Ask somebody at a keyboard; nobody there, another Ctrl-C or anything but yes means no."""
    if not (sys.stdin.isatty() and console.is_terminal):
        return False
    try:
        return console.input(f"Save and end job {job}? (y/N) ", markup=False).strip().lower() in ("y", "yes")
    except (KeyboardInterrupt, EOFError):
        console.print()
        return False
