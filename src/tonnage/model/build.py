"""Build a model on the meta device, and give it memory and weights once it is sharded.

The order matters and is the same for one rank and a thousand: build without memory, shard, allocate only the
shard, read only the shard. Weights come from safetensors by byte range, through transformers' own renaming of
checkpoint keys, or from the model's own random initialisation, one unit at a time. No rank, rank 0 included,
ever holds a full copy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tonnage.errors import Problem, UserError
from tonnage.model import attention
from tonnage.model.norms import use_fast_norms
from tonnage.model.products import use_fast_products
from tonnage.regions import region_of

MAPPED_BYTES = 64 << 20


@dataclass(frozen=True)
class LoadReport:
    """What a checkpoint held against what the model wanted."""

    loaded: int
    missing: tuple[str, ...]
    """Parameters the checkpoint lacks; they keep their random initialisation."""
    unexpected: tuple[str, ...]
    """Checkpoint keys the model has no place for."""


def build_on_meta(config: PreTrainedConfig, dtype: torch.dtype, vocab_size: int | None = None) -> PreTrainedModel:
    """The model without memory: every tensor on the meta device, packed attention wired in.

    ``vocab_size`` larger than the configuration's grows the embedding and the head (the configuration is changed).
    """
    if vocab_size is not None and vocab_size > config.vocab_size:
        config.vocab_size = vocab_size
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.register())
    assert isinstance(model, PreTrainedModel)
    attention.check_packable(model)
    use_fast_products(model)
    use_fast_norms(model)
    return model


def allocate(model: PreTrainedModel, device: torch.device) -> None:
    """Give every parameter (or shard of one) and buffer memory on ``device``; compute the buffers.

    Parameters are left uninitialised. Buffers that checkpoints do not hold (rotary frequencies) are computed by
    the model's own initialisation.

    Raises:
        UserError: a buffer is left without a value, so the family cannot be built this way.
    """
    model.to_empty(device=device)
    if next(model.get_output_embeddings().parameters(), None) is not None:  # a stage without a head has none to tie
        model.tie_weights()
    buffers = dict(model.named_buffers())
    for buffer in buffers.values():
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))
    with torch.no_grad():
        for module in model.modules():
            if next(module.buffers(recurse=False), None) is not None:
                with _parameters_on_meta(module):
                    model._init_weights(module)
    unset = [name for name, buffer in buffers.items() if buffer.is_floating_point() and buffer.isnan().any()]
    if unset:
        raise UserError(
            Problem(
                where=f"model type {model.config.model_type}",
                found=f"buffers with no initial value: {', '.join(unset[:3])}",
                needed="a family whose buffers transformers can compute",
                change="choose another model family",
            )
        )


@contextmanager
def _parameters_on_meta(module: nn.Module) -> Iterator[None]:
    """A module whose parameters can be initialised at no cost, and without a word to other ranks that have parts."""
    held, there = dict(module._parameters), module._parameters
    for name, parameter in held.items():
        if parameter is not None:
            there[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    try:
        yield
    finally:
        there.update(held)


def initialise_randomly(model: PreTrainedModel, seed: int, progress: Callable[[], None] = lambda: None) -> None:
    """Fill the (sharded) parameters by the model's own random initialisation.

    Each unit (a block, or a module outside the blocks) is built whole on the CPU, initialised by transformers under a
    seed of its own, and copied shard by shard, so the values depend on ``seed`` and on nothing else: not on the
    number of ranks, the sharding or the order of units.
    """
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    targets = dict(model.named_parameters())
    for path, unit in _units(twin):
        if not any(name in targets for name, _ in unit.named_parameters(prefix=path)):
            continue  # in another stage
        unit.to_empty(device="cpu")
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(path, seed))
            for module in reversed(list(unit.modules())):
                twin._init_weights(module)
        for name, value in unit.named_parameters(prefix=path):
            if name in targets:
                _copy_shard(targets[name], value)
        unit.to("meta")
        progress()


def load_weights(
    model: PreTrainedModel,
    files: tuple[Path, ...],
    seed: int,
    progress: Callable[[], None] = lambda: None,
    elsewhere: Collection[str] = (),
) -> LoadReport:
    """Read this rank's part of every parameter from safetensors ``files``.

    Only the byte ranges of the local shard are read. Parameters the checkpoint lacks are initialised randomly and
    reported, and so are keys the model has no place for. A grown embedding keeps the checkpoint's rows; the new rows
    get the mean of the old ones. ``progress`` is called after every tensor. ``elsewhere`` are parameters of the whole
    model that ``model``, a stage of it, does not have.

    Raises:
        UserError: shapes differ, or a tensor needs a conversion beyond renaming.
    """
    targets = dict(model.named_parameters())
    tied = _tied_names(model)
    names = _Renamer(model, elsewhere)
    done: set[str] = set()
    unexpected: list[str] = []
    problems: list[Problem] = []
    for file in files:
        for key, view in _views(file):
            name = names.target(key)
            name = tied.get(name, name)
            if name in elsewhere:
                continue
            if name not in targets:
                unexpected.append(key)
                continue
            target, shape = targets[name], tuple(view.get_shape())
            if shape != tuple(target.shape) and not _grown(shape, tuple(target.shape)):
                problems.append(
                    Problem(
                        where=f"{file.name}: {key}",
                        found=f"shape {shape}",
                        needed=f"{tuple(target.shape)}, as config.json says",
                        change="use the config.json that belongs to these weights",
                    )
                )
                continue
            _read_shard(target, view, shape)
            done.add(name)
            progress()
    if problems:
        raise UserError(*problems)
    missing = tuple(sorted(set(targets) - done))
    if missing:
        _initialise_missing(model, set(missing), seed)
    return LoadReport(len(done), missing, tuple(unexpected))


def _views(file: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a safetensors file as (key, slice to read from).

    The file is mapped, and pages that were read count as this process's memory until it is unmapped, so it is opened
    anew after every ``MAPPED_BYTES``.
    """
    from safetensors import safe_open

    with safe_open(file, framework="pt") as source:
        keys = list(source.keys())
    while keys:
        mapped = 0
        with safe_open(file, framework="pt") as source:
            while keys and mapped < MAPPED_BYTES:
                key = keys.pop(0)
                view = source.get_slice(key)
                mapped += 4 * math.prod(view.get_shape())
                yield key, view
                del view


def _units(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Blocks, and every module outside them that holds parameters of its own; (path, module)."""
    block_names = set(model._no_split_modules or ())
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(inside) and inside:
            continue
        is_block = type(module).__name__ in block_names
        if is_block or next(module.parameters(recurse=False), None) is not None:
            inside = (*inside, path + ".")
            yield path, module


def _seed_of(path: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{path}".encode()).digest()[:7], "big")


def _initialise_missing(model: PreTrainedModel, missing: set[str], seed: int) -> None:
    keep = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if name not in missing}
    initialise_randomly(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in keep:
                parameter.copy_(keep[name])


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Names under which a checkpoint may hold a tied parameter -> the one name that ``named_parameters`` gives."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    return {name: canonical for name, canonical in names.items() if name != canonical}


@torch.no_grad()
def _copy_shard(target: Tensor, whole: Tensor) -> None:
    local, region = region_of(target.data)
    if local.numel():
        local.copy_(whole[region])


def _grown(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether ``target`` is a vocabulary matrix that was made longer for new tokens."""
    return len(shape) == len(target) and shape[1:] == target[1:] and shape[0] < target[0]


@torch.no_grad()
def _read_shard(target: Tensor, view: Any, shape: tuple[int, ...]) -> None:
    """Copy the rows of ``view`` (a safetensors slice of ``shape``) that the local shard of ``target`` holds."""
    local, region = region_of(target.data)
    if not local.numel():
        return
    rows = region[0]
    stop = min(rows.stop, shape[0])
    if stop > rows.start:
        local[: stop - rows.start].copy_(view[(slice(rows.start, stop), *region[1:])])
    if rows.stop > shape[0]:
        fresh = local[max(0, shape[0] - rows.start) :]
        total = torch.zeros(target.shape[1:], dtype=torch.float32)
        for start in range(0, shape[0], 4096):
            total += view[start : min(start + 4096, shape[0])].float().sum(0)
        fresh.copy_((total / shape[0]).expand_as(fresh))


class _Renamer:
    """transformers' own mapping from the keys of a checkpoint to the names of the model's parameters."""

    def __init__(self, model: PreTrainedModel, elsewhere: Collection[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._meta = {**dict.fromkeys(elsewhere), **model.state_dict()}
        self._family = model.config.model_type

    def target(self, key: str) -> str:
        from transformers.core_model_loading import rename_source_key

        name, converter = rename_source_key(
            key, self._renamings, self._converters, self._prefix, self._meta, reverse=False
        )
        if converter is not None:
            raise UserError(
                Problem(
                    where=f"model type {self._family}",
                    found=f"checkpoint key {key} must be merged or split on the way ({converter})",
                    needed="a checkpoint whose tensors are the model's own, one to one",
                    change="load it once with transformers and save it again in the current format",
                )
            )
        return name
