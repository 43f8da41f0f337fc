"""What a worker of ``tonnage profile`` does, for ``forked.work``: a run directory, and the steps to record."""

from __future__ import annotations

from tonnage.rundir import RunDirectory
from tonnage.train.profiling import profile_run


def main(told: list[str]) -> None:
    path, num_steps = told
    profile_run(RunDirectory(path), int(num_steps))
