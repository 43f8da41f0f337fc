"""One worker: ``python -m tonnage.train.worker RUN``. It carries out the plan in the run directory and decides nothing.

Who it is comes from the environment (``RANK``, ``WORLD_SIZE``, ...). SIGTERM or SIGUSR1 asks it to stop at the next
step border and save; a second one, later than a moment, ends it at once. Exit status: 0 done, 3 stopped as asked, 2 the
user's mistake, 1 ours; in the last two cases the error is written into the run directory.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from types import FrameType

from tonnage.errors import Problem, TonnageError, UserError
from tonnage.rundir import PositionFile, RunDirectory

STOPPED = 3
ONE_REQUEST_SECONDS = 3.0


def main(path: str) -> int:
    """Run one worker to its end; returns its exit status."""
    run, rank = RunDirectory(path), int(os.environ.get("RANK", "0"))
    try:
        return 0 if _work(run, rank) else STOPPED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            needed = "a disk with room for what the run writes"
            change = f"make room, then go on from the last checkpoint: tonnage train --resume {run.path}"
            error = UserError(Problem(str(error), needed, change, str(run.path)))
        status = error.exit_status if isinstance(error, TonnageError) else 1
        run.write_error(rank, error, status)
        return status


def _work(run: RunDirectory, rank: int) -> bool:
    stop = _StopFlag()
    position = PositionFile(run.worker_position(rank))
    position.update(phase="import")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: large tensors in huge pages, which cost fewer faults

    from tonnage.checkpoint.save import step_of
    from tonnage.config import read_config
    from tonnage.parallel.world import join_world
    from tonnage.plan.plan import Plan
    from tonnage.train.assemble import assemble
    from tonnage.train.loop import Habits, train
    from tonnage.train.memory import Phases
    from tonnage.train.metrics import Recorder
    from tonnage.train.watchdog import BACK_END_SECONDS, Watchdog

    config, plan = read_config(run.config, [], check_files=False), Plan.read(run.plan)
    checkpoint = run.checkpoint_to_resume()
    first_step = step_of(checkpoint) + 1 if checkpoint else 1
    recorder = Recorder(run, rank=rank, tensorboard="tensorboard" in config.track, first_step=first_step)
    phases, timeout = Phases(position), config.launch.timeout
    phases.enter("join")
    with (
        Watchdog(run, position, rank, plan.workers, timeout),
        join_world(plan.layout.replicate, timeout + BACK_END_SECONDS) as world,
    ):
        phases.device = world.device
        recorder.log(f"{world.size} worker(s) on {world.device.type}, back end {world.backend}")
        job = assemble(config, plan, world, recorder.log, phases, checkpoint)
        habits = Habits(config.evaluate.every, config.checkpoint.every, run.checkpoints, config.checkpoint.keep)
        recorder.log(f"training steps {first_step} to {plan.num_steps}")
        finished = train(job, habits, recorder, phases, stop.is_set)
        recorder.log("done" if finished else "stopped as asked")
        recorder.close()
        position.update(phase="done" if finished else "stopped")
    return finished


class _StopFlag:
    """Set by a signal; read at step borders.

    A scheduler signals the launcher and the workers at once, and the launcher passes its signal on: what comes within
    ``ONE_REQUEST_SECONDS`` of the first is the same request.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._since is None:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > ONE_REQUEST_SECONDS:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def is_set(self) -> bool:
        return self._since is not None


if __name__ == "__main__":
    exit_status = main(sys.argv[1])
    # Everything is written and closed. The threads of the libraries that are loaded here do not always survive the
    # interpreter's own end: one finished run in some hundred was seen to abort in it ("terminate called without an
    # active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)
