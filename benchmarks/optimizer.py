"""Parameters a second of the optimizer update, for each way in which its state can rest, against the memory's speed.

    python benchmarks/optimizer.py [--million 50] [--rounds 12] [--output benchmarks/results/optimizer.json]

The floor of an update is the bytes it must read and write, over the memory's bandwidth measured in the same rounds: the
faster of a parallel copy and of a parallel addition in place, which is closer to what an update does (a round runs each
of them and every form once; medians are compared). Torch's fused AdamW on fp32 runs in the same rounds, to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tonnage.host.threads import usable_cores
from tonnage.kernels.moments import Codec
from tonnage.kernels.threads import use_threads
from tonnage.optim.optimizer import ShardedOptimizer

CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8")
COLUMNS = 1000
"""Not a multiple of a block, as half of all models have it."""


def updater(rows: int, dtype: torch.dtype, codec: Codec) -> tuple[Callable[[], None], float]:
    """One update of a matrix, and the bytes a parameter that it must move: gradient read, all else read and written."""
    weight = nn.Parameter(torch.randn(rows, COLUMNS).to(dtype))
    weight.grad = torch.randn(rows, COLUMNS).to(dtype)
    adamw = ShardedOptimizer({"weight": weight}, betas=(0.9, 0.95), eps=1e-8, decay=0.1, moments=codec)
    kept = weight.element_size() + adamw.state_bytes / weight.numel()
    return lambda: adamw.step(1e-4), 2 * kept + weight.grad.element_size()


def fused(rows: int) -> tuple[Callable[[], None], float]:
    weight = nn.Parameter(torch.randn(rows, COLUMNS))
    weight.grad = torch.randn(rows, COLUMNS)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)

    def update() -> None:
        optimizer.step()

    return update, 28.0


def copier(num_floats: int) -> tuple[Callable[[], None], float]:
    source, target = torch.ones(num_floats), torch.ones(num_floats)

    def copy() -> None:
        target.copy_(source)

    return copy, 8.0


def adder(num_floats: int) -> tuple[Callable[[], None], float]:
    values = torch.ones(num_floats)

    def add() -> None:
        values.add_(1.0)

    return add, 8.0


PROBES = ("copy", "add in place")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=int, default=50, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    use_threads(usable_cores())
    rows = arguments.million * 1_000_000 // COLUMNS
    size = rows * COLUMNS
    contestants = {
        "copy": copier(2 * size),
        "add in place": adder(2 * size),
        "torch.optim.AdamW fused, fp32": fused(rows),
    }
    for name, dtype in (("split", torch.bfloat16), ("fp32", torch.float32)):
        contestants |= {f"{name} master, {codec} moments": updater(rows, dtype, codec) for codec in CODECS}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(arguments.rounds + 1):
        for name, (run, _) in contestants.items():
            began = time.perf_counter()
            run()
            if turn:  # the first round compiles and touches memory
                seconds[name].append(time.perf_counter() - began)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    bandwidths = {name: contestants[name][1] * 2 * size / middle[name] for name in PROBES}
    bandwidth = max(bandwidths.values())
    rates = {
        name: {
            "parameters_per_second": size / middle[name],
            "bytes_a_parameter": moved,
            "bytes_per_second": moved * size / middle[name],
            "share_of_floor": moved * size / bandwidth / middle[name],
        }
        for name, (_, moved) in contestants.items()
        if name not in PROBES
    }
    result = {
        "benchmark": "optimizer",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {usable_cores()} cores",
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "parameters": size,
        "memory_bytes_per_second": bandwidths,
        "updates": rates,
    }
    print(json.dumps(result, indent=2))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
