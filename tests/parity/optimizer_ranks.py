"""Workers that update the same parameters as torch's optimizers do, each its own part: ``optimizer_ranks.py NAME``.

``NAME`` is an entry of ``CASES``. Parameters and gradients are whole on every worker for torch, and divided along the
shard axis for ours, or along a tensor axis of two and what is left along the shard axis (``NAME tensor``); what comes
out is compared after every step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tonnage.kernels.muon import Muon
from tonnage.kernels.regions import part_of, region_of
from tonnage.kernels.switches import switched_off
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.optim.tiers import Group
from tonnage.parallel.world import World, join_world

BETAS, EPS, DECAY, LR = (0.9, 0.95), 1e-8, 0.1, 1e-2
MATRICES = ("a.weight", "b.weight", "c.weight", "one row")
SHAPES = {
    "embed": (31, 24),
    "a.weight": (24, 24),
    "b.weight": (40, 24),
    "c.weight": (24, 40),
    "norm": (24,),
    "one row": (1, 24),
}
ALONG = {"embed": 0, "a.weight": 0, "b.weight": 1, "c.weight": 0}
"""Which dimension of them a tensor axis cuts, if any."""


def rate(step: int) -> float:
    """A schedule."""
    return LR * (1 - step / 40)


def torch_adamw(parameters: Mapping[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """AdamW of three groups, besides what does not decay."""
    groups = [
        {"params": [parameters["embed"]], "lr": LR / 8, "weight_decay": 0.0},
        {"params": [parameters["b.weight"]], "lr": LR * 16, "weight_decay": DECAY},
        {"params": [parameters["c.weight"]], "weight_decay": 0.3},
        {"params": [parameters["a.weight"], parameters["one row"]], "weight_decay": DECAY},
        {"params": [parameters["norm"]], "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)]


def our_adamw(parameters: Mapping[str, nn.Parameter]) -> ShardedOptimizer:
    """The same groups."""
    groups = {"embed": Group(0.0, 1 / 8), "b.weight": Group(DECAY, 16.0), "c.weight": Group(0.3)}
    return ShardedOptimizer(parameters, betas=BETAS, eps=EPS, decay=DECAY, groups=groups)


def torch_muon(parameters: Mapping[str, nn.Parameter], adjust_lr: str) -> list[torch.optim.Optimizer]:
    """Muon of the matrices, AdamW of the rest."""
    matrices = [{"params": [parameters[name]]} for name in MATRICES]
    matrices[0]["lr"] = LR / 4  # type: ignore[assignment]
    others = [
        {"params": [parameters["embed"]], "weight_decay": DECAY},
        {"params": [parameters["norm"]], "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, momentum=0.9, adjust_lr_fn=adjust_lr)
    return [muon, torch.optim.AdamW(others, lr=LR, betas=BETAS, eps=EPS)]


def our_muon(parameters: Mapping[str, nn.Parameter], adjust_lr: Any) -> ShardedOptimizer:
    """The same."""
    groups = {name: Group(DECAY, 0.25 if name == MATRICES[0] else 1.0, Muon(0.9, adjust_lr)) for name in MATRICES}
    return ShardedOptimizer(parameters, betas=BETAS, eps=EPS, decay=DECAY, groups=groups)


CASES: dict[
    str,
    tuple[
        Callable[[Mapping[str, nn.Parameter]], list[torch.optim.Optimizer]],
        Callable[[Mapping[str, nn.Parameter]], ShardedOptimizer],
        int,
    ],
] = {
    "groups": (torch_adamw, our_adamw, 10),
    "muon": (partial(torch_muon, adjust_lr="match_rms_adamw"), partial(our_muon, adjust_lr="match_rms_adamw"), 20),
    "original": (partial(torch_muon, adjust_lr="original"), partial(our_muon, adjust_lr="original"), 20),
}
"""Optimizers, and for how many steps they are compared."""


def whole(seed: int) -> dict[str, Tensor]:
    """Numbers in the shapes of all parameters, the same on every worker."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def compare(name: str, world: World) -> None:
    """Update by both, and compare after each step; raises ``AssertionError``."""
    make_theirs, make_ours, num_steps = CASES[name]
    mesh = world.mesh["replicate", "shard", "tensor"]
    tensor_ranks, shards = mesh.size(2), mesh.size(1)

    def part(tensor: Tensor, along: int | None) -> Tensor:
        """This rank's; ``along`` is the dimension that the tensor axis cuts."""
        if world.size == 1:
            return tensor.clone()
        ours, placement = tensor, cast(Placement, Replicate())
        if along is not None and tensor_ranks > 1:
            ours, placement = tensor.chunk(tensor_ranks, along)[mesh.get_local_rank(2)], Shard(along)
        rows = part_of(slice(0, ours.shape[0]), shards, mesh.get_local_rank(1))
        split = _StridedShard(0, split_factor=tensor_ranks) if placement == Shard(0) and tensor_ranks > 1 else Shard(0)
        placements = [Replicate(), split, placement]
        shape, stride = tensor.shape, tensor.stride()
        return DTensor.from_local(
            ours[rows].contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
        )

    reference = {name: nn.Parameter(value) for name, value in whole(0).items()}
    parts = {name: nn.Parameter(part(value.detach(), ALONG.get(name))) for name, value in reference.items()}
    theirs, ours = make_theirs(reference), make_ours(parts)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in theirs]
    for step in range(num_steps):
        for name, gradient in whole(step + 1).items():
            reference[name].grad, parts[name].grad = gradient, part(gradient, ALONG.get(name))
        for optimizer, own in zip(theirs, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = peak * rate(step) / LR
            optimizer.step()
        ours.step(rate(step))
        for name, parameter in parts.items():
            value, region = region_of(parameter)
            differences = (value - reference[name].detach()[region]).abs()
            difference = float(differences.max()) if differences.numel() else 0.0
            assert difference < 1e-6, f"{name} differs by {difference:g} after step {step + 1}"


def main(names: list[str], join: Callable[..., AbstractContextManager[World]] = join_world) -> None:
    """Torch's Muon computes in bf16 on every processor, and ours so where nothing is widened."""
    with join(tensor=2 if names[-1] == "tensor" else 1) as world, switched_off(["widening"]):
        for name in names:
            if name != "tensor":
                compare(name, world)


if __name__ == "__main__":
    main(sys.argv[1:])
