"""The largest head: told ``FOLDER ROWS COLUMNS TILES``, it prints how much memory two passes and an update take.

Bytes of the weight, and how far resident memory grew beyond that of the process at rest, mapped pages of files among
it, as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tonnage.offload.pages import Pages
from tonnage.optim.gradients import GradientsOnDisk
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.parallel.streaming import over_pages
from tonnage.parallel.tiled import TiledWeight
from tonnage.parallel.world import join_world
from tonnage.training.memory import set_up_heap
from tonnage.training.tiled_vocabulary import TiledHead

TOKENS = 64


def resident(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def grown(passes: Callable[[], None]) -> int:
    """By how much resident memory grows at most in some passes."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
    passes()
    return resident("VmHWM") - before


def main(told: list[str]) -> None:
    set_up_heap(returns=True)  # as a run does whose plan counts with that
    folder, (rows, columns, number) = Path(told[0]), map(int, told[1:])
    with torch.device("meta"):
        head = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
    with join_world() as world:
        weight = TiledWeight([(head, "weight")], number, torch.bfloat16, world.mesh["replicate", "shard"])
    pages = Pages({"weight": 2 * rows * columns}, [folder], "the head")
    weight.put(over_pages({"weight": weight.parameter}, pages)["weight"])
    weight.rest_in(pages, "weight")
    for tile in weight.tiles():
        tile.matrix.uniform_(-0.02, 0.02)
    pages.rest(["weight"])  # what filling has left there would hide what passes leave
    how: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "decay": 0.1, "moments": "int8"}
    optimizer = ShardedOptimizer(
        {"weight": weight.parameter}, gradients=partial(GradientsOnDisk, directories=[folder]), pages=pages, **how
    )
    little = nn.Parameter(torch.ones(1, columns, dtype=torch.bfloat16))
    little.grad = torch.ones_like(little)
    ShardedOptimizer({"little": little}, **how).step(1e-3)  # loops are compiled, as a run does before it begins
    for state in optimizer.tensors().values():
        state.fill_(0)  # it is in memory, and there before anything is measured
    optimizer.divide("weight", weight.part_numel)
    weight.begin(optimizer.gradients.add_part)
    hidden = torch.randn(TOKENS, columns, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.arange(0, rows, -(-rows // TOKENS))
    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses.append(TiledHead(weight, head, 1.0, None).loss(hidden, targets, torch.ones(TOKENS)))

    found = [grown(forward), grown(lambda: losses[0].backward()), grown(lambda: optimizer.step(1e-3))]
    assert hidden.grad is not None
    norms = [float(hidden.grad.norm()), float(optimizer.gradients.squared_norm())]
    assert all(0 < norm < float("inf") for norm in norms)
    print(json.dumps([pages.num_bytes, *found, float(losses[0].detach())]))


if __name__ == "__main__":
    main(sys.argv[1:])
