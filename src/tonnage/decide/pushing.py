"""Saves go to the hub while a run trains: ``python -m tonnage.decide.pushing RUN``, a process of the lowest priority.

Rank 0 starts it and holds its standard input; when that closes the process ends, wherever it is. What it had not sent
is sent by the launcher after the run, or by whoever goes on with the run: an export that was made is kept until it has
arrived, and the hub has it whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from tonnage.checkpoint.pushes import Pushed, Save, alone, waiting
from tonnage.config import Config, read_config
from tonnage.errors import UserError
from tonnage.rundir.directory import RunDirectory, complete_checkpoints, step_of

LOOK_SECONDS = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0
"""Seconds before something is tried again."""
NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Terminals and schedulers tell all processes; when this one ends is for rank 0 to say."""


def main(path: str) -> None:
    """Push what is saved, until standard input closes."""
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)
    threading.Thread(target=_end_with_input, daemon=True).start()
    run, pause, logged = RunDirectory(path), FIRST_PAUSE, set[str]()

    def tell(message: str) -> None:
        if message not in logged:
            logged.add(message)
            run.add_to_log(message)

    while True:
        try:
            config = read_config(run.config, [], check_files=False)
            pause, sleep = FIRST_PAUSE, 0.0 if push_next(run, config, tell) else LOOK_SECONDS
        except Exception as error:  # of whatever kind: training has nothing to do with it
            reason = error.problems[0].found if isinstance(error, UserError) else type(error).__name__
            tell(f"push: {reason}; trying again, and training goes on")
            sleep, pause = pause, min(2 * pause, LONGEST_PAUSE)
        time.sleep(sleep)


def push_next(run: RunDirectory, config: Config, tell: Callable[[str], None]) -> bool:
    """Push the oldest save that is not on the hub; whether there was one, and nobody else at it.

    Raises:
        UserError: it cannot be exported, or the hub does not take it.
    """
    from tonnage.checkpoint.push import push

    repository = config.checkpoint.push
    assert repository is not None
    with alone(run) as is_alone:
        saves = waiting(run, repository) if is_alone else []
        if not saves:
            return False
        save, pushed = saves[0], Pushed.of(run, repository)
        if not save.staged.is_dir() and not _export(run, save):
            replace(pushed, overtaken=[*pushed.overtaken, save.key]).write(run)
            tell(f"push: step {save.step:,} was overtaken by newer saves before it was exported")
            return True
        began = time.monotonic()
        address = push(
            save.staged,
            repository,
            private=not config.checkpoint.public,
            message=f"Step {save.step}, by tonnage",
            where="checkpoint.push",
        )
        replace(pushed, done=[*pushed.done, save.key]).write(run)
        shutil.rmtree(save.staged, ignore_errors=True)
        tell(f"push: step {save.step:,} is at {address} ({time.monotonic() - began:.0f} s)")
        return True


def push_rest(run: RunDirectory, tell: Callable[[str], None] | None = None) -> None:
    """Push what a run that is over has not pushed; where it cannot be, say so, and how it is tried again.

    It is said to ``tell``, or in the run's log.
    """
    tell = run.add_to_log if tell is None else tell
    config = read_config(run.config, [], check_files=False)
    if config.checkpoint.push is None:
        return
    try:
        if saves := waiting(run, config.checkpoint.push):
            tell(f"Pushing {len(saves)} save(s) to {config.checkpoint.push}; Ctrl-C leaves them for later.")
        while push_next(run, config, tell):
            pass
    except UserError as error:
        tell(f"Not pushed: {error}\nTo try again:  tonnage train --resume {run.word}")


def _export(run: RunDirectory, save: Save) -> bool:
    """Export a save; whether it was still there."""
    from tonnage.decide.exports import export_checkpoint

    try:
        export_checkpoint(run, save.staged, step=save.step)
    except (UserError, FileNotFoundError):
        if save.step in map(step_of, complete_checkpoints(run.checkpoints)):
            raise
        return False
    return True


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
