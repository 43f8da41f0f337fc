"""A layer with a weight of 4 or 8 bits beside the same layer in bf16: forward pass and gradient of the inputs.

    python benchmarks/quantized.py [--rounds 30] [--threads 2] [--output benchmarks/results/quantized.json]

A round runs each of them once, in turns; medians are compared, and the middle half of the ratios within rounds is told
beside them, as others may use the machine. Two figures are given for each format: times ``F.linear`` in bf16, and times
the floor of memory, which is what a layer must read and write (packed weight twice, inputs, outputs and their gradients
once each) at the rate of a parallel copy in the same rounds. Seconds are those of a clock on the wall or, on one
thread, of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F

from tonnage.host.processor import processor
from tonnage.host.quantized import Format
from tonnage.host.threads import usable_cores
from tonnage.kernels.quantized import pack
from tonnage.kernels.quantized_products import linear
from tonnage.kernels.threads import use_threads
from tonnage.training.memory import set_up_heap

SHAPES = ((1536, 576), (576, 1536), (2048, 2048), (4096, 4096))
"""Outputs and inputs of layers."""
ROWS = (512, 1024, 4096)
FORMATS = get_args(Format)
COPIED = 1 << 26
"""Bytes."""


def both_ways(call: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, gradient: torch.Tensor) -> None:
    inputs.grad = None
    call(inputs).backward(gradient)


def contestants(rows: int, shape: tuple[int, int]) -> dict[str, Callable[[], object]]:
    """What runs in a round, by name."""
    weight = (0.02 * torch.randn(shape)).bfloat16()
    inputs = torch.randn(rows, shape[1]).bfloat16().requires_grad_()
    gradient = torch.randn(rows, shape[0]).bfloat16()
    source, target = torch.ones(COPIED // 4), torch.ones(COPIED // 4)
    found: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "bf16": lambda: both_ways(lambda given: F.linear(given, weight), inputs, gradient),
    }
    for form in FORMATS:
        packed = pack(weight, form)
        found[form] = lambda packed=packed: both_ways(lambda given: linear(given, packed), inputs, gradient)  # type: ignore[misc]
    return found


def measure(rows: int, shape: tuple[int, int], rounds: int, clock: Callable[[], float]) -> dict[str, object]:
    """Medians of all, and ratios, for one layer."""
    running = contestants(rows, shape)
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(rounds + 1):
        for name, run in running.items():
            began = clock()
            run()
            if turn:  # the first round compiles and touches memory
                seconds[name].append(clock() - began)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    bandwidth = 2 * COPIED / middle["copy"]
    result: dict[str, object] = {"rows": rows, "outputs": shape[0], "inputs": shape[1], "bf16_seconds": middle["bf16"]}
    for form in FORMATS:
        held = sum(tensor.nbytes for tensor in pack(torch.zeros(shape).bfloat16(), form).named().values())
        floor = (2 * held + 4 * rows * sum(shape)) / bandwidth
        ratios = [ours / theirs for ours, theirs in zip(seconds[form], seconds["bf16"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        result[form] = {
            "seconds": middle[form],
            "times_bf16": middle[form] / middle["bf16"],
            "middle_half_of_ratios": [low, high],
            "times_memory_floor": middle[form] / floor,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    set_up_heap(returns=False)  # as a worker does that has the room
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    layers = []
    for shape in SHAPES:
        for rows in ROWS:
            rounds = max(5, min(arguments.rounds, arguments.rounds * 2**32 // (rows * shape[0] * shape[1])))
            layers.append(measure(rows, shape, rounds, clock))
            print(json.dumps(layers[-1]), flush=True)
    result = {
        "benchmark": "quantized",
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "threads": arguments.threads,
        "seconds_are_of": "the processor" if arguments.threads == 1 else "the wall",
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "layers": layers,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
