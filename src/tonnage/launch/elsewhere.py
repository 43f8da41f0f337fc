"""Workers that others start: Ray, or Slurm, in the allocation that this process is in or by a job of their own.

They take the lock of the run's directory themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from tonnage.config import LocalLaunch, RayLaunch, SlurmLaunch
from tonnage.launch import ray, slurm
from tonnage.launch.watch import AtWork
from tonnage.rundir.directory import RunDirectory


def check_launcher(launch: LocalLaunch | SlurmLaunch | RayLaunch) -> None:
    """Refuse a machine that cannot start what is asked for. Raises ``UserError``."""
    if isinstance(launch, RayLaunch):
        ray.check_installed()
    elif isinstance(launch, SlurmLaunch):
        slurm.check_commands(*(["srun"] if slurm.in_allocation() else ["sbatch", "scontrol", "scancel"]))


def started(launch: SlurmLaunch | RayLaunch, run: RunDirectory) -> AbstractContextManager[AtWork]:
    """Have the workers of a written run started. On leaving the context none is left running, but that a job of Slurm
    goes on. Raises ``UserError``."""
    if isinstance(launch, RayLaunch):
        return ray.started(launch, run)
    return slurm.started(launch, run) if slurm.in_allocation() else _submitted(launch, run)


@contextmanager
def _submitted(launch: SlurmLaunch, run: RunDirectory) -> Iterator[AtWork]:
    yield slurm.Job(run, slurm.submit(launch, run), launch.num_workers)
