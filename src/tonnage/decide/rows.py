"""The rows of a config, prepared; and how full those of a run will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tonnage.config import Config, RayLaunch
from tonnage.data import DataError, ModelFacts, PackedDataset, Prepared, Progress, prepare
from tonnage.data.packs.padding import forwards, in_chunks
from tonnage.decide.images import check_images, images_taken
from tonnage.errors import Problem, UserError
from tonnage.planning.plan import Rows, RowSizes, Steps

if TYPE_CHECKING:
    from tonnage.decide.models import ModelFound

MOST_LOOKED_AT = 1 << 20
"""Packs of a run whose rows a plan looks at: the fullest row of so many hardly grows with more."""

MOST_STEPS = 200
"""Steps of a run whose documents a plan cuts into padded rows."""


def prepare_data(config: Config, model: ModelFound, progress: Progress) -> Prepared:
    """Rows to packs, or the packs of an earlier preparation of the same rows.

    Raises:
        UserError: rows cannot be read, or the model or the run cannot do with their images.
    """
    from tonnage.launch import ray
    from tonnage.model.files import positions_of

    data, cluster = config.data, None
    if isinstance(config.launch, RayLaunch) and config.launch.address is not None:
        ray.check_installed()
        cluster = config.launch
    alike: dict[str, Any] = {
        "seed": config.seed,
        "cache": Path(data.cache) if data.cache else None,
        "progress": progress,
        "processes": cluster,
    }
    if config.objective.scores:
        data = data.model_copy(update={"carry": ("margin",)})
    facts = ModelFacts(positions_of(model.config), images_taken(config, model))
    prepared = prepare(data, model.tokenizer, model=facts, purpose=config.objective.rows, **alike)
    check_images(config, model, prepared)
    if (general := config.evaluate.general) is None:
        return prepared
    as_text: dict[str, Any] = {"over_length": "split", "duplicates": "keep", "mixture": "rows", "carry": ()}
    others = data.model_copy(update={"train": general, "validation": 0.0, **as_text})
    facts = replace(facts, images=None)
    try:
        return replace(prepared, general=prepare(others, prepared.tokenizer, model=facts, **alike).train)
    except DataError as error:
        raise DataError(error.account, *map(_of_general, error.problems)) from error
    except UserError as error:
        raise UserError(*map(_of_general, error.problems)) from error


def _of_general(problem: Problem) -> Problem:
    """What is wrong with rows that no objective learns from: another one is no advice."""
    change = problem.change.replace("data.train:", "evaluate.general:")
    if change.startswith("learn from"):
        change = change.partition("; or ")[2]
        problem = replace(problem, needed="supervised rows, of whose answers the loss is told")
    return replace(problem, change=change, where=f"evaluate.general: {problem.where.removeprefix('data: ')}")


def rows_of(train: PackedDataset, evaluated: Sequence[PackedDataset], seed: int) -> Rows:
    """Tells how full the rows of a run will be, evaluations of other rows included."""

    @cache
    def order_of(steps: Steps, workers: int) -> np.ndarray:
        order = train.first_packs(min(steps.num_packs, MOST_LOOKED_AT), seed)
        how: dict[str, Any] = {"workers": workers, "share_prefixes": steps.share_prefixes}
        return train.dealt(order, packs_per_step=steps.packs, costs=steps.costs, **how)

    def rows(steps: Steps, workers: int, micro_batch: int) -> RowSizes:
        order = order_of(steps, workers)
        dealt = {"packs_per_step": steps.packs, "workers": workers, "micro_batch": micro_batch}
        if steps.padded:
            return _padded_rows(train, evaluated, order, steps, workers, micro_batch)
        tokens, supervised, mean, mean_of_documents = train.row_sizes(
            order, **dealt, share_prefixes=steps.share_prefixes
        )
        images, mean_images = train.image_tokens_of_rows(order, **dealt)
        for data in evaluated:
            order = np.arange(min(data.num_packs, MOST_LOOKED_AT))
            others = data.row_sizes(order, **dealt, share_prefixes=steps.share_prefixes)
            tokens, supervised = max(tokens, others[0]), max(supervised, others[1])
            images = max(images, data.image_tokens_of_rows(order, **dealt)[0])
        return RowSizes(
            tokens, supervised, mean, mean_of_documents, most_image_tokens=images, mean_image_tokens=mean_images
        )

    return rows


def _padded_rows(
    train: PackedDataset,
    evaluated: Sequence[PackedDataset],
    order: np.ndarray,
    steps: Steps,
    workers: int,
    micro_batch: int,
) -> RowSizes:
    """Sizes of forward passes in which each document has a row; of a long run, those of the first steps."""
    packs_per_step, chunk = steps.packs, steps.chunk
    most = micro_batch * in_chunks(max(data.most_row_tokens for data in (train, *evaluated)), chunk)
    computed, real, supervised, numbers, images, others = [], [], [], [], list[int](), [0]
    for data in evaluated:  # in the same way, all of it at most once
        for index in range(min(data.num_packs, MOST_STEPS * packs_per_step)):
            cut = forwards(data.row_lengths(index, chunk), most)
            supervised += [int(data.supervised(index)[one].sum()) for one in cut]
            others += [int(data.image_tokens(index)[one].sum()) for one in cut]
    for start in range(0, min(len(order), MOST_STEPS * packs_per_step), packs_per_step):
        of_workers = []
        for worker in range(workers):
            mine = order[start : start + packs_per_step][worker::workers]
            if len(mine):
                in_chunks_of = partial(train.row_lengths, chunk=chunk)
                lengths, in_rows, targets, of_images = (
                    np.concatenate([amounts(int(pack)) for pack in mine])
                    for amounts in (train.lengths, in_chunks_of, train.supervised, train.image_tokens)
                )
                cut = forwards(in_rows, most)
                of_workers.append(len(cut))
                computed += [int(in_rows[one[0]]) * len(one) for one in cut]
                real += [int(lengths[one].sum()) for one in cut]
                supervised += [int(targets[one].sum()) for one in cut]
                images += [int(of_images[one].sum()) for one in cut]
        numbers.append(max(of_workers))
    all_seen = len(order) <= MOST_STEPS * packs_per_step and not evaluated
    return RowSizes(
        most_tokens=max(computed) if all_seen else most,
        most_supervised=max(supervised),
        mean_tokens=float(np.mean(computed)),
        mean_document_tokens=float(np.mean(real)),
        forwards=float(np.mean(numbers)),
        most_image_tokens=max([*images, *others]),
        mean_image_tokens=float(np.mean(images)),
    )
