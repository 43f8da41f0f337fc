"""Workers that others start: Ray, or Slurm, in the allocation that this process is in or by a job of their own.

They take the lock of the run's directory themselves.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import assert_never

from tonnage.config import AnyLaunch, LocalLaunch, RayLaunch, SlurmLaunch
from tonnage.errors import user_error
from tonnage.launch import ray, slurm
from tonnage.launch.watch import AtWork
from tonnage.rundir.directory import RunDirectory


def check_launcher(launch: AnyLaunch) -> None:
    """Refuse a machine that cannot start what is asked for. Raises ``UserError``."""
    match launch:
        case LocalLaunch():
            return
        case RayLaunch():
            ray.check_installed()
        case SlurmLaunch():
            slurm.check_commands(*(["srun"] if slurm.in_allocation() else ["sbatch", "scontrol", "scancel"]))
        case _:
            assert_never(launch)


def refuse_while_in_queue(run: RunDirectory) -> None:
    """Refuse to begin again what a job will go on with. Raises ``UserError``."""
    if ray.is_working(run):
        raise user_error(
            found="Ray works on this run",
            needed="one launch at a time",
            change=f"follow it: tonnage follow {run.word}, or stop the command that started it",
            where=str(run.path),
        )
    if (job := slurm.job_of(run)) is not None:
        answers = slurm.look(job) is not None
        works = f"Slurm job {job} works on this run or will do so"
        follow = f"follow it: tonnage follow {run.word}, or cancel it: scancel {job}"
        raise user_error(
            found=works if answers else f"Slurm does not answer whether job {job} of this run is over",
            needed="one job at a time",
            change=follow
            if answers
            else f"ask Slurm again later: scontrol show job {job}. If it is over, remove {run.job}",
            where=str(run.path),
        )


def started(launch: SlurmLaunch | RayLaunch, run: RunDirectory) -> AbstractContextManager[AtWork]:
    """Have the workers of a written run started. On leaving the context none is left running, except that a Slurm job
    goes on. Raises ``UserError``."""
    match launch:
        case RayLaunch():
            return ray.started(launch, run)
        case SlurmLaunch() if slurm.in_allocation():
            return slurm.started(launch, run)
        case SlurmLaunch():
            return nullcontext(slurm.SlurmJob(run, slurm.submit(launch, run), launch.num_workers))
