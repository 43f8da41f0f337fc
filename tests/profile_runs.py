"""What a worker of ``tonnage profile`` does, for ``forked.work``: a run directory, and the steps to record."""

from __future__ import annotations

from tonnage.rundir.directory import RunDirectory
from tonnage.training import profiling


def main(told: list[str]) -> None:
    path, num_steps = told
    profiling.RATE_SECONDS = 0.1
    profiling.profile_run(RunDirectory(path), int(num_steps))
