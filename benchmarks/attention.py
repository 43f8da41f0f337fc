"""Attention to one long document, forward and backward: ours beside torch's fused one, and beside its products alone.

    python -m benchmarks.attention [--lengths 2048 8192] [--heads 12/12 9/3] [--windows 0 1024] [--softcaps 0]
                                   [--rounds 3] [--threads 2] [--patience 20]
                                   [--output benchmarks/results/attention.json]

Heads are those of queries and of keys and values, of 64 numbers each; a window or a cap of 0 is none. A round runs each
once, in turns: ours in bf16 and fp32, torch's ``scaled_dot_product_attention`` in bf16 and fp32, and one large product,
by whose rate the floor is reckoned: seven products of queries and keys that see each other, and nothing that is hidden.
The floor is no bound where a library's large product is slower than ours. Ratios are taken round by round. What took
longer than ``--patience`` seconds runs in the first round only, and is compared with ours of that round.

Torch's has no window of its own: it is given a mask, which is made beforehand. Scores that are capped it computes in no
fused kernel: there ours stands alone. All outputs and gradients are compared with torch's in fp32 before anything is
timed (at 512 tokens, with a window of a quarter of that; capped scores with their definition).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.peers.contest import machine, write_result
from torch import Tensor, nn

from tonnage.host.threads import usable_cores
from tonnage.kernels.threads import use_threads
from tonnage.model.attention import compile_loops, packed_attention
from tonnage.training.memory import set_up_heap

SIZE = 64
"""Of a head."""
LARGE = 2048
"""Rows and columns of the product whose rate counts."""
CHECKED = 512
"""Tokens with which both are compared."""
AGREE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""How far gradients may be apart, in parts of their length."""


@dataclass(frozen=True)
class Case:
    """One document."""

    length: int
    heads: int
    kv_heads: int
    window: int
    softcap: float

    def visible(self) -> Tensor:
        """Which keys queries see, bool (length, length)."""
        place = torch.arange(self.length)
        distance = place[:, None] - place
        return (distance >= 0) & (distance < (self.window or self.length))

    def floor_flops(self) -> float:
        """Of the products of queries and keys that see each other, forward (2) and backward (5)."""
        window = min(self.window or self.length, self.length)
        pairs = window * (window + 1) / 2 + (self.length - window) * window
        return 7 * 2 * SIZE * self.heads * pairs

    def inputs(self, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
        """Query, key and value as models have them, and the gradient of the output."""
        torch.manual_seed(0)
        numbers = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        drawn = [torch.randn(1, self.length, number, SIZE).to(dtype).transpose(1, 2) for number in numbers]
        return [tensor.requires_grad_() for tensor in drawn[:3]], drawn[3]


def ours(case: Case) -> Callable[..., Tensor]:
    module = nn.Identity()
    given: dict[str, Any] = {"sliding_window": case.window or None, "softcap": case.softcap or None}
    return lambda query, key, value: packed_attention(module, query, key, value, None, **given)[0].transpose(1, 2)


def torchs(case: Case) -> Callable[..., Tensor]:
    mask = case.visible() if case.window else None
    grouped = case.heads != case.kv_heads
    return lambda query, key, value: F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def by_definition(case: Case) -> Callable[..., Tensor]:
    def computed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (tensor.repeat_interleave(case.heads // case.kv_heads, 1) for tensor in (key, value))
        scores = query @ key.transpose(2, 3) * SIZE**-0.5
        scores = torch.tanh(scores / case.softcap) * case.softcap
        return scores.masked_fill(~case.visible(), float("-inf")).softmax(-1) @ value

    return computed


def timed(attend: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""
    start = time.perf_counter()
    output = attend(*inputs)
    between = time.perf_counter()
    torch.autograd.grad(output, inputs, gradient)
    return between - start, time.perf_counter() - between


def check(case: Case) -> None:
    """Refuse to time what computes something else."""
    short = Case(CHECKED, case.heads, case.kv_heads, min(case.window, CHECKED // 4), case.softcap)
    for dtype, apart in AGREE.items():
        inputs, gradient = short.inputs(dtype)
        wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
        output, expected = ours(short)(*inputs), (by_definition if case.softcap else torchs)(short)(*wide)
        ours_of = torch.autograd.grad(output, inputs, gradient)
        theirs_of = torch.autograd.grad(expected, wide, gradient.float())
        for mine, other in zip((output, *ours_of), (expected, *theirs_of), strict=True):
            assert (mine.float() - other).norm() < apart * other.norm(), f"{short} in {dtype} is not what it should be"


def product_rate() -> float:
    """FLOP/s of a large product, in fp32 or bf16, whichever is faster here."""
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(LARGE // 4, LARGE // 4, dtype=dtype)
        torch.mm(matrix, matrix)
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        if dtype == torch.bfloat16 and time.perf_counter() - start > 0.02:  # emulated
            continue
        matrix = torch.ones(LARGE, LARGE, dtype=dtype)
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        rates.append(2 * LARGE**3 / (time.perf_counter() - start))
    return max(rates)


def measure(case: Case, rounds: int, patience: float) -> dict[str, Any]:
    """Seconds by contestant and round, and what they come to."""
    ways = {"ours": ours(case)} | ({} if case.softcap else {"torch": torchs(case)})
    contestants = {
        f"{name} {str(dtype).removeprefix('torch.')}": (attend, *case.inputs(dtype))
        for dtype in (torch.bfloat16, torch.float32)
        for name, attend in ways.items()
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    rates = []
    for _ in range(rounds):
        rates.append(product_rate())
        for name, (attend, inputs, gradient) in contestants.items():
            if not seconds[name] or sum(seconds[name][0]) < patience:
                seconds[name].append(timed(attend, inputs, gradient))
    floor = case.floor_flops() / statistics.median(rates)
    whole = {name: [sum(both) for both in passes] for name, passes in seconds.items()}
    ratios = {
        name: statistics.median(theirs / mine for theirs, mine in zip(times, whole["ours bfloat16"], strict=False))
        for name, times in whole.items()
        if name.startswith("torch")
    }
    if "torch float32" in whole:
        pairs = zip(whole["torch float32"], whole["ours float32"], strict=False)
        ratios["torch float32, by ours in float32"] = statistics.median(theirs / mine for theirs, mine in pairs)
    return {
        **vars(case),
        "floor_seconds": floor,
        "product_gflops": statistics.median(rates) / 1e9,
        "floor_share_of_ours": floor / statistics.median(whole["ours bfloat16"]),
        "times_as_fast_as": ratios,
        "seconds_forward_backward": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--heads", nargs="+", default=["12/12", "9/3"])
    parser.add_argument("--windows", nargs="+", type=int, default=[0, 1024])
    parser.add_argument("--softcaps", nargs="+", type=float, default=[0.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--patience", type=float, default=20.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    set_up_heap(returns=False)
    use_threads(arguments.threads)
    for dtype in AGREE:
        compile_loops(dtype)
    cases = [
        Case(length, query_heads, kv_heads, window, softcap)
        for length in arguments.lengths
        for query_heads, kv_heads in (map(int, heads.split("/")) for heads in arguments.heads)
        for window in arguments.windows
        for softcap in arguments.softcaps
    ]
    results = []
    for case in cases:
        check(case)
        results.append(measure(case, arguments.rounds, arguments.patience))
        ratios = ", ".join(f"{ratio:.2f} of {name}" for name, ratio in results[-1]["times_as_fast_as"].items())
        ours_seconds = [sum(both) for both in results[-1]["seconds_forward_backward"]["ours bfloat16"]]
        share = results[-1]["floor_share_of_ours"]
        print(f"{case}: {statistics.median(ours_seconds):.2f} s, {share:.0%} of the floor, speed {ratios}", flush=True)
    facts = {"benchmark": "attention", "machine": machine(), "torch": torch.__version__, "threads": arguments.threads}
    write_result(arguments.output, {**facts, "cases": results})


if __name__ == "__main__":
    main()
