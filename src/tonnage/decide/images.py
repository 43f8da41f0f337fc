"""Rows with images: whether the model takes any, and where what its tower makes of them lies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.config import Config
from tonnage.data import Prepared, Progress
from tonnage.data import cache as store
from tonnage.data.images.processing import ImageRecipe
from tonnage.decide.other_model import digests_of
from tonnage.decide.towers import tower_cost, trained_apart
from tonnage.errors import UserError, user_error
from tonnage.files.places import free_bytes
from tonnage.host.cachedir import default_directory
from tonnage.planning.machine import Machine
from tonnage.planning.plan import Plan
from tonnage.planning.profile import TowerCost
from tonnage.planning.words import run_time, size
from tonnage.rundir.directory import RunDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from tonnage.decide.models import ModelFound
    from tonnage.training.vision_trial import Trial

BYTES = {"fp32": 4}
"""Of a number of a feature, where it is not 2."""
FORMAT = 2
"""Of what is kept, or how it is computed."""
WORTH_SECONDS = 60.0
"""What a model that looks at images itself must save, as it holds its tower all the time."""


def images_taken(config: Config, model: ModelFound) -> ImageRecipe | None:
    """How images of rows become tokens; None where rows may hold none: of a model that takes none, or whose weights are
    random, and of an objective that learns from more than the row."""
    from tonnage.training.sight import image_recipe

    objective = config.objective
    if config.init == "random" or objective.distils or objective.rows != "supervised" or objective.scores:
        return None
    return image_recipe(model.files, trusts=config.trust_remote_code, pixels=config.data.pixels)


def looks(config: Config, model: ModelFound, prepared: Prepared) -> bool:
    """Whether the tower looks at the images of rows in every micro-batch."""
    if not has_images(prepared) or config.data.image_features == "cached":
        return False
    return config.data.image_features == "computed" or bool(trained_apart(config, model.config, model.files).tower)


ON_DEVICE = ("activation_tier", "optimizer_tier", "gradient_tier", "parameter_tier")
"""Keys of ``memory`` that a model which looks at images does without."""


def as_seen(config: Config, prepared: Prepared, *, sees: bool) -> Config:
    """The config with what its rows' images leave no choice of written out."""
    if not has_images(prepared):
        return config
    axes: dict[str, Any] = {key: 1 for key in ("tensor", "context") if getattr(config.parallel, key) == "auto"}
    if not sees:
        return config.with_keys("parallel", axes)
    axes |= {"pipeline": 1} if config.parallel.pipeline == "auto" else {}
    tiers: dict[str, Any] = {key: "device" for key in ON_DEVICE if getattr(config.memory, key) == "auto"}
    tiers |= {"tiles": 1} if config.memory.tiles == "auto" else {}
    return config.with_keys("parallel", axes).with_keys("memory", tiers)


def _check_looking(config: Config, model: ModelFound, prepared: Prepared) -> None:
    """Refuse what does not go with a tower that looks at images itself. Raises ``UserError``."""
    trained = () if config.adapter == "auto" else trained_apart(config, model.config, model.files).tower
    key = "adapter.targets" if not isinstance(config.adapter, str) else "train"
    if trained and not has_images(prepared):
        observed = f"{', '.join(trained)}, of the vision tower, and no row has images"
        raise user_error(observed, "rows with images", f"leave {', '.join(trained)} out", key)
    if trained and not isinstance(config.adapter, str):
        own = config.adapter
        plain = {"kind": own.kind == "lora", "init": own.init == "zero", "patterns": not own.patterns}
        for name in (name for name, is_plain in plain.items() if not is_plain):
            observed = f"adapter.{name} is given, and {', '.join(trained)} of the vision tower among the targets"
            needed = "additions of one rank that begin at zero, where a tower is adapted"
            raise user_error(observed, needed, f"leave adapter.{name} out", f"adapter.{name}")
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
    refused = [f"{name} is {value}" for name, value in memory.items() if value not in ("auto", "device")]
    refused += [f"memory.tiles is {config.memory.tiles}"] if config.memory.tiles not in ("auto", 1) else []
    axes = {f"parallel.{name}": getattr(config.parallel, name) for name in ("tensor", "pipeline")}
    refused += [f"{name} is {size}" for name, size in axes.items() if size not in ("auto", 1)]
    if refused:
        raise user_error(
            where=refused[0].partition(" ")[0],
            found=f"{refused[0]}, and a vision tower that looks at images in every step",
            needed="a tower that is on its device, with all of the model",
            change=f"leave {refused[0].partition(' ')[0]} out"
            + ("" if trained else ", or data.image_features=cached, where the tower is not there in training"),
        )


def check_images(config: Config, model: ModelFound, prepared: Prepared) -> None:
    """Refuse rows with images where the model does more with them than to take their features, or the run wants what
    they do not go with. Raises ``UserError``."""
    _check_looking(config, model, prepared)
    if not has_images(prepared):
        return
    if config.parallel.context not in ("auto", 1):
        raise user_error(
            where="parallel.context",
            found=f"{config.parallel.context}, and rows with images",
            needed="rows of text, so far, where workers divide their tokens",
            change="parallel.context=1",
        )
    trial = _trial(config, model)
    asks = {"evaluate.prompts": bool(config.evaluate.prompts), "evaluate.scorer": config.evaluate.scorer != "none"}
    if not _asks_about_images(config, prepared) or not (trial.look_ahead or looks(config, model, prepared)):
        return
    key = next(key for key, is_set in asks.items() if is_set)
    reason = "a family whose tokens of an image look ahead" if trial.look_ahead else "a tower that looks for itself"
    needed = "features that are computed before training, and tokens that see only those before them"
    raise user_error(f"{key}, validation rows with images, and {reason}", needed, f"leave {key} out", key)


def _whole(config: Config, model: ModelFound) -> PreTrainedConfig:
    """The configuration of all of the model, not of its text alone."""
    from tonnage.model.files import read_whole_config

    return read_whole_config(model.files, trust_remote_code=config.trust_remote_code)


def _trial(config: Config, model: ModelFound) -> Trial:
    """What a tiny model does with an image. Raises ``UserError`` where that cannot be trained on."""
    from tonnage.training.vision_trial import check_sight

    recipe = images_taken(config, model)
    assert recipe is not None, "no row has images otherwise"
    return check_sight(_whole(config, model), recipe, default_directory())


def _asks_about_images(config: Config, prepared: Prepared) -> bool:
    """Whether answers to validation rows with images are asked for."""
    asks = config.evaluate.prompts or config.evaluate.scorer != "none"
    return bool(asks) and prepared.validation is not None and prepared.validation.images


def has_images(prepared: Prepared) -> bool:
    return any(data is not None and data.images for data in (prepared.train, prepared.validation))


def entry_of(config: Config, model: ModelFound, plan: Plan, progress: Progress) -> Path:
    """The cache's entry for the features of a run, which need not be there. The files of the tower's weights are read
    once, to know them again."""
    packs = Path(plan.data.train_path).parent
    cache, files = packs.parent.parent, model.files
    recipe = images_taken(config, model)
    assert recipe is not None
    described: dict[str, Any] = _whole(config, model).to_dict()
    described.pop("_name_or_path", None)
    parts: dict[str, Any] = {
        "format": FORMAT,
        "weights": digests_of(cache, sorted(files.weights), "the model's", progress),
        "config": repr(sorted(described.items())),
        "processor": recipe.key(),
        "packs": packs.name,
        "visited": None if plan.num_packs >= plan.data.num_packs else [plan.num_packs, config.seed],
        "precision": config.dtype,
        "torch": version("torch"),
    }
    return cache / "features" / store.key(parts)


@dataclass(frozen=True)
class _Looks:
    """What it takes to look at the images of a run, in either way."""

    num_bytes: int
    """Of features, where they are computed once."""
    tokens: int
    """Of images, each looked at once."""
    rows: int
    cached_seconds: float
    """With writing and reading of features."""
    computed_seconds: float
    """Where every row is looked at whenever it is trained; 0 of a tower that cannot be weighed."""

    @staticmethod
    def of(
        config: Config,
        plan: Plan,
        prepared: Prepared,
        tower: TowerCost | None,
        whole: PreTrainedConfig,
        machine: Machine,
    ) -> _Looks:
        """By the machine's rates, all of whose devices take part; without what the processor takes in either way."""
        from tonnage.model.vision import added_features
        from tonnage.training.chunks import visited_packs
        from tonnage.training.features import same_images

        train, validation = prepared.train, prepared.validation
        datasets = [train] if validation is None else [train, validation]
        groups = same_images(train.source, datasets, visited_packs(train, validation, plan.num_packs, config.seed))
        tokens = sum(group.rows for group in groups)
        each = (1 + added_features(whole)) * plan.model.hidden_size * BYTES.get(config.dtype, 2)
        num_bytes = tokens * each
        passes = max(1.0, plan.num_packs / train.num_packs)
        rate = machine.flops[config.dtype] * (plan.workers if machine.kind != "cpu" else 1)
        a_token = tower.forward_flops / rate if tower is not None else 0.0
        read = passes * num_bytes / machine.disk_read_bytes_per_second
        return _Looks(
            num_bytes,
            tokens,
            sum(len(group.documents) for group in groups),
            tokens * a_token + num_bytes / machine.disk_write_bytes_per_second + read,
            passes * a_token * sum(group.rows * len(group.documents) for group in groups),
        )

    def __str__(self) -> str:
        if not self.computed_seconds:
            return ""
        both = f"cached {run_time(self.cached_seconds)}, computed in every step {run_time(self.computed_seconds)}"
        return f"; all looks: {both}"


def is_better_computed(config: Config, model: ModelFound, plan: Plan, prepared: Prepared, machine: Machine) -> bool:
    """Whether a tower that is frozen had better look at images in every step, where the config leaves it open: there is
    no room for features, or to write and read them takes longer by ``WORTH_SECONDS``."""
    is_open = config.data.image_features == "auto" and has_images(prepared)
    if not is_open or _asks_about_images(config, prepared):
        return False
    tower = _frozen_cost(config, model, prepared)
    if tower is None:
        return False
    both = _Looks.of(config, plan, prepared, tower, _whole(config, model), machine)
    has_room = free_bytes(Path(plan.data.train_path).parent) >= both.num_bytes
    return not has_room or both.computed_seconds + WORTH_SECONDS < both.cached_seconds


def _frozen_cost(config: Config, model: ModelFound, prepared: Prepared) -> TowerCost | None:
    """What the tower costs that looks at images before training; None of one that cannot be weighed."""
    with suppress(UserError):
        return tower_cost(config, model.config, model.files, prepared, frozen=True)
    return None


def with_features(
    config: Config, model: ModelFound, prepared: Prepared, plans: Sequence[Plan], machine: Machine, progress: Progress
) -> list[Plan]:
    """The plans of a run, with what is said of images, and the place of their features where these are cached.

    Raises:
        UserError: the disk has no room for them.
    """
    if not has_images(prepared):
        return list(plans)
    look_ahead, whole = _trial(config, model).look_ahead, _whole(config, model)
    plans = [replace(plan, data=replace(plan.data, look_ahead=look_ahead)) for plan in plans]
    if plans[0].data.sees:
        both = _Looks.of(config, plans[0], prepared, plans[0].model.tower, whole, machine)
        return [_with_tower(plan, both) for plan in plans]
    tower = _frozen_cost(config, model, prepared)
    both = _Looks.of(config, plans[0], prepared, tower, whole, machine)
    entry = entry_of(config, model, plans[0], progress)
    return [_with_features(config, plan, entry, tower, both) for plan in plans]


def _with_tower(plan: Plan, both: _Looks) -> Plan:
    """The plan of a model that looks at images itself, with what is said of that."""
    tower = plan.model.tower
    assert tower is not None
    learns = "frozen" if not tower.trained else f"{tower.trained:,} of its parameters trained"
    images = (
        f"looked at in every step by the vision tower ({tower.trained + tower.frozen:,} parameters, {learns}): "
        f"{both.tokens:,} tokens in {both.rows:,} rows"
    )
    if not tower.trained:
        return replace(plan, reasons=plan.reasons | {"images": f"{images}{both}"})
    images += "; an export has what is trained, and carries the rest"
    return replace(plan, weights=replace(plan.weights, carried=()), reasons=plan.reasons | {"images": images})


def _with_features(config: Config, plan: Plan, entry: Path, tower: TowerCost | None, both: _Looks) -> Plan:
    own = RunDirectory(config.output).features / entry.name
    if own.exists():
        has = "the run has them"
    elif entry.exists():
        has = "the cache has them from an earlier run"
    else:
        has = "computed once, before training, by the run's workers, each of which holds the tower until then"
        _check_room(entry, both.num_bytes)
        if tower is not None:
            has += f", in {size(_bytes_before(plan, tower, both))} of memory"
    why = (
        f"the features of {both.tokens:,} tokens of images in {both.rows:,} rows, {size(both.num_bytes)} ({has}); the "
        f"tower is frozen{both}"
    )
    return replace(plan, data=replace(plan.data, features_path=str(entry)), reasons=plan.reasons | {"images": why})


def _bytes_before(plan: Plan, tower: TowerCost, both: _Looks) -> float:
    """Most bytes of a worker in the pass before training. Raises ``UserError`` where it has no room."""
    from tonnage.training.features import CHUNK_BYTES

    times = 2 if plan.layout.device == "cpu" else 1  # the heap keeps what comes and goes; chunks are summed on the host
    chunk = min(CHUNK_BYTES, 4 * plan.model.hidden_size * both.tokens)
    comes = tower.evaluated + tower.input_bytes * tower.tokens + chunk
    needed = tower.frozen_bytes + times * comes + plan.choice.runtime_bytes
    if needed > (usable := plan.budget.usable):
        observed = f"{size(needed)} a worker for the vision tower before training, and room for {size(usable)}"
        raise user_error(observed, "room for it", "use smaller images, or a device with more memory", "data.train")
    return needed


def _check_room(entry: Path, num_bytes: int) -> None:
    if (free := free_bytes(entry)) < num_bytes:
        observed = f"{free:,} bytes free, and {num_bytes:,} to come of features of images"
        change = "make room, set data.cache to another disk, or data.image_features=computed"
        raise user_error(observed, "room for all of them", change, str(entry))
