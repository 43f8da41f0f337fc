"""How fast one device computes: matrix products, memory, the optimizer's update, copies from and to the host.

Each is the operation that training makes, by the code that training uses, at sizes that no cache holds. What
is to be compared runs in turns, once unseen (compilation, first touch of memory) and then again and again for some
time; medians count. In haste there are a few turns only, which others may disturb, and the fastest counts.
"""

from __future__ import annotations

import math
import mmap
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tonnage.host.allocators import HUGE_PAGES, huge_pages
from tonnage.host.lockable import limited_to, raise_limit
from tonnage.host.locked import host_memory, lock
from tonnage.kernels.moments import Codec
from tonnage.kernels.products import linear
from tonnage.kernels.streams import Stream
from tonnage.optim.optimizer import ShardedOptimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8")
HIDDEN = {"cpu": 1024, "cuda": 4096}
TOKENS = {"cpu": (16, 128, 1024), "cuda": (512, 2048, 8192)}
"""Tried in turn; the last counts that does not take too long."""
IN_HASTE = {"cpu": (64, 256, 512), "cuda": TOKENS["cuda"]}
LEAST_RUNS, MOST_RUNS = 3, 200
LEAST_IN_HASTE = 2
COLUMNS = 1000
"""Of the matrix that is updated. Not a multiple of a block of int8 moments, as in half of all models."""
TRAFFIC_SHAPE = (1024, 1024)
"""Of the tensors that norms and the like read and write."""
MADE_SHAPE = (512, 256)
"""Of the inputs of a product whose result, of twice as many columns, comes in memory that is new: 1 MB, so in small
pages, as most tensors of a model that such a machine trains."""
LONGEST_PART = 100
"""Memory that is new takes a hundredth of a product's time at least: what is less is lost in noise."""
PINNED_BYTES = 256 << 20
LOCKED_BYTES = 8 << 20
"""That are locked to see whether they may be."""
OWN = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Of memory as a heap has it: what could be shared with other processes comes in small pages."""


def seconds_of(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    budget_seconds: float,
    *,
    in_haste: bool = False,
) -> dict[str, float]:
    """Time of each run, of at least ``LEAST_RUNS`` rounds of all and as many as ``budget_seconds`` hold.

    In rounds, so that whatever else the machine does slows all of them and their ratios hold.
    """
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    least, pick = (LEAST_IN_HASTE, min) if in_haste else (LEAST_RUNS, statistics.median)
    end, rounds = time.perf_counter() + budget_seconds, 0
    while rounds < least or (time.perf_counter() < end and rounds < MOST_RUNS):
        for name, run in runs.items():
            times[name].append(_once(run, device))
        rounds += 1
    return {name: pick(taken) for name, taken in times.items()}


def _once(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def product_flops(
    device: torch.device, budget_seconds: float, limit_seconds: float, *, in_haste: bool = False
) -> dict[str, float]:
    """FLOP/s of the three products of a linear layer from ``h`` to ``4 h``, forward and backward, by data type.

    Output (tokens, h) x (h, 4 h), the gradient of the input (tokens, 4 h) x (4 h, h) and of the weight
    (4 h, tokens) x (tokens, h): 8 tokens h^2 FLOP each. A type for which the least runs of the next larger size would
    take more than ``limit_seconds`` is left at the last one: without instructions for it, products can take minutes.
    """
    hidden, rates = HIDDEN[device.type], dict[str, float]()
    sizes, least = (IN_HASTE, LEAST_IN_HASTE) if in_haste else (TOKENS, LEAST_RUNS)
    shape = (4 * hidden, hidden)
    weights = {name: torch.randn(shape, device=device).to(dtype).requires_grad_() for name, dtype in DTYPES.items()}
    for tokens in sizes[device.type]:
        flops = 24.0 * tokens * hidden**2
        chosen = [name for name in DTYPES if (least + 1) * flops < limit_seconds * rates.get(name, math.inf)]
        layers = {name: _layer(weights[name], tokens) for name in chosen}
        budget = budget_seconds if tokens == sizes[device.type][-1] else 0.0
        seconds = seconds_of(layers, device, budget, in_haste=in_haste)
        rates |= {name: flops / seconds[name] for name in chosen}
    return rates


def _layer(weight: Tensor, tokens: int) -> Callable[[], object]:
    wide, hidden = weight.shape
    inputs = torch.randn(tokens, hidden, device=weight.device).to(weight.dtype).requires_grad_()
    gradient = torch.randn(tokens, wide, device=weight.device).to(weight.dtype)
    return lambda: torch.autograd.grad(linear(inputs, weight, None), (inputs, weight), gradient)


def memory_rate(device: torch.device, num_bytes: int, budget_seconds: float, *, in_haste: bool = False) -> float:
    """Bytes read plus written a second by the faster of a copy and an addition in place, over ``num_bytes`` each."""
    source, target = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
    ways = {"copy": lambda: target.copy_(source), "add": lambda: target.add_(1.0)}
    return 2.0 * num_bytes / min(seconds_of(ways, device, budget_seconds, in_haste=in_haste).values())


def traffic_rates(device: torch.device, budget_seconds: float, *, in_haste: bool = False) -> dict[str, float]:
    """Bytes read plus written a second by what a block does besides products, forward and backward, by data type: it
    computes more than it moves.

    A norm, an activation and a residual sum read and write seven tensors, their gradients and the sum of two nine.
    """
    rows, hidden = TRAFFIC_SHAPE
    ways = {name: _elementwise(dtype, device, rows, hidden) for name, dtype in DTYPES.items()}
    seconds = seconds_of(ways, device, budget_seconds, in_haste=in_haste)
    return {name: 16.0 * rows * hidden * DTYPES[name].itemsize / spent for name, spent in seconds.items()}


def _elementwise(dtype: torch.dtype, device: torch.device, rows: int, hidden: int) -> Callable[[], object]:
    inputs = torch.randn(rows, hidden, device=device).to(dtype).requires_grad_()
    scale, gradient = torch.ones(hidden, dtype=dtype, device=device), torch.ones_like(inputs)

    def run() -> object:
        outputs = F.gelu(F.layer_norm(inputs, (hidden,), scale)) + inputs
        return torch.autograd.grad(outputs, inputs, gradient)

    return run


def fresh_rate(num_bytes: int, budget_seconds: float, *, in_haste: bool = False) -> float:
    """Bytes a second at which one core first writes to memory that the system has just given, in pages as large as
    those of all large tensors (``host.allocators``)."""

    def write() -> None:
        with mmap.mmap(-1, num_bytes, **OWN) as pages:
            if os.environ.get(HUGE_PAGES, huge_pages()) == "1" and hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them
                    pages.madvise(mmap.MADV_HUGEPAGE)
            written = np.frombuffer(pages, np.uint8)
            written.fill(1)
            del written  # or the pages cannot be given back

    return num_bytes / seconds_of({"write": write}, torch.device("cpu"), budget_seconds, in_haste=in_haste)["write"]


def made_rate(cores: int, budget_seconds: float, *, in_haste: bool = False) -> float:
    """Bytes a second and core at which a product's result comes in memory that the system has just given, and that it
    takes back: by how much longer that takes than in memory that is there."""
    rows, inner = MADE_SHAPE
    inputs, weight = torch.randn(rows, inner), torch.randn(inner, 2 * inner)
    result = torch.empty(rows, 2 * inner)

    def into_new() -> None:
        with mmap.mmap(-1, result.nbytes, **OWN) as pages:
            product = torch.frombuffer(pages, dtype=result.dtype).view(result.shape)
            torch.mm(inputs, weight, out=product)
            del product  # or the pages cannot be given back

    ways = {"new": into_new, "there": lambda: torch.mm(inputs, weight, out=result)}
    seconds = seconds_of(ways, torch.device("cpu"), budget_seconds, in_haste=in_haste)
    longer = max(seconds["new"] - seconds["there"], seconds["new"] / LONGEST_PART)
    return result.nbytes / longer / cores


def update_rates(device: torch.device, num_parameters: int, budget_seconds: float) -> dict[str, float]:
    """Parameters a second of AdamW's update of a bf16 matrix, by how its moments rest."""
    rows = max(1, num_parameters // COLUMNS)
    weight = torch.full((rows, COLUMNS), 0.5, dtype=torch.bfloat16, device=device)
    gradient = torch.full_like(weight, 0.01)
    updates: dict[str, Callable[[], object]] = {codec: _update(weight, gradient, codec) for codec in CODECS}
    return {codec: weight.numel() / seconds for codec, seconds in seconds_of(updates, device, budget_seconds).items()}


def _update(weight: Tensor, gradient: Tensor, codec: Codec) -> Callable[[], object]:
    parameter = nn.Parameter(weight.clone())
    parameter.grad = gradient
    adamw = ShardedOptimizer({"weight": parameter}, betas=(0.9, 0.95), eps=1e-8, decay=0.1, moments=codec)
    return lambda: adamw.step(1e-4)


def counts_locked() -> bool:
    """Whether what is locked for an accelerator counts against the limit of this process (``ulimit -l``): more cannot
    be locked then. What can be is tried again with a limit of nothing."""
    raise_limit()
    if lock(host_memory(LOCKED_BYTES)) == 0:
        with limited_to(0):
            return lock(host_memory(LOCKED_BYTES)) != 0
    return lock(host_memory(mmap.PAGESIZE)) == 0  # and not because nothing can be locked here


def host_copy_rate(device: torch.device, budget_seconds: float, memory: Tensor | None = None) -> float:
    """Bytes a second from host memory to an accelerator while as many come back, as state does that is updated there.
    ``memory`` is locked, twice ``PINNED_BYTES``; without any it is what torch pins."""
    if memory is None:
        memory = torch.zeros(2 * PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    hosts = memory.split(PINNED_BYTES)
    buffers = [torch.zeros(PINNED_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    inward, outward = Stream(device), Stream(device)

    def both() -> None:
        for stream, to, come_from in ((inward, buffers[0], hosts[0]), (outward, hosts[1], buffers[1])):
            stream.follow()
            with stream:
                to.copy_(come_from, non_blocking=True)
        for stream in (inward, outward):
            stream.join(stream.mark())

    return PINNED_BYTES / seconds_of({"both ways": both}, device, budget_seconds)["both ways"]
