"""A job of one worker made ready in the process that calls, for steps that this takes itself (``by_hand``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tonnage.config import Config
from tonnage.kernels.threads import use_threads
from tonnage.parallel.world import join_world
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.tracking.back_ends import Outcome
from tonnage.tracking.trackers import Trackers
from tonnage.training.assemble import assemble, prepare_kernels
from tonnage.training.by_hand import ByHand
from tonnage.training.memory import Phases
from tonnage.training.metrics import Recorder
from tonnage.training.setting import WorkerSetting


@contextmanager
def ready_job(run: RunDirectory, config: Config, plan: Plan) -> Iterator[ByHand]:
    """Assemble what ``plan`` says, of one worker; on leaving, this process uses as many threads as before.

    Raises ``UserError``.
    """
    position, threads = PositionFile(run.worker_position(0)), torch.get_num_threads()
    recorder, trackers = Recorder(run, rank=0), Trackers(run)
    outcome: Outcome = "failed"
    phases = Phases(position)
    try:
        trackers.start(config.track, samples=config.track_samples)
        prepare_kernels(config, plan, phases)
        with join_world(device_type=plan.layout.device) as world:
            phases.device = world.device
            job = assemble(WorkerSetting(config, plan, world, recorder.log, phases))
            recorder.log("steps are taken by a program")
            yield ByHand(job, recorder, phases, plan.layout)
            job.optimizer.finish()
        outcome = "finished"
    finally:
        recorder.close()
        trackers.end(outcome)
        position.update(phase="done")
        use_threads(threads)
