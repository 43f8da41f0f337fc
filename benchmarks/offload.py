"""The optimizer's step with its state on disk, against what the disk can do.

    python benchmarks/offload.py [--million 400] [--rounds 5] [--directory DIR ...] [--output FILE]

In turn, in one process: the disk's raw speed, and whole steps. Raw speed is threads that do nothing but read a file of
the state's size in large requests past the page cache while as many others write another, for a few seconds; with two
and with four threads of each kind, and the faster counts. A step reads, updates and writes all state; it is timed
from its call to its last byte written, with nothing read ahead. The ratio of a round is the step's bytes a second over
those of the raw runs before and after it.

The default state is that of 400 M parameters in bf16 with fp32 moments: 4 GB. For pythia-1b write ``--million 1012``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tonnage.host.threads import usable_cores
from tonnage.kernels.threads import use_threads
from tonnage.offload.files import TileFile
from tonnage.optim.on_disk import StateOnDisk
from tonnage.optim.optimizer import ShardedOptimizer

REQUEST_BYTES = 8 << 20
COLUMNS = 2048
LAYER_ROWS = 8192
"""Parameters come in matrices of 16 M elements, as those of a model of a billion do."""


class RawDisk:
    """Two files of the state's size, one to be read and one to be written, by threads that do nothing else."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self._requests = max(8, num_bytes // REQUEST_BYTES)
        self._folder = tempfile.TemporaryDirectory(dir=directory)
        self._read_from, self._written_to = (
            TileFile(Path(self._folder.name) / name, create_bytes=self._requests * REQUEST_BYTES)
            for name in ("read", "write")
        )
        page = memoryview(mmap.mmap(-1, REQUEST_BYTES))
        for number in range(self._requests):  # space that was only reserved is read without the disk
            self._read_from.write(page, number * REQUEST_BYTES)
            self._written_to.write(page, number * REQUEST_BYTES)

    def bytes_per_second(self, num_threads: int, seconds: float) -> float:
        """Bytes read and written a second, by ``num_threads`` threads each, for ``seconds``."""
        moved: list[int] = []
        end = time.perf_counter() + seconds

        def work(move: Callable[[memoryview, int], None], thread: int) -> None:
            pages = mmap.mmap(-1, REQUEST_BYTES)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
            buffer = memoryview(pages)
            number = thread
            while time.perf_counter() < end:
                move(buffer, number % self._requests * REQUEST_BYTES)
                moved.append(REQUEST_BYTES)
                number += num_threads

        began = time.perf_counter()
        moves = (self._read_from.read, self._written_to.write)
        threads = [threading.Thread(target=work, args=(move, n)) for move in moves for n in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(moved) / (time.perf_counter() - began)

    def close(self) -> None:
        """Delete the files."""
        self._read_from.close()
        self._written_to.close()
        self._folder.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=int, default=400, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a raw run")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--moments", choices=("fp32", "bf16", "int8"), default="fp32")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    use_threads(usable_cores())
    layers = max(1, round(arguments.million * 1e6 / (LAYER_ROWS * COLUMNS)))
    named = {}
    for number in range(layers):
        named[f"layer.{number}"] = nn.Parameter(torch.randn(LAYER_ROWS, COLUMNS).bfloat16())
        named[f"layer.{number}"].grad = torch.randn(LAYER_ROWS, COLUMNS).bfloat16()
    num_parameters = sum(parameter.numel() for parameter in named.values())
    folder = Path(tempfile.mkdtemp(dir=arguments.directory))
    adamw = ShardedOptimizer(
        named,
        betas=(0.9, 0.95),
        eps=1e-8,
        decay=0.1,
        moments=arguments.moments,
        tier=partial(StateOnDisk, directories=[folder], log=print),
    )
    disk = adamw.tier
    assert isinstance(disk, StateOnDisk)
    for _ in range(2):  # compiles, and writes all space once
        adamw.step(1e-4)
    disk.store.flush()

    raw_disk = RawDisk(folder, adamw.state_bytes)

    def raw() -> float:
        rates = [raw_disk.bytes_per_second(threads, arguments.seconds) for threads in (2, 4)]
        print(f"raw: {' and '.join(f'{rate / 1e9:.2f}' for rate in rates)} GB/s with 2 and 4 threads", flush=True)
        return max(rates)

    raws, rates, waits = [raw()], [], []
    for _ in range(arguments.rounds):
        before = replace(disk.store.counters)
        began = time.perf_counter()
        adamw.step(1e-4)
        disk.store.flush()
        seconds = time.perf_counter() - began
        after = disk.store.counters
        moved = after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written
        rates.append(moved / seconds)
        waits.append((after.waited_seconds - before.waited_seconds) / seconds)
        print(f"step: {seconds:.2f} s, {moved / seconds / 1e9:.2f} GB/s, {waits[-1]:.0%} of it waiting", flush=True)
        raws.append(raw())
    ratios = [2 * rate / (raws[n] + raws[n + 1]) for n, rate in enumerate(rates)]
    raw_disk.close()
    disk.close()
    folder.rmdir()  # nothing is in it
    result = {
        "benchmark": "offload",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {usable_cores()} cores",
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "parameters": num_parameters,
        "moments": arguments.moments,
        "state_bytes": adamw.state_bytes,
        "host_bytes": disk.host_bytes,
        "raw_bytes_per_second": raws,
        "step_bytes_per_second": rates,
        "step_seconds_median": statistics.median(2 * adamw.state_bytes / rate for rate in rates),
        "share_waiting_median": statistics.median(waits),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
    print(json.dumps(result, indent=2))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
