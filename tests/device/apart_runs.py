"""A worker that trains written runs on the device ``apart``: ``train_runs``, elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import train_runs

from device import apart, apart_group
from tonnage.host import locked
from tonnage.kernels.threads import use_threads
from tonnage.parallel.world import World, device_mesh


@contextmanager
def joined() -> Iterator[World]:
    """The workers, each of which has the device."""
    apart.register()
    apart_group.register()
    use_threads(1)  # a run whose host updates sets it, and several threads sum in another order than one
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("apart", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    device = torch.device(apart.NAME, 0)
    yield World(rank, size, device, "apart", device_mesh(device, size, 1))
    dist.destroy_process_group()


def main(paths: list[str]) -> None:
    """``late`` among ``paths``: copies in streams are made as late as they may."""
    sys.setswitchinterval(1e-4)  # threads hand each other the interpreter at every operation
    apart.streams_run_late = "late" in paths
    taken = locked.host_memory
    locked.host_memory = lambda num_bytes: apart.locked(taken(num_bytes))
    train_runs.main([path for path in paths if path != "late"], joined)
