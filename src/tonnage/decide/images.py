"""Rows with images: whether the model takes any, and where what its tower makes of them lies."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.config import Config
from tonnage.errors import user_error

if TYPE_CHECKING:
    from tonnage.data import Prepared, Progress
    from tonnage.data.images.processing import ImageRecipe
    from tonnage.decide.models import ModelFound
    from tonnage.planning.plan import Plan

BYTES = {"fp32": 4}
"""Of a number of a feature, where it is not 2."""


def images_taken(config: Config, model: ModelFound) -> ImageRecipe | None:
    """How images of rows become tokens; None where rows may hold none: of a model that takes none, or whose weights are
    random, and of an objective that learns from more than the row."""
    from tonnage.training.features import image_recipe

    objective = config.objective
    if config.init == "random" or objective.distils or objective.rows != "supervised" or objective.scores:
        return None
    return image_recipe(model.files, trusts=config.trust_remote_code)


def check_images(config: Config, model: ModelFound, prepared: Prepared) -> None:
    """Refuse rows with images where the model does more with them than to take their features, or the run wants what
    they do not go with. Raises ``UserError``."""
    from tonnage.host.cachedir import default_directory
    from tonnage.model.files import read_whole_config
    from tonnage.model.vision import check_tower
    from tonnage.training.vision_trial import check_sight

    if not has_images(prepared):
        return
    recipe = images_taken(config, model)
    assert recipe is not None, "no row has images otherwise"
    if config.parallel.tensor not in ("auto", 1):
        observed = f"parallel.tensor is {config.parallel.tensor}, and rows with images"
        raise user_error(observed, "1: embeddings are divided otherwise", "parallel.tensor=1", "parallel.tensor")
    whole = read_whole_config(model.files, trust_remote_code=config.trust_remote_code)
    check_tower(whole)
    check_sight(whole, recipe, default_directory())


def has_images(prepared: Prepared) -> bool:
    """Whether any row has images."""
    return any(data is not None and data.images for data in (prepared.train, prepared.validation))


def entry_of(config: Config, model: ModelFound, plan: Plan, progress: Progress) -> Path:
    """The cache's entry for the features of a run, which need not be there. The files of the tower's weights are read
    once, to know them again."""
    from tonnage.data import cache as store
    from tonnage.model.files import read_whole_config

    packs = Path(plan.data.train_path).parent
    cache, files = packs.parent.parent, model.files
    recipe = images_taken(config, model)
    assert recipe is not None
    weights, digests = sorted(files.weights), []
    for number, file in enumerate(weights):
        progress("reading the model's files", number, len(weights))
        digests.append(store.remembered_digest(cache, str(file)))
    progress("reading the model's files", len(weights), len(weights))
    described: dict[str, Any] = read_whole_config(files, trust_remote_code=config.trust_remote_code).to_dict()
    described.pop("_name_or_path", None)
    parts: dict[str, Any] = {
        "weights": digests,
        "config": repr(sorted(described.items())),
        "processor": recipe.key(),
        "packs": packs.name,
        "visited": None if plan.num_packs >= plan.data.num_packs else [plan.num_packs, config.seed],
        "precision": config.precision,
        "torch": version("torch"),
    }
    return cache / "features" / store.key(parts)


def with_features(
    config: Config, model: ModelFound, prepared: Prepared, plans: Sequence[Plan], progress: Progress
) -> list[Plan]:
    """The plans of a run, with the place of the features of images and how much they are, where rows have any.

    Raises:
        UserError: the disk has no room for them.
    """
    if not has_images(prepared):
        return list(plans)
    entry = entry_of(config, model, plans[0], progress)
    return [_with_features(config, plan, entry, prepared) for plan in plans]


def _with_features(config: Config, plan: Plan, entry: Path, prepared: Prepared) -> Plan:
    from tonnage.planning.words import size
    from tonnage.rundir.directory import RunDirectory
    from tonnage.training.features import same_images, visited_packs

    train, validation = prepared.train, prepared.validation
    datasets = [train] if validation is None else [train, validation]
    groups = same_images(train.source, datasets, visited_packs(train, validation, plan.num_packs, config.seed))
    rows = sum(group.rows for group in groups)
    num_bytes = rows * plan.model.hidden_size * BYTES.get(config.precision, 2)
    own = RunDirectory(config.output).features / entry.name
    if own.exists():
        has = "the run has them"
    elif entry.exists():
        has = "the cache has them from an earlier run"
    else:
        has = "computed once, before training, by the run's workers, each of which holds the tower until then"
        _check_room(entry, num_bytes)
    number = sum(len(group.documents) for group in groups)
    why = (
        f"the features of {rows:,} tokens of images in {number:,} rows, {size(num_bytes)} ({has}); the tower is frozen"
    )
    return replace(plan, data=replace(plan.data, features_path=str(entry)), reasons=plan.reasons | {"images": why})


def _check_room(entry: Path, num_bytes: int) -> None:
    place = entry
    while not place.exists():
        place = place.absolute().parent
    space = os.statvfs(place)
    if (free := space.f_bavail * space.f_frsize) < math.ceil(num_bytes):
        observed = f"{free:,} bytes free, and {num_bytes:,} to come of features of images"
        raise user_error(observed, "room for all of them", "make room, or set data.cache to another disk", str(place))
