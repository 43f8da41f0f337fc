"""A worker that trains, or goes on with, several written runs one after another: ``train_runs.py RUN [RUN ...]``.

Each run goes through the real assembly and the real loop; only the process start is shared. ``RUN+`` does not train: it
saves again what it goes on from, as the next step.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from tonnage.checkpoint.save import Saver
from tonnage.config import Config, read_config
from tonnage.parallel.world import World, context_of, device_mesh, join_world
from tonnage.planning.layout import Layout
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.training.assemble import assemble, between_steps_of
from tonnage.training.loop import train
from tonnage.training.memory import Phases
from tonnage.training.metrics import Recorder
from tonnage.training.setting import WorkerSetting


def read(run: RunDirectory) -> tuple[Config, Plan]:
    return read_config(run.config, [], check_files=False), Plan.read(run.plan)


def on_mesh_of(world: World, layout: Layout) -> World:
    mesh = device_mesh(world.device, world.size, layout.replicate, tensor=layout.tensor, pipeline=layout.pipeline)
    context = context_of(mesh, layout.context) if layout.context > 1 else None
    return replace(world, mesh=mesh, context=context)


def main(paths: list[str], join: Callable[[], AbstractContextManager[World]] = join_world) -> None:
    with join() as joined:
        for path in paths:
            run = RunDirectory(path.removesuffix("+"))
            config, plan = read(run)
            world = on_mesh_of(joined, plan.layout)
            recorder = Recorder(run, rank=world.rank)
            phases = Phases(PositionFile(run.worker_position(world.rank)))
            job = assemble(WorkerSetting(config, plan, world, recorder.log, phases), run.checkpoint_to_resume())
            if path.endswith("+"):
                cursor = replace(job.cursor, step=job.cursor.step + 1)
                Saver(run.checkpoints, 99, world).save(cursor, *job.snapshot()[:2], job.facts, wait=True)
                continue
            between_steps = between_steps_of(run, config, plan)
            train(job, between_steps, recorder, phases, lambda: False)
            recorder.close()


if __name__ == "__main__":
    main(sys.argv[1:])
