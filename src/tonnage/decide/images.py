"""Rows with images: whether the model takes any, and where what its tower makes of them lies."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.config import Config
from tonnage.errors import user_error
from tonnage.rundir.directory import RunDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from tonnage.data import Prepared, Progress
    from tonnage.data.images.processing import ImageRecipe
    from tonnage.data.tokens.documents import Documents
    from tonnage.decide.models import ModelFound
    from tonnage.model.adapters import Trains
    from tonnage.model.files import ModelFiles
    from tonnage.planning.plan import Plan
    from tonnage.planning.profile import TowerCost

BYTES = {"fp32": 4}
"""Of a number of a feature, where it is not 2."""


def images_taken(config: Config, model: ModelFound) -> ImageRecipe | None:
    """How images of rows become tokens; None where rows may hold none: of a model that takes none, or whose weights are
    random, and of an objective that learns from more than the row."""
    from tonnage.training.sight import image_recipe

    objective = config.objective
    if config.init == "random" or objective.distils or objective.rows != "supervised" or objective.scores:
        return None
    return image_recipe(model.files, trusts=config.trust_remote_code)


def trained_apart(config: Config, model_config: PreTrainedConfig, files: ModelFiles | None) -> Trains:
    """What a config trains, with what names parts of the vision tower of the model in ``files`` set apart.

    Raises:
        UserError: a pattern or target matches nothing, or something that cannot be adapted.
    """
    import torch

    from tonnage.model.adapters import ALL_LINEAR, apart
    from tonnage.model.anatomy import dissect
    from tonnage.model.build import on_meta
    from tonnage.model.vision import attach_tower
    from tonnage.training.building import trains_of
    from tonnage.training.sight import image_recipe

    trains = trains_of(config)
    is_usual = not trains.patterns and (trains.adapter is None or trains.adapter.targets in (ALL_LINEAR, (ALL_LINEAR,)))
    if is_usual or files is None or config.init == "random" or config.objective.scores:
        return trains
    if image_recipe(files, trusts=config.trust_remote_code) is None:
        return trains
    text = on_meta(copy.deepcopy(model_config), torch.float32)
    anatomy = dissect(text)
    attach_tower(text, files, torch.float32)
    return apart(text, anatomy, trains)


def looks(config: Config, model: ModelFound, prepared: Prepared) -> bool:
    """Whether the tower looks at the images of rows in every micro-batch."""
    if not has_images(prepared) or config.data.image_features == "cached":
        return False
    return config.data.image_features == "computed" or bool(trained_apart(config, model.config, model.files).tower)


def fullest_row(prepared: Prepared) -> tuple[Documents, int, int] | None:
    """The document with most tokens of images, where it is, and how many these are."""
    fullest, most, where = None, 0, None
    for data in (prepared.train, prepared.validation):
        if data is None or not data.images or data.source is where:
            continue
        where, tokens = data.source, data.source.column("image_tokens")
        if (number := int(tokens.max(initial=0))) > most:
            fullest, most = (data.source, int(tokens.argmax())), number
    return fullest and (*fullest, most)


def tower_cost(
    config: Config, model_config: PreTrainedConfig, files: ModelFiles, prepared: Prepared, *, frozen: bool = False
) -> TowerCost:
    """What the tower of the model in ``files`` costs on the fullest of the rows, as the config trains it or ``frozen``.

    Raises:
        UserError: an image is gone or another, or the tower cannot be weighed.
    """
    from tonnage.data.packs.pictures import RowImages
    from tonnage.host.cachedir import default_directory
    from tonnage.model.adapters import EVERYTHING
    from tonnage.parallel.parallelize import Precision
    from tonnage.training.building import trains_of
    from tonnage.training.sight import image_recipe
    from tonnage.training.weigh_tower import weigh_tower_once

    recipe, fullest = image_recipe(files, trusts=config.trust_remote_code), fullest_row(prepared)
    assert recipe is not None
    assert fullest is not None
    source, document, tokens = fullest
    return weigh_tower_once(
        model_config,
        files,
        EVERYTHING if frozen else trains_of(config),
        Precision.of(config.precision, 1).compute,
        RowImages(source, document, recipe).inputs(),
        tokens,
        cache=default_directory(),
    )


ON_DEVICE = ("activation_tier", "optimizer_tier", "gradient_tier", "parameter_tier")
"""Keys of ``memory`` that a model which looks at images does without."""


def as_seen(config: Config, prepared: Prepared, *, sees: bool) -> Config:
    """The config with what its rows' images leave no choice of written out."""
    if not has_images(prepared):
        return config
    axes: dict[str, Any] = {"tensor": 1} if config.parallel.tensor == "auto" else {}
    if not sees:
        return config.model_copy(update={"parallel": config.parallel.model_copy(update=axes)})
    axes |= {"pipeline": 1} if config.parallel.pipeline == "auto" else {}
    tiers: dict[str, Any] = {key: "device" for key in ON_DEVICE if getattr(config.memory, key) == "auto"}
    tiers |= {"tiles": 1} if config.memory.tiles == "auto" else {}
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=axes),
            "memory": config.memory.model_copy(update=tiers),
        }
    )


def _check_looking(config: Config, model: ModelFound, prepared: Prepared) -> None:
    """Refuse what does not go with a tower that looks at images itself. Raises ``UserError``."""
    trained = () if config.adapter == "auto" else trained_apart(config, model.config, model.files).tower
    key = "adapter.targets" if not isinstance(config.adapter, str) else "train"
    if trained and not has_images(prepared):
        observed = f"{', '.join(trained)}, of the vision tower, and no row has images"
        raise user_error(observed, "rows with images", f"leave {', '.join(trained)} out", key)
    if trained and config.data.image_features == "cached":
        raise user_error(
            where="data.image_features",
            found=f"features that are computed once, and {', '.join(trained)} of the vision tower trained ({key})",
            needed="features of the tower as it is in every step",
            change="data.image_features=computed",
        )
    if not has_images(prepared) or not (trained or config.data.image_features == "computed"):
        return
    memory = {f"memory.{name}": getattr(config.memory, name) for name in ON_DEVICE}
    asked = [f"{name} is {value}" for name, value in memory.items() if value not in ("auto", "device")]
    asked += [f"memory.tiles is {config.memory.tiles}"] if config.memory.tiles not in ("auto", 1) else []
    if config.parallel.pipeline not in ("auto", 1):
        asked.append(f"parallel.pipeline is {config.parallel.pipeline}")
    if asked:
        raise user_error(
            where=asked[0].partition(" ")[0],
            found=f"{asked[0]}, and a vision tower that looks at images in every step",
            needed="a tower that is on its device, with all of the model",
            change=f"leave {asked[0].partition(' ')[0]} out"
            + ("" if trained else ", or data.image_features=cached, where the tower is not there in training"),
        )


def check_images(config: Config, model: ModelFound, prepared: Prepared) -> None:
    """Refuse rows with images where the model does more with them than to take their features, or the run wants what
    they do not go with. Raises ``UserError``."""
    from tonnage.host.cachedir import default_directory
    from tonnage.model.files import read_whole_config
    from tonnage.model.vision import check_tower
    from tonnage.training.vision_trial import check_sight

    _check_looking(config, model, prepared)
    if not has_images(prepared):
        return
    recipe = images_taken(config, model)
    assert recipe is not None, "no row has images otherwise"
    asks = {"evaluate.prompts": config.evaluate.prompts, "evaluate.scorer": config.evaluate.scorer != "none"}
    for key in (key for key, is_set in asks.items() if is_set):
        if prepared.validation is not None and prepared.validation.images:
            needed = "rows of text: answers to images are not written yet"
            raise user_error(f"{key}, and validation rows with images", needed, f"leave {key} out", key)
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
    if not has_images(prepared) or plans[0].data.sees:
        return list(plans)
    entry = entry_of(config, model, plans[0], progress)
    with_place = [_with_features(config, plan, entry, prepared) for plan in plans]
    if entry.exists() or (RunDirectory(config.output).features / entry.name).exists():
        return with_place
    tower = tower_cost(config, model.config, model.files, prepared, frozen=True)
    return [_with_pass(plan, tower) for plan in with_place]


def _with_pass(plan: Plan, tower: TowerCost) -> Plan:
    """The plan with what the pass before training takes of a worker's memory. Raises ``UserError`` without room."""
    from tonnage.planning.words import size
    from tonnage.training.features import CHUNK_BYTES

    comes = tower.evaluated + tower.input_bytes * tower.tokens
    chunk = min(CHUNK_BYTES, 4.0 * plan.model.hidden_size * plan.data.num_tokens)
    on_cpu = plan.layout.device == "cpu"
    needed = tower.frozen_bytes + comes * (2 if on_cpu else 1) + chunk * (3 if on_cpu else 1) + plan.choice.runtime_bytes
    if needed > (usable := plan.budget.usable):
        observed = f"{size(needed)} a worker for the vision tower before training, and room for {size(usable)}"
        raise user_error(observed, "room for it", "use smaller images, or a device with more memory", "data.train")
    images = f"{plan.reasons['images']}; that pass takes {size(needed)} of a worker's memory"
    return replace(plan, reasons=plan.reasons | {"images": images})


def _with_features(config: Config, plan: Plan, entry: Path, prepared: Prepared) -> Plan:
    from tonnage.planning.words import size
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
