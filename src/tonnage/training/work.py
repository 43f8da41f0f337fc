"""What a worker does of its run: it joins the others, assembles its part of the job, and trains."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace

from torch.distributed.distributed_c10d import Store

from tonnage.checkpoint.save import step_of
from tonnage.config import Config, RayLaunch
from tonnage.errors import user_error
from tonnage.host.threads import describe_cpus, share_of
from tonnage.parallel.world import World, join_world
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import LAUNCHER, RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.training.assemble import assemble, between_steps_of, prepare_kernels
from tonnage.training.external import CLOCKS
from tonnage.training.loop import train
from tonnage.training.memory import Phases
from tonnage.training.metrics import Recorder
from tonnage.training.own_loss import OwnLoss, loss_of
from tonnage.training.setting import StoppedEarly, WorkerSetting
from tonnage.training.watchdog import BACK_END_SECONDS, Watchdog


def work(
    run: RunDirectory,
    config: Config,
    plan: Plan,
    rank: int,
    position: PositionFile,
    stop_asked: Callable[[], bool],
    store: Store | None,
) -> bool:
    """Train the run of a directory; whether it went to its end. ``store`` is shared by workers that others started.

    Raises:
        UserError: whatever the model, the data or the machine has that the plan did not know.
    """
    recorder, phases, layout = Recorder(run, rank=rank), Phases(position), plan.layout
    prepare_kernels(config, plan, phases, was_forked=store is None)
    phases.enter("join")
    with (
        Watchdog(run, position, rank, plan.workers, config.launch.timeout),
        join_world(
            layout.replicate,
            config.launch.timeout + BACK_END_SECONDS,
            store,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            context=layout.context,
            device_type=layout.device,
        ) as world,
    ):
        phases.device = world.device
        recorder.log(f"{world.size} worker(s) on {world.device.type}, back end {world.backend}")
        if store is not None:
            plan = _agree(config, plan, world, store, recorder.log)

        def stop_requested() -> bool:
            """Whether a signal came or, of which one rank is enough to know, the run directory says so."""
            return stop_asked() or (rank == 0 and run.stop_asked.exists())

        finished = _train(WorkerSetting(config, plan, world, recorder.log, phases, stop_requested), run, recorder)
        recorder.log("done" if finished else "stopped as asked")
        recorder.close()
        position.update(phase="done" if finished else "stopped")
    return finished


def _train(setting: WorkerSetting, run: RunDirectory, recorder: Recorder) -> bool:
    """Assemble this rank's part of the job, and train it; whether it went to its end."""
    config, plan, checkpoint = setting.config, setting.plan, run.checkpoint_to_resume()
    try:
        job = assemble(setting, checkpoint, _own_loss(run, config, recorder.log))
    except StoppedEarly:
        return False
    gc.enable()  # a worker starts without
    first_step = step_of(checkpoint) + 1 if checkpoint else 1
    recorder.log(f"training steps {first_step} to {plan.num_steps}")
    return train(job, between_steps_of(run, config, plan), recorder, setting.phases, setting.stop_requested)


def _agree(config: Config, plan: Plan, world: World, store: Store, log: Callable[[str], None]) -> Plan:
    """The plan, which was made elsewhere, with the threads that this machine has for each worker."""
    if world.rank == 0 and (clocks := store.get(CLOCKS).decode()):
        log(clocks)
    launch = config.launch
    if launch.threads != "auto":
        return plan
    cpus = world.gather(describe_cpus())
    threads = [share_of(cpus, rank) for rank in range(world.size)]
    if isinstance(launch, RayLaunch) and launch.cpus_per_worker != "auto":  # no more than it has reserved
        threads = [min(share, launch.cpus_per_worker) for share in threads]
    log(f"CPU threads of the workers: {' '.join(map(str, threads))}")
    return replace(plan, threads_per_worker=threads[world.rank])


def _own_loss(run: RunDirectory, config: Config, log: Callable[[str], None]) -> OwnLoss | None:
    """The run's loss, where that is the user's own. Raises ``UserError``."""
    note = run.own_loss()
    if note is None:
        return None
    if os.environ.get(LAUNCHER) != "local":  # whose caller gave the function, which is what allows its code to run
        change = "go on with it from Python: tonnage.open_run(RUN).resume(loss=FUNCTION)"
        raise user_error("a loss of one's own", "a run that was started from Python", change, str(run.loss))
    log(f"the loss is {note.module}.{note.name}")
    return OwnLoss.of(loss_of(note, str(run.loss)), config.data.carry)
