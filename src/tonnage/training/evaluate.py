"""What a model makes of a dataset, summed and divided as in training: loss, and how often the likeliest token is right.

evaluate    the loss alone, of a loss of one's own too
evaluate_pairs  loss, rewards and margin of pairs of answers, or of answers that are each good or bad
judge       loss and token accuracy of every source, with what their intervals follow from
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tonnage.data import PackedDataset
from tonnage.parallel.world import World
from tonnage.rundir.figures import Figure, RatioSums, Told
from tonnage.training.batch import Deal, MicroBatch, Packs, evaluation_steps
from tonnage.training.pipeline import Pipeline
from tonnage.training.preferences import PreferenceLoss

NUMBERS = 18
"""Sums of a source: six for the loss, six for the accuracy, six for the divergence from a teacher."""


def _silent(done: int, total: int) -> None: ...


@torch.no_grad()
def evaluate(
    pipeline: Pipeline,
    dataset: Packs,
    deal: Deal,
    world: World,
    *,
    progress: Callable[[int, int], None] = _silent,
) -> float:
    """Mean loss per supervised token (by weight) of the whole dataset; the same number on every rank.

    ``progress`` is told packs done and packs in all.
    """
    loss, weight = torch.zeros((), dtype=torch.float64, device=world.device), 0.0
    for step in evaluation_steps(dataset, deal):
        for turn in pipeline.passes(step.micro_batches, 1.0, backward=False):
            for value in turn.run():
                loss += value
        weight += step.weight
        progress(min(step.number * deal.packs_per_step, dataset.num_packs), dataset.num_packs)
    total, weight = world.sum(*world.once(float(loss), weight))
    return total / weight if weight else float("nan")


def evaluate_pairs(
    pipeline: Pipeline,
    dataset: Packs,
    deal: Deal,
    world: World,
    pair_loss: PreferenceLoss,
    *,
    progress: Callable[[int, int], None] = _silent,
) -> tuple[int, dict[str, Figure]]:
    """How many pairs, or answers with a label, a dataset has, and their figures (``PreferenceLoss.evaluated``); the
    same on every rank. ``progress`` as above."""
    pair_loss.clear()
    evaluate(pipeline, dataset, deal, world, progress=progress)
    return pair_loss.evaluated(world)


@torch.no_grad()
def judge(
    pipeline: Pipeline,
    dataset: PackedDataset,
    deal: Deal,
    world: World,
    names: Mapping[int, str],
    *,
    progress: Callable[[int, int], None] = _silent,
) -> tuple[Told, dict[str, Told]]:
    """Cross-entropy and token accuracy of the whole dataset, and by source; the same on every rank.

    ``names`` are those of the sources by their number, in the order in which they are told; sources without rows are
    left out. ``progress`` as above.
    """
    of_document, numbers = dataset.source.sources(), list(names)
    place = {number: at for at, number in enumerate(numbers)}

    def places(documents: Sequence[int]) -> list[int]:
        return [place[int(of_document[document])] for document in documents]

    summed = _sums(pipeline, dataset, deal, world, places, len(numbers), progress)
    by_source = {names[number]: _told(row) for number, row in zip(numbers, summed, strict=True) if row[0]}
    return _told(summed.sum(0)), by_source


@torch.no_grad()
def judged_loss(pipeline: Pipeline, dataset: Packs, deal: Deal, world: World) -> float:
    """The loss alone of what ``judge`` tells, of packs from anywhere: the same bits for rows of one source."""
    (sums,) = _sums(pipeline, dataset, deal, world, lambda documents: [0] * len(documents), 1, _silent)
    return _told(sums).loss.value


def _sums(
    pipeline: Pipeline,
    dataset: Packs,
    deal: Deal,
    world: World,
    places: Callable[[Sequence[int]], list[int]],
    number: int,
    progress: Callable[[int, int], None],
) -> np.ndarray:
    """Sums of ``number`` sources over all ranks, float64 (number, ``NUMBERS``); ``places`` gives the source of each of
    some documents, from 0."""
    sums = np.zeros((number, NUMBERS))
    for step in evaluation_steps(dataset, deal):
        batches = [replace(batch, judges=True) for batch in step.micro_batches]
        for turn in pipeline.passes(batches, 1.0, backward=False):
            for judgement in turn.run():
                if turn.batch.documents:
                    np.add.at(sums, places(turn.batch.documents), of_documents(turn.batch, judgement))
        progress(min(step.number * deal.packs_per_step, dataset.num_packs), dataset.num_packs)
    return np.array(world.sum(*world.once(*sums.flatten().tolist()))).reshape(sums.shape)


def of_documents(batch: MicroBatch, judgement: Tensor) -> np.ndarray:
    """What each document of a micro-batch adds to the sums of its source: float64 (documents, ``NUMBERS``).

    ``judgement``: fp32 (2 or 3, supervised), losses, whether the likeliest token is right and, with a teacher, the
    divergence from it, as a micro-batch that judges gives them.
    """
    counts = np.array(batch.targets_of, dtype=np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    losses, right, *divergences = judgement.double().cpu().numpy()[:, : len(owner)]
    weights = batch.weights[: len(owner)].double().numpy()
    weighs = (weights > 0).astype(np.float64)
    values = [losses * weights, weights, right * weighs, weighs, *(one * weights for one in divergences)]
    by_document = np.stack([counts, *(np.bincount(owner, one, minlength=len(counts)) for one in values)])
    if (context := batch.context) is not None:  # each of the ranks has some of a document, and one of them tells
        by_document = context.total(torch.from_numpy(by_document).to(judgement.device)).cpu().numpy()
        by_document *= context.rank == 0
    counts, *summed = by_document
    rows = (counts > 0).astype(np.float64)
    pairs = [(summed[0], summed[1]), (summed[2], summed[3])]
    pairs.append((summed[4], summed[1]) if divergences else (0 * rows, 0 * rows))
    columns = [column for x, y in pairs for column in (rows, x, y, x * x, x * y, y * y)]
    return np.stack(columns, axis=1)


def _told(sums: np.ndarray) -> Told:
    loss, right, divergence = (RatioSums(*map(float, sums[start : start + 6])) for start in range(0, NUMBERS, 6))
    from_teacher = divergence.figure if divergence.y else None
    return Told(int(loss.rows), int(right.y), loss.figure, right.figure.within(0.0, 1.0), from_teacher)
