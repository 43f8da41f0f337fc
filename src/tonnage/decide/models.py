"""The model of a config, without its weights: its files, what they describe, and whether all belongs together."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.config import Adapter, Config, check_output, read_config
from tonnage.config.schema import RankPattern
from tonnage.decide.towers import trained_apart
from tonnage.errors import Problem, UserError, user_error
from tonnage.host.quantized import Format
from tonnage.kernels.switches import switch_off
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.weights import WeightFacts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from tonnage.inference.generate import Loaded
    from tonnage.model.adapters import AdapterSpec as AdapterAdded
    from tonnage.model.files import ModelFiles


@dataclass(frozen=True)
class ModelFound:
    """A model whose weights nobody has read yet."""

    files: ModelFiles
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    weights: WeightFacts


def find(config: Config, *, fresh_output: bool = False) -> ModelFound:
    """Find the model of ``config`` and check that model, weights, tokenizer and lengths belong together."""
    from tonnage.model.files import check_fit, read_tokenizer

    problems: list[Problem] = []

    @contextmanager
    def collecting() -> Iterator[None]:
        try:
            yield
        except UserError as error:
            problems.extend(error.problems)

    model = None
    if fresh_output:
        with collecting():
            check_output(config)
    with collecting():
        files, model_config, weights = find_weights(config)
        tokenizer = read_tokenizer(files, trust_remote_code=config.trust_remote_code)
        model = ModelFound(files, model_config, tokenizer, weights)
        check_fit(model_config, tokenizer, config.data.max_length)
    with collecting():
        if model is not None:
            check_division(config, model.config)
            _check_new_head(config, model)
    if problems or model is None:
        raise UserError(*problems)
    return model


def _check_new_head(config: Config, model: ModelFound) -> None:
    """Refuse to keep a head of scores as it is that nobody has trained yet. Raises ``UserError``."""
    if not (config.train and config.objective.scores and (model.weights.missing or config.init == "random")):
        return
    from tonnage.model.adapters import trained_names
    from tonnage.model.build import dissected
    from tonnage.training.building import trains_of

    whole, anatomy = dissected(model.config)
    trained = trained_names(whole, anatomy, trains_of(config))
    head = {id(one) for one in anatomy.head.parameters()}
    if untrained := [name for name, one in whole.named_parameters() if id(one) in head and name not in trained]:
        raise user_error(
            where="train",
            found=f"patterns that leave out {', '.join(untrained)}, which the model's files do not have",
            needed="training of the head of scores, which starts from random numbers",
            change=f"train=[{','.join((*config.train, untrained[0]))}]",
        )


def check_groups(config: Config, model: ModelFound) -> None:
    """Refuse groups of ``optimizer.groups`` that none of what is trained belongs to. Raises ``UserError``."""
    if not config.optimizer.groups or config.adapter == "auto":
        return
    import torch

    from tonnage.model.adapters import prepare
    from tonnage.model.build import dissected
    from tonnage.model.groups import groups_of
    from tonnage.model.vision import attach_tower
    from tonnage.training.building import trains_of

    whole, anatomy = dissected(model.config)
    if trained_apart(config, model.config, model.files).tower:
        attach_tower(whole, model.files, torch.float32)
    prepare(whole, anatomy, trains_of(config), torch.float32)
    groups_of(whole, anatomy, [group.match for group in config.optimizer.groups])


def find_weights(config: Config) -> tuple[ModelFiles, PreTrainedConfig, WeightFacts]:
    """The files of the model of ``config``, what they describe, and what is remarkable about the weights; only their
    headers are read."""
    from tonnage.model.files import find_tokenizer

    is_random = config.init == "random"
    files, model_config = read_files(config, random_weights=is_random, tokenizer=config.tokenizer is None)
    if config.tokenizer is not None:
        files = replace(files, tokenizer=find_tokenizer(config.tokenizer))
    if is_random:
        return files, model_config, WeightFacts()
    from tonnage.model.matching import check_weights

    weights = check_weights(
        files,
        model_config,
        allow_missing=config.allow_missing,
        allow_unexpected=config.allow_unexpected,
        identifies=config.adapter != "none" or bool(config.train) or files.adapter is not None,
    )
    return files, model_config, weights


def read_files(
    config: Config, *, random_weights: bool = True, tokenizer: bool = False, untied: bool = False
) -> tuple[ModelFiles, PreTrainedConfig]:
    """As ``model.files.read_model``, of the model of ``config``."""
    from tonnage.model.files import read_model

    return read_model(
        config.model,
        revision=config.revision,
        random_weights=random_weights,
        tokenizer=tokenizer,
        trust_remote_code=config.trust_remote_code,
        untied=untied,
        scores=config.objective.scores,
        rope=config.rope.parameters if config.rope else None,
    )


def with_adapter(config: Config, model: ModelFound) -> Config:
    """The config with the adapter written out, where the model is the directory of one.

    Raises:
        UserError: the config says something else, or the adapter is another model's.
    """
    files = model.files.adapter
    if files is None:
        return config
    from tonnage.training.building import trains_of, trains_of_files

    own = trains_of_files(model.files, model.config).adapter
    assert own is not None
    shared: dict[str, Any] = {
        "targets": own.targets if not isinstance(own.targets, str) else "all-linear",
        "also": own.also,
    }
    if files.oft_block_size:
        adapter = Adapter(kind="oft", oft_block_size=files.oft_block_size, **shared)
        sizes = f"oft_block_size {files.oft_block_size}"
    else:
        adapter = Adapter(
            kind="dora" if files.magnitudes else "lora",
            rank=files.rank,
            alpha=files.alpha,
            patterns=tuple(RankPattern(match=like.match, rank=like.rank, alpha=like.alpha) for like in own.patterns),
            scaling="rank_stabilised" if files.rank_stabilised else "plain",
            dropout=files.dropout,
            **shared,
        )
        sizes = f"rank {adapter.rank}, alpha {adapter.alpha:g}, scaling {adapter.scaling}"
    if isinstance(config.adapter, str) and files.magnitudes and files.dropout:
        without = adapter.model_copy(update={"dropout": 0.0}).model_dump(mode="json", exclude_defaults=True)
        raise user_error(
            where=str(files.directory),
            found=f"an adapter with lengths of rows (DoRA) that was trained with dropout of {files.dropout:g}",
            needed="dropout of 0 with DoRA so far",
            change=f"adapter={json.dumps(without)} goes on without it",
        )
    if isinstance(config.adapter, str) and not config.train:  # ``auto`` is what the directory has, too
        return config.model_copy(update={"adapter": adapter, "optimizer": config.for_adapter()})
    described = trains_of(config).adapter
    if described is None or not _is_same(described, own, model.config):
        raise user_error(
            where="adapter",
            found=f"another adapter than the one in {files.directory}",
            needed=f"kind {adapter.kind}, {sizes}, targets {adapter.targets}, also {list(adapter.also)}, as it has "
            "them",
            change="leave adapter out of the config: the directory says it",
        )
    return config


def _is_same(described: AdapterAdded, own: AdapterAdded, model_config: PreTrainedConfig) -> bool:
    """Whether two adapters add the same to the same layers, however these are named; dropout may differ."""
    from tonnage.model.adapters import find_targets
    from tonnage.model.build import dissected

    alike = replace(described, dropout=0.0, targets=own.targets, also=own.also, patterns=own.patterns)
    if alike != replace(own, dropout=0.0):
        return False
    if set(described.also) != set(own.also):
        return False
    model, anatomy = dissected(model_config)
    sizes = [
        {
            target.path: (adapter.rank_of(target.path), adapter.factor_of(target.path))
            for target in find_targets(model, anatomy, adapter.targets)
        }
        for adapter in (described, own)
    ]
    return sizes[0] == sizes[1]


@dataclass(frozen=True)
class ModelInUse:
    """A model that answers or is evaluated: where it lies, and what the user and the run that made it allow."""

    directory: Path
    trust_remote_code: bool
    allow_unexpected: tuple[str, ...]
    """Patterns of tensors that it may have no place for."""
    quantize: Format | None
    """How the weights under the adapter of the run were quantised; None where they were not, or there is none."""

    def load(self, **form: Any) -> Loaded:
        """Ready to answer; ``form`` and errors are those of ``inference.generate.load``."""
        from tonnage.inference.generate import load

        trusted, patterns = self.trust_remote_code, self.allow_unexpected
        return load(self.directory, trust_remote_code=trusted, allow_unexpected=patterns, **form)


def use_model(model: str, *, trust_remote_code: bool = False, allow_unexpected: Sequence[str] = ()) -> ModelInUse:
    """Find a run's export, a model directory or a hub id. From here on this process computes with the kernels that the
    run has, or with all where ``model`` is no run. Raises ``UserError``."""
    from tonnage.inference.generate import resolve_model

    run, patterns = RunDirectory(model), tuple(allow_unexpected)
    config = read_config(run.config, [], check_files=False) if run.config.exists() else None
    if config is None:
        directory = resolve_model(model, trust_remote_code=trust_remote_code)
        switch_off(())
        return ModelInUse(directory, trust_remote_code, patterns, None)
    trusted = trust_remote_code or config.trust_remote_code
    directory = resolve_model(model, trust_remote_code=trusted)
    switch_off(config.kernels_off)
    adapter = config.adapter
    plain = not isinstance(adapter, str) and adapter.init == "zero"  # else the export is of the weights as they were
    form = "none" if isinstance(adapter, str) or not plain else adapter.quantize
    quantize = None if form in ("none", "widened") else form
    return ModelInUse(directory, trusted, (*patterns, *config.allow_unexpected), quantize)


def type_of(model: str) -> str:
    """The ``model_type`` of a model's config; empty where the config is not on this machine or cannot be read, which
    whoever reads the model will explain."""
    from huggingface_hub import try_to_load_from_cache

    from tonnage.model.stored import read_json_object

    model_type = ""
    with suppress(UserError, OSError, ValueError):
        path = Path(model, "config.json") if Path(model).is_dir() else try_to_load_from_cache(model, "config.json")
        if isinstance(path, Path | str):
            named = read_json_object(Path(path)).get("model_type")
            model_type = named if isinstance(named, str) else ""
    return model_type


def check_division(config: Config, model_config: PreTrainedConfig) -> None:
    """Refuse a model that cannot be divided as the config wants it."""
    degree = config.parallel.tensor
    if degree == "auto" or degree == 1:
        return
    from tonnage.model.tensor_plan import check_degree

    check_degree(model_config, degree)
    check_family(model_config)


def check_family(model_config: PreTrainedConfig) -> None:
    """Refuse a model whose matrices we do not know how to divide."""
    import torch

    from tonnage.model.anatomy import dissect
    from tonnage.model.build import build_on_meta
    from tonnage.model.tensor_plan import tensor_plan

    model = build_on_meta(copy.deepcopy(model_config), torch.float32)
    tensor_plan(model, dissect(model))
