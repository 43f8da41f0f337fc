"""A worker that assembles written runs on the device ``apart``, and prints what each then holds of it, in bytes."""

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


def main(paths: list[str]) -> None:
    found = []
    with apart_runs.joined() as world:
        taken = locked.host_memory
        locked.host_memory = lambda num_bytes: apart.locked(taken(num_bytes))
        for path in paths:
            gc.collect()
            before = apart.allocated.now
            run = RunDirectory(path)
            phases = Phases(PositionFile(run.worker_position(0)))
            job = assemble(*train_runs.read(run), world, lambda message: None, phases)
            gc.collect()
            found.append(apart.allocated.now - before)
            del job
    print(json.dumps(found))
