"""One worker: ``python -m tonnage.train.worker RUN``. It carries out the plan in the run directory and decides nothing.

Who it is comes from the environment (``RANK``, ``WORLD_SIZE``, ...). SIGTERM asks it to stop at the next step border
and save. Exit status: 0 done, 3 stopped as asked, 2 the user's mistake, 1 ours; in the last two cases the error is
written into the run directory.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from tonnage.errors import TonnageError
from tonnage.rundir import PositionFile, RunDirectory

STOPPED = 3


def main(path: str) -> int:
    """Run one worker to its end; returns its exit status."""
    run, rank = RunDirectory(path), int(os.environ.get("RANK", "0"))
    try:
        return 0 if _work(run, rank) else STOPPED
    except Exception as error:
        status = error.exit_status if isinstance(error, TonnageError) else 1
        run.write_error(rank, error, status)
        return status


def _work(run: RunDirectory, rank: int) -> bool:
    stop = _StopFlag()
    position = PositionFile(run.worker_position(rank))
    position.update(phase="import")

    from tonnage.config import read_config
    from tonnage.parallel.world import join_world
    from tonnage.plan.plan import Plan
    from tonnage.train.assemble import assemble
    from tonnage.train.loop import Habits, train
    from tonnage.train.metrics import Recorder

    config, plan = read_config(run.config, [], check_files=False), Plan.read(run.plan)
    recorder = Recorder(run, rank=rank, tensorboard="tensorboard" in config.track)
    position.update(phase="join")
    with join_world(plan.replicate) as world:
        recorder.log(f"{world.size} worker(s) on {world.device.type}, back end {world.backend}")
        position.update(phase="load")
        job = assemble(config, plan, world, recorder.log)
        habits = Habits(config.evaluate.every, config.checkpoint.every, run.checkpoints, config.checkpoint.keep)
        recorder.log(f"training {plan.num_steps} steps")
        finished = train(job, habits, recorder, position, stop.is_set)
        recorder.log("done" if finished else "stopped as asked")
        recorder.close()
        position.update(phase="done" if finished else "stopped")
    return finished


class _StopFlag:
    """Set by SIGTERM; read at step borders."""

    def __init__(self) -> None:
        self._set = False
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
