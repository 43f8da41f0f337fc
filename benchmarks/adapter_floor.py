"""How much less an adapter's products take than those of full weights: the least part of a full step that it can take.

    python -m benchmarks.adapter_floor [--shapes pythia-160m llama-135m] [--rank 32] [--tokens 2048] [--output FILE]

Every linear layer of a block and the head are multiplied as training multiplies them, forward and backward, in bf16 and
in turns: with all gradients, and frozen with an addition. Nothing else of a step is counted. Beside the ratio of times
is that of operations: of a frozen layer two products of three are left, and an addition of rank r has six more, of
``r (in + out)`` numbers a token each, which for layers of a small model is much.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.peers.contest import machine, write_result
from benchmarks.peers.inputs import SHAPES, write_model
from transformers import AutoConfig

from tonnage.host.threads import usable_cores
from tonnage.kernels.adapted import adapted_linear
from tonnage.kernels.products import linear
from tonnage.model.anatomy import dissect
from tonnage.model.build import build_on_meta

ROUNDS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["pythia-160m", "llama-135m"])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--output", type=Path)
    said = parser.parse_args()
    torch.set_num_threads(usable_cores())
    shapes = {}
    for shape in said.shapes:
        full = low_rank = full_flops = low_rank_flops = 0.0
        for (out, into, adapted), number in layers_of(shape).items():
            seconds = timed(out, into, said.tokens, said.rank if adapted else 0)
            full += number * seconds["full"]
            low_rank += number * seconds["frozen"]
            full_flops += number * 6 * out * into
            low_rank_flops += number * (4 * out * into + (6 * said.rank * (out + into) if adapted else 0))
        shapes[shape] = {
            "full_seconds": full,
            "adapter_seconds": low_rank,
            "part_of_time": low_rank / full,
            "part_of_operations": low_rank_flops / full_flops,
        }
        print(f"{shape}: {low_rank / full:.3f} of the time, {low_rank_flops / full_flops:.3f} of the operations")
    result = {"benchmark": "adapter_floor", "machine": machine(), "rank": said.rank, "tokens": said.tokens}
    write_result(said.output, result | {"shapes": shapes})


def layers_of(shape: str) -> Counter[tuple[int, int, bool]]:
    """How many layers of which size (out, in) a model has, and whether each is adapted: the head is not."""
    with tempfile.TemporaryDirectory() as made:
        model = build_on_meta(AutoConfig.from_pretrained(write_model(Path(made), shape, None)), torch.float32)
    anatomy = dissect(model)
    inside = [one for block in anatomy.blocks for one in block.modules() if isinstance(one, torch.nn.Linear)]
    found = Counter((*one.weight.shape, True) for one in inside)
    return found + Counter([(*anatomy.head.weight.shape, False)])


def timed(out: int, into: int, tokens: int, rank: int) -> dict[str, float]:
    """Seconds of a layer, forward and backward, trained (``full``) and frozen, with an addition if it has a rank."""
    weight = torch.randn(out, into).bfloat16()
    trained = weight.clone().requires_grad_()
    rows = torch.randn(tokens, into).bfloat16().requires_grad_()
    slopes = torch.randn(tokens, out).bfloat16()
    down = torch.randn(max(rank, 1), into).bfloat16().requires_grad_()
    up = torch.randn(out, max(rank, 1)).bfloat16().requires_grad_()

    def frozen() -> object:
        if not rank:
            return torch.autograd.grad(linear(rows, weight, None), rows, slopes)
        return torch.autograd.grad(adapted_linear(rows, weight, None, down, up, 2.0), (rows, down, up), slopes)

    ways: dict[str, Callable[[], object]] = {
        "full": lambda: torch.autograd.grad(linear(rows, trained, None), (rows, trained), slopes),
        "frozen": frozen,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


if __name__ == "__main__":
    main()
