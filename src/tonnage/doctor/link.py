"""How fast workers of this machine exchange numbers: an all-reduce among as many processes as there are devices.

On the CPU there are two, which share the cores as the workers of a run do. They are started and find one another in the
same way as those of a run (``launch.local``, ``parallel.world``). Each executes this file.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from tonnage.files.reading import read_json
from tonnage.files.writing import write_json
from tonnage.launch.local import run_workers
from tonnage.rundir.directory import RunDirectory

NUM_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
RUNS = 7
CPU_WORKERS = 2


def link_rate(num_workers: int, threads: int) -> float:
    """Bytes a second that each worker sends: an all-reduce of B bytes among N moves 2 (N - 1) / N * B from each.

    Raises:
        WorkerFailed: they could not be started, or did not find one another.
    """
    with tempfile.TemporaryDirectory(prefix="tonnage-doctor-") as folder:
        command = [sys.executable, "-m", "tonnage.doctor.link", folder]
        run_workers(RunDirectory(Path(folder, "run")), num_workers, threads, command=command)
        return float(read_json(Path(folder, "link.json"))["bytes_per_second"])


def work(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from tonnage.parallel.world import join_world

    with join_world(timeout_seconds=60.0) as world:
        num_bytes = NUM_BYTES[world.device.type]
        values = torch.ones(num_bytes // 4, device=world.device)
        times = []
        for _ in range(RUNS):
            world.barrier()
            began = time.perf_counter()
            dist.all_reduce(values)
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        if world.rank == 0:
            sent = 2 * (world.size - 1) / world.size * num_bytes
            write_json(folder / "link.json", {"bytes_per_second": sent / statistics.median(times[1:])})


if __name__ == "__main__":
    work(Path(sys.argv[1]))
