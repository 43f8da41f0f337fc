"""Turn a checkpoint of a run that trains an adapter into a directory that peft loads, and others as well.

    adapter_config.json          the fields that peft and vLLM need, and no others
    adapter_model.safetensors    what was trained, in fp32, under peft's names
    adapter_positions.json       where the config scales positions (rope): what the model's config.json does not say
    tokenizer files, README.md, checksums.json

The model's own weights are not in it. ``export.export`` with ``Additions`` writes a whole model instead.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tonnage.checkpoint.origin import trains_tower
from tonnage.checkpoint.publishing import check_empty, published
from tonnage.checkpoint.shards import PUBLIC_HASH, Shards, TensorPart, counting, write_file
from tonnage.checkpoint.verify import check_written, write_checksums
from tonnage.errors import user_error
from tonnage.host.quantized import Format
from tonnage.kernels.adamw import LOW, join
from tonnage.kernels.quantized import squares_and_lost
from tonnage.model import adapter_files, peft
from tonnage.model.adapters import AdapterSpec, Target, find_targets, is_addition
from tonnage.model.anatomy import dissect
from tonnage.model.build import on_meta
from tonnage.model.files import ModelFiles, read_whole_config
from tonnage.model.names import Whole, tied_names
from tonnage.model.packed_layers import packable_names
from tonnage.model.starts import Low, Origins, doubled
from tonnage.model.towers import find_whole
from tonnage.model.vision import attach_tower

CARD = "README.md"


def read_master(shards: Shards, name: str) -> Tensor:
    """A parameter of a checkpoint in fp32: the master, put together where it lies in two halves."""
    stored, low = f"model.{name}", f"optimizer.{name}.low"
    value = shards.read(stored)
    if value.dtype in LOW and low in shards:
        return join(value, shards.read(low)).view(value.shape)
    return value.float()


@dataclass(frozen=True)
class Described:
    """What an adapter's directory says of it."""

    adapter: AdapterSpec
    alpha: float
    rank_stabilised: bool
    base: str
    revision: str | None
    origins: Origins | None = None
    """Where its additions began, if that was a part of the model's weights."""
    positions: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the model's configuration that were others in training, for a file of their own."""


def export_adapter(
    checkpoint: Path,
    directory: Path,
    *,
    config: PreTrainedConfig,
    described: Described,
    files: ModelFiles | None = None,
    tokenizer: Path,
    card: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the adapter in ``checkpoint`` of a model that ``config`` describes as a directory that peft loads.

    ``files`` are the model's, whose names the adapter has where some of its vision tower is adapted. ``tokenizer`` is a
    directory whose files are copied, ``card`` the model card.

    Raises:
        UserError: ``directory`` exists and is not empty, the checkpoint is damaged or another model's, or what was
            written is not what was to be written.
    """
    check_empty(directory)
    model, shards = on_meta(config, torch.float32), Shards(checkpoint)
    outer = _with_tower(model, files) if files is not None and trains_tower(shards) else None
    targets = find_targets(model, dissect(model), described.adapter.targets, strict=False)
    origins = described.origins
    names = [name.removeprefix("model.") for name in shards.names("model.")]
    whole = [name for name in names if not is_addition(name)]
    theirs = _their_names(targets, whole, described.adapter, outer)
    if lost := sorted(set(theirs) ^ set(names)):
        raise user_error(
            where=str(checkpoint),
            found=f"another adapter than the run's config describes ({lost[0]})",
            needed="the checkpoint of this run",
            change="restore config.yaml of the run",
        )
    total = 4 * sum(torch.Size(shards.shape(f"model.{name}")).numel() for name in names)
    if origins is not None:
        wide, alpha = doubled(described.adapter, described.alpha, rank_stabilised=described.rank_stabilised)
        described = replace(described, adapter=wide, alpha=alpha)
        total += 4 * sum(torch.Size(shards.shape(f"model.{name}")).numel() for name in names if is_addition(name))
    with published(directory, f"{total:,} bytes for the adapter") as temporary:
        values = {name: read_master(shards, name) for name in names}
        for target in targets if origins is not None else ():
            assert origins is not None
            down, up = target.names()
            values |= zip((down, up), origins.since(target.path, Low(values[down], values[up])), strict=True)
        tensors = {theirs[name]: peft.to_peft(name, value) for name, value in values.items()}
        others = {first: other for other, first in tied_names(model).items()}
        for first, other in others.items():  # peft has both
            if first in theirs:
                name = other if outer is None else _outer_names(outer).get(other, other)
                tensors[f"{peft.PREFIX}{name}"] = tensors[theirs[first]].clone()
        parts = [TensorPart(name, (0,) * tensor.dim(), tensor.contiguous()) for name, tensor in sorted(tensors.items())]
        weights, advance = temporary / adapter_files.WEIGHTS, counting(total, progress)
        digests = {weights.name: write_file(weights, parts, advance, in_parts=False, hash_name=PUBLIC_HASH)}
        text = json.dumps(adapter_config(model, targets, whole, described, outer), indent=2, ensure_ascii=False)
        (temporary / adapter_files.CONFIG).write_text(f"{text}\n", encoding="utf-8")
        if described.positions:
            text = json.dumps(dict(described.positions), indent=2, sort_keys=True)
            (temporary / adapter_files.POSITIONS).write_text(f"{text}\n", encoding="utf-8")
        shutil.copytree(tokenizer, temporary, dirs_exist_ok=True)
        if card:
            (temporary / CARD).write_text(card, encoding="utf-8")
        if outer is None:
            _check(temporary, digests, model, described)
        else:
            check_written(temporary, digests)
        write_checksums(temporary, digests, checkpoint.name)


def _with_tower(model: PreTrainedModel, files: ModelFiles) -> Whole:
    """Attach to ``model`` what sees; the whole of which both are parts."""
    attach_tower(model, files, torch.float32)
    outer = find_whole(model, read_whole_config(files, trust_remote_code=hasattr(model.config, "auto_map")))
    assert outer is not None
    return outer


def _outer_names(outer: Whole) -> dict[str, str]:
    """Name of a parameter of the model of text, or of its tower -> its name in the whole."""
    return {own: name for name, own in outer.own.items()}


def _in_whole(targets: Sequence[Target], outer: Whole) -> list[Target]:
    """Targets with the paths that they have in the whole."""
    names = _outer_names(outer)
    return [replace(target, path=names[target.weight].removesuffix(".weight")) for target in targets]


def _their_names(
    targets: Sequence[Target], whole: Sequence[str], adapter: AdapterSpec, outer: Whole | None
) -> dict[str, str]:
    """As ``peft.peft_names``, for a file that is that of a whole model where there is one."""
    if outer is None:
        return peft.peft_names(targets, whole, adapter)
    names, renamed = _outer_names(outer), _in_whole(targets, outer)
    theirs = peft.peft_names(renamed, [names[name] for name in whole], adapter)
    moved = {name: names[name] for name in whole}
    for target, other in zip(targets, renamed, strict=True):
        moved |= dict(zip(target.named_shapes(adapter), other.named_shapes(adapter), strict=True))
    return {name: theirs[other] for name, other in moved.items()}


def adapter_config(
    model: PreTrainedModel,
    targets: Sequence[Target],
    whole: Sequence[str],
    described: Described,
    outer: Whole | None = None,
) -> dict[str, Any]:
    """What ``adapter_config.json`` says; ``outer`` is the whole model where the adapter is that one's."""
    anatomy = dissect(model)
    plain = [target for target in targets if not target.experts]
    linear = [target for target in plain if not target.embeds]
    experts = [".".join(target.path.rsplit(".", 3)[-3:]) for target in targets if target.experts]
    named = plain if outer is None else _in_whole(plain, outer)
    modules = [name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2] for name in whole]
    adapter = described.adapter
    if adapter.oft_block_size:  # of rotations peft ties nothing: both of two that are the same are in the file
        modules += [other.removesuffix(".weight") for other, first in tied_names(model).items() if first in whole]
    common = {"base_model_name_or_path": described.base, "revision": described.revision}
    additions = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": _whole(described.alpha),
        "use_rslora": described.rank_stabilised,
        **({"use_dora": True} if adapter.magnitudes else {}),
        **_patterns(targets, adapter),
        "lora_dropout": adapter.dropout,
        "fan_in_fan_out": any(target.lies_turned for target in linear),
    }
    rotations = {"peft_type": "OFT", "oft_block_size": adapter.oft_block_size, **adapter_files.ROTATIONS}
    rotations["peft_version"] = f"{'.'.join(map(str, adapter_files.OFT_SINCE))}.0"
    return {
        **common,
        **(rotations if adapter.oft_block_size else additions),
        "task_type": "SEQ_CLS" if anatomy.scores else "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "target_modules": _module_names(outer.model if outer else model, [target.path for target in named]),
        **({"target_parameters": list(dict.fromkeys(experts))} if experts else {}),
        "modules_to_save": list(dict.fromkeys(modules)) or None,
        **({"ensure_weight_tying": True} if modules and anatomy.tied and not adapter.oft_block_size else {}),
    }


def _patterns(targets: Sequence[Target], adapter: AdapterSpec) -> dict[str, dict[str, float]]:
    """Ranks and alphas of layers that have their own, as peft is told of them: by expressions for whole names."""
    ranked = {target.path: pattern for target in targets if (pattern := adapter.pattern_of(target.path)) is not None}
    if not ranked:
        return {}
    return {
        "rank_pattern": {re.escape(path): pattern.rank for path, pattern in ranked.items()},
        "alpha_pattern": {re.escape(path): _whole(pattern.alpha) for path, pattern in ranked.items()},
    }


def _whole(number: float) -> float:
    """A number as it is usually written: without a fraction where it has none."""
    return int(number) if number == int(number) else number


def _module_names(model: PreTrainedModel, paths: Sequence[str]) -> list[str]:
    """How peft is told of modules: by the last parts of their names, or all of those whose last part another has too,
    be that no layer at all (``blocks.0``)."""
    last = {path: path.rpartition(".")[2] for path in paths}
    shared = {path.rpartition(".")[2] for path, _ in model.named_modules() if path not in last}
    return list(dict.fromkeys(path if end in shared else end for path, end in last.items()))


def _check(directory: Path, digests: Mapping[str, str], model: PreTrainedModel, described: Described) -> None:
    """Read back what was written: byte for byte, and as an adapter of this model."""
    check_written(directory, digests)
    written = adapter_files.read_adapter(directory)
    adapter = peft.adapter_in(written, model, dissect(model))
    assert adapter.factor == described.adapter.factor
    assert adapter.rank == described.adapter.rank
    for target in find_targets(model, dissect(model), adapter.targets, strict=False):
        assert adapter.rank_of(target.path) == described.adapter.rank_of(target.path)
        assert adapter.factor_of(target.path) == described.adapter.factor_of(target.path)
    assert written.dropout == described.adapter.dropout


class Additions:
    """Low-rank additions of a checkpoint of ``model``, by the parameters that they are added to. ``form`` is that in
    which matrices were packed while the additions were trained."""

    def __init__(
        self,
        shards: Shards,
        model: PreTrainedModel,
        adapter: AdapterSpec,
        form: Format | None,
        origins: Origins | None = None,
    ) -> None:
        anatomy = dissect(model)
        targets = find_targets(model, anatomy, adapter.targets, strict=False)
        self._shards, self._adapter, self._form, self._origins = shards, adapter, form, origins
        self._targets = {target.weight: target for target in targets}
        """By the names of the matrices."""
        self._packed = packable_names(model, anatomy.blocks) if form is not None else frozenset[str]()
        """Names of the matrices that were packed, if they were not trained."""
        self._squares: dict[str, tuple[float, float, float]] = {}
        """Of each packed matrix that has been merged, sums of squares: of its numbers, of what packing took from them,
        and of its addition."""

    def merged(self, name: str, value: Tensor) -> Tensor:
        """``value``, a parameter as it was, and the addition to it if there is one, in fp32."""
        if (target := self._targets.get(name)) is None:
            return value
        values = [read_master(self._shards, part) for part in target.named_shapes(self._adapter)]
        if self._origins is not None:
            values[:2] = self._origins.since(target.path, Low(*values[:2]))
        merged = target.merged(value, self._adapter, values)
        if self._form is not None and name in self._packed:
            taken = self._origins.taken(target) if self._origins is not None else None
            packed = value if taken is None else value.float() - taken
            moved = float(torch.linalg.vector_norm(merged - value, dtype=torch.float64)) ** 2
            self._squares[name] = *squares_and_lost(packed, self._form), moved
        return merged

    def said(self) -> list[str]:
        """A sentence on how far packing moved the matrices, beside how far their additions did; none if none was."""
        if not self._squares:
            return []
        size, off, moved = map(sum, zip(*self._squares.values(), strict=True))
        packing, additions = math.sqrt(off / size), math.sqrt(moved / size)
        return [
            f"Additions were trained over weights in {self._form}, which is {packing:.2%} off the weights that they "
            f"are merged into here; they are {additions:.2%} of these (Frobenius norms)."
        ]
