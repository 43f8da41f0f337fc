"""tonnage as a contestant: a run that is written down, carried out as its worker does it, one turn at a time.

    python -m benchmarks.peers.ours RUN

The loop asks before every step whether it should stop; that question is where it waits for its turn. What an update
still does in the background when a turn is over is waited for: it does not happen in the time of others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tonnage.host.allocators import HUGE_PAGES, huge_pages

os.environ.setdefault(HUGE_PAGES, huge_pages())  # as the worker does, before torch is there

import torch
from benchmarks.peers.protocol import Seat

from tonnage.config import read_config
from tonnage.optim.on_disk import StateOnDisk
from tonnage.parallel.world import join_world
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.training.assemble import assemble
from tonnage.training.loop import BetweenSteps, train
from tonnage.training.memory import Phases
from tonnage.training.metrics import Recorder
from tonnage.training.setting import WorkerSetting


def main(path: str) -> None:
    run, seat = RunDirectory(path), Seat()
    rank = int(os.environ["RANK"])
    config, plan = read_config(run.config, [], check_files=False), Plan.read(run.plan)
    recorder = Recorder(run, rank=rank)
    phases = Phases(PositionFile(run.worker_position(rank)))
    with join_world(plan.layout.replicate) as world:
        phases.device = world.device
        began = time.perf_counter()
        job = assemble(WorkerSetting(config, plan, world, lambda message: print(message, flush=True), phases))
        facts = {"micro_batch": plan.layout.micro_batch, "recompute": plan.layout.recompute}
        seat.ready(torch=torch.__version__, build_seconds=time.perf_counter() - began, **facts)
        steps = told = 0

        def is_over() -> bool:
            nonlocal steps, told
            if steps > 1:
                steps -= 1
                return False
            if steps:
                job.optimizer.finish()
                if isinstance(job.optimizer.tier, StateOnDisk):
                    job.optimizer.tier.store.flush()
                records = [json.loads(line) for line in run.metrics.read_text().splitlines()][told:]
                losses, tokens = [one["loss"] for one in records], [one["tokens"] for one in records]
                device_peak = None
                if world.device.type == "cuda":
                    torch.cuda.synchronize()
                    device_peak = max(phases.peak.device, torch.cuda.max_memory_allocated())
                seat.done(losses, tokens, phases.peak.host, device_peak)
            told = len(run.metrics.read_text().splitlines()) if run.metrics.exists() else 0
            steps = seat.turn()
            if not steps:
                os._exit(0)  # nobody wants the checkpoint
            return False

        train(job, BetweenSteps(0, 0, Path(path) / "checkpoints", 1), recorder, phases, is_over)


if __name__ == "__main__":
    main(sys.argv[1])
