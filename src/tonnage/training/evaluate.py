"""The loss of a model on a dataset: the same sum and the same division as in training."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tonnage.parallel.world import World
from tonnage.training.batch import Deal, Packs, evaluation_steps
from tonnage.training.pipeline import Pipeline


@torch.no_grad()
def evaluate(
    pipeline: Pipeline,
    dataset: Packs,
    deal: Deal,
    world: World,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Mean loss per supervised token (by weight) of the whole dataset; the same number on every rank.

    ``progress`` is told packs done and packs in all.
    """
    loss, weight = torch.zeros((), dtype=torch.float64, device=world.device), 0.0
    for step in evaluation_steps(dataset, deal):
        for one in pipeline.passes(step.micro_batches, 1.0, backward=False):
            for value in one.run():
                loss += value
        weight += step.weight
        progress(min(step.number * deal.packs_per_step, dataset.num_packs), dataset.num_packs)
    total, weight = world.sum(*world.once(float(loss), weight))
    return total / weight if weight else float("nan")
