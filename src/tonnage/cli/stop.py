"""``tonnage stop``: a run that works elsewhere saves and ends."""

from __future__ import annotations

from tonnage.cli.parameters import RunPath
from tonnage.display.terminal import say, terminal


def stop(run: RunPath) -> None:
    """Have a run finish its step, save and end, whoever started it: another terminal, a notebook, Slurm."""
    from tonnage.api.run import Run
    from tonnage.rundir.directory import RunDirectory, complete_checkpoints

    console, directory = terminal(), RunDirectory(run)
    Run(run).stop()
    saved = complete_checkpoints(directory.checkpoints)
    what = f"Ended; {saved[-1].name} is saved." if saved else "Ended before the first step: there is nothing to save."
    say(console, f"{what} To go on:  tonnage train --resume {directory.word}" if saved else what)
