"""Workers that say in which types a mixture is computed with, and how close its gradients are to an unsharded model's.

Told ``FAMILY PRECISION ZERO RECOMPUTE`` in one word each, with colons between; the first worker prints a line for each:
parameters computed with in fp32, parameters stored in less, and the largest relative difference of a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tiny import mixture_config
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta, initialise_randomly, on_meta
from tonnage.model.kept import kept_in_fp32
from tonnage.parallel.parallelize import Precision, Transforms, before_micro_batch, parallelize
from tonnage.parallel.world import World, join_world
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel


def batch() -> MicroBatch:
    ids = torch.randint(0, 250, (1, 30), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(3, 29)
    return MicroBatch(ids, (30,), positions, ids[0, positions + 1], torch.ones(26))


def built(family: str, world: World, precision: Precision, zero: int, recompute: Any) -> LossModel:
    config = mixture_config(family)
    model = build_on_meta(config, precision.storage)
    kept = kept_in_fp32(model, on_meta(mixture_config(family), precision.compute))
    anatomy = dissect(model)
    root = LossModel(model, anatomy)
    transforms = Transforms(zero=zero, recompute=recompute, in_fp32=kept)
    parallelize(root, anatomy.blocks, world.mesh, precision, transforms)
    allocate(model, world.device)
    initialise_randomly(model, 0)
    return root


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(root: LossModel, zero: int, number: int) -> tuple[set[str], dict[str, Tensor]]:
    """What is computed with in fp32, and the gradients of two micro-batches."""
    seen: set[str] = set()
    for path, module in root.model.named_modules():
        module.register_forward_pre_hook(
            lambda module, _, path=path: seen.update(
                f"{path}.{name}" for name, one in module.named_parameters(recurse=False) if one.dtype == torch.float32
            )
        )
    for turn in range(2):
        before_micro_batch(root, zero=zero, last=turn == 1)
        root(batch(), 26.0 * 2 * number).backward()
    return seen, {name: whole(one.grad).float() for name, one in root.model.named_parameters() if one.grad is not None}


def main(told: list[str]) -> None:
    with join_world(1, 60.0) as world:
        for word in told:
            family, name, zero, recompute = word.split(":")
            precision = Precision.of(name, world.size)
            root = built(family, world, precision, int(zero), recompute)
            seen, ours = gradients(root, int(zero), world.size)
            stored = {name for name, one in root.named_parameters() if one.dtype != torch.float32}
            alone = LossModel(model := build_on_meta(mixture_config(family), precision.compute), dissect(model))
            allocate(model, world.device)
            initialise_randomly(model, 0)
            _, theirs = gradients(alone, 3, 1)
            assert ours.keys() == theirs.keys()
            furthest = max(float((ours[key] - theirs[key]).norm() / theirs[key].norm()) for key in ours)
            if world.rank == 0:
                print(word, sorted(seen), len(stored), f"{furthest:.1e}")
