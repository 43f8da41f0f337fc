"""Another model than the one that is trained, in a pass before training: a teacher, or a reference by name.

All workers share its weights, whatever the run's own layout is, and it is given up before the model that is trained is
there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tonnage.model.files import read_model
from tonnage.model.matching import check_weights
from tonnage.parallel.parallelize import Precision
from tonnage.parallel.world import World, device_mesh
from tonnage.planning.layout import PLAIN
from tonnage.training.batch import Deal, round_to
from tonnage.training.building import Blueprint, assemble_model, trains_of_files
from tonnage.training.isolation import isolation_for
from tonnage.training.pipeline import Pipeline
from tonnage.training.setting import WorkerSetting


@dataclass(frozen=True)
class Guest:
    """The model, with its weights."""

    pipeline: Pipeline
    world: World
    """The same ranks, each of which takes packs of its own."""
    deal: Deal
    """How these are dealt."""
    vocab_size: int
    progress: Callable[[], None]
    """Says that there is progress: a chunk may take longer than a step ever should."""


def load_guest(setting: WorkerSetting, name: str, revision: str | None) -> Guest:
    """Build and fill a model. Raises ``UserError`` where its files are gone or do not fit."""
    config, plan = setting.config, setting.plan
    max_length, whole = plan.data.max_length, setting.world
    world = replace(whole, mesh=device_mesh(whole.device, whole.size, 1))
    files, model_config = read_model(
        name, revision=revision, tokenizer=False, trust_remote_code=config.trust_remote_code
    )
    check_weights(files, model_config, allow_unexpected=config.allow_unexpected)  # which may untie the head
    isolation = isolation_for(model_config, world.device, max_length)
    dtypes = Precision.of(config.dtype, world.data_size)
    blueprint = Blueprint(
        files,
        model_config,
        world,
        dtypes,
        replace(PLAIN, arrangement=isolation.arrangement, attention=isolation.attention),
        trains_of_files(files, model_config),
        evaluates=True,
        allow_unexpected=config.allow_unexpected,
        log=setting.log,
        phases=setting.phases,
    )
    most_tokens = max_length * plan.layout.micro_batch
    deal = Deal(
        plan.packs_per_step,
        plan.layout.micro_batch,
        world.data_rank,
        world.data_size,
        round_to=round_to(most_tokens, world.device, dtypes.compute),
        padded_tokens=most_tokens if isolation.arrangement == "padded" else 0,
    )
    pipeline = Pipeline({0: assemble_model(blueprint).loss_model}, world, dtypes.compute)
    return Guest(pipeline, world, deal, model_config.vocab_size, setting.phases.progress)


def free_memory(device: torch.device) -> None:
    """Give back what nothing refers to any more, as a guest that has gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
