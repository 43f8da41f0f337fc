"""The vision tower of a model, where it looks at images in training: what of it is trained, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonnage.config import Config
from tonnage.data import Prepared
from tonnage.data.packs.features import RowImages
from tonnage.data.tokens.documents import Documents
from tonnage.host.cachedir import default_directory
from tonnage.planning.profile import TowerCost

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from tonnage.model.adapters import Trains
    from tonnage.model.files import ModelFiles


def trained_apart(config: Config, model_config: PreTrainedConfig, files: ModelFiles | None) -> Trains:
    """What a config trains, with what names parts of the vision tower of the model in ``files`` set apart.

    Raises:
        UserError: a pattern or target matches nothing, or something that cannot be adapted.
    """
    import torch

    from tonnage.model.adapters import ALL_LINEAR, apart
    from tonnage.model.build import dissected
    from tonnage.model.vision import attach_tower
    from tonnage.training.building import trains_of
    from tonnage.training.sight import image_recipe

    trains = trains_of(config)
    is_usual = not trains.patterns and (trains.adapter is None or trains.adapter.targets in (ALL_LINEAR, (ALL_LINEAR,)))
    if is_usual or files is None or config.init == "random" or config.objective.scores:
        return trains
    if image_recipe(files, trusts=config.trust_remote_code, pixels=config.data.pixels) is None:
        return trains
    text, anatomy = dissected(model_config)
    attach_tower(text, files, torch.float32)
    return apart(text, anatomy, trains)


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
    from tonnage.model.adapters import EVERYTHING
    from tonnage.parallel.parallelize import Precision
    from tonnage.training.building import trains_of
    from tonnage.training.sight import image_recipe
    from tonnage.training.weigh_tower import weigh_tower_once

    recipe = image_recipe(files, trusts=config.trust_remote_code, pixels=config.data.pixels)
    fullest = fullest_row(prepared)
    assert recipe is not None
    assert fullest is not None
    source, document, tokens = fullest
    return weigh_tower_once(
        model_config,
        files,
        EVERYTHING if frozen else trains_of(config),
        Precision.of(config.dtype, 1).compute,
        RowImages(source, document, recipe).inputs(),
        tokens,
        cache=default_directory(),
    )
