"""Workers that assemble written runs on the device ``apart``; one prints what each worker of each run holds of it, in
bytes."""

from __future__ import annotations

import gc
import json

import train_runs

from device import apart, apart_runs
from tonnage.host import locked
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.training.assemble import assemble
from tonnage.training.memory import Phases
from tonnage.training.setting import WorkerSetting


def main(paths: list[str]) -> None:
    found = []
    with apart_runs.joined() as world:
        taken = locked.host_memory
        locked.host_memory = lambda num_bytes: apart.locked(taken(num_bytes))
        for path in paths:
            gc.collect()
            before = apart.allocated.now
            run = RunDirectory(path)
            phases = Phases(PositionFile(run.worker_position(world.rank)))
            config, plan = train_runs.read(run)
            job = assemble(
                WorkerSetting(config, plan, train_runs.on_mesh_of(world, plan.layout), lambda message: None, phases)
            )
            gc.collect()
            found.append([int(held) for held in world.gather(str(apart.allocated.now - before))])
            del job
        if world.rank == 0:
            print(json.dumps(found))
