"""Whether somebody else works on a run already, or will do so."""

from __future__ import annotations

from tonnage.errors import Problem, UserError
from tonnage.launch.ray import is_working
from tonnage.launch.slurm import job_of
from tonnage.rundir.directory import RunDirectory


def refuse_while_in_queue(run: RunDirectory) -> None:
    """Refuse to begin again what a job will go on with. Raises ``UserError``."""
    if is_working(run):
        raise UserError(
            Problem(
                found="Ray works on this run",
                needed="one launch at a time",
                change=f"follow it: tonnage follow {run.word}, or stop the command that started it",
                where=str(run.path),
            )
        )
    if (job := job_of(run)) is not None:
        raise UserError(
            Problem(
                found=f"Slurm job {job} works on this run or will do so",
                needed="one job at a time",
                change=f"follow it: tonnage follow {run.word}, or cancel it: scancel {job}",
                where=str(run.path),
            )
        )
