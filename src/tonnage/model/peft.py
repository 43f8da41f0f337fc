"""Adapters as peft stores them: a directory with ``adapter_config.json`` and ``adapter_model.safetensors``.

    ours                                      peft's, in the file
    PATH.lora_A (rank, in)                    base_model.model.PATH.lora_A.weight
    PATH.experts.down_proj_lora_A (e, r, in)  base_model.model.PATH.experts.lora_A.weight (e r, in)
    PATH.experts.down_proj_lora_B (e, out, r) base_model.model.PATH.experts.lora_B.weight (out, r e)
    PATH.lora_embedding_A (vocabulary, rank)  base_model.model.PATH.lora_embedding_A (rank, vocabulary)
    PATH.weight, trained whole                base_model.model.PATH.weight

Of two stacks of experts that are both adapted, peft wraps the first into the second, and calls it ``base_layer``.
Beside the addition to an embedding it keeps the embedding itself, ``base_model.model.PATH.base_layer.weight``, which
must be the model's; none is written here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.errors import Problem, UserError
from tonnage.model.stored import Stored, read, read_headers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tonnage.model.adapters import Adapter, Target
    from tonnage.model.anatomy import Anatomy

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
KNOWN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "fan_in_fan_out": (True, False),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),
    "alpha_pattern": ({}, None),
    "rank_pattern": ({}, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "megatron_config": (None,),
    "lora_ga_config": (None,),
}
"""Fields that change what an adapter computes, and the values that are known here. Of the ways to begin, those that
change the model's own weights (PiSSA, OLoRA, LoftQ, CorDA) are not among them: the additions belong to what is left."""
NO_MATTER = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "use_rslora",
    }
)
"""Fields that are read elsewhere, or say how an adapter began or which layers it has, which its file says too."""


_VOCABULARY = re.compile(r"(embed|wte|head|output)[^.]*\.weight$")
"""Ends of the names of embeddings and heads."""


STATE_SPACE = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Families whose ``out_proj`` peft refuses: kernels of theirs compute with its weight alone."""
STACKED = frozenset({"gate_proj", "up_proj", "down_proj"})
"""Names of layers that experts had before transformers stacked them: in families that it converts like Qwen 2's
mixture, peft takes them for the experts, and has no addition to a layer of that name beside them."""


def unreadable(model: nn.Module) -> frozenset[str]:
    """Last names of linear layers of a model whose additions peft cannot load."""
    from transformers import conversion_mapping

    family = str(getattr(getattr(model, "config", None), "model_type", ""))
    if family in STATE_SPACE:
        return frozenset({"out_proj"})
    patterns: Mapping[str, str] = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
    return STACKED if patterns.get(family) == "qwen2_moe" else frozenset()


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter on this disk."""

    directory: Path
    base: str
    """Directory or hub id of the model that it belongs to, as it says."""
    revision: str | None
    rank: int
    alpha: float
    rank_stabilised: bool
    stored: tuple[Stored, ...]
    experts: tuple[str, ...] = ()
    """Ends of the names of stacked parameters that are adapted."""
    dropout: float = 0.0
    """With which it was trained; it changes nothing of what an adapter computes."""

    @property
    def factor(self) -> float:
        """By which its additions are multiplied."""
        return factor_of(self.rank, self.alpha, rank_stabilised=self.rank_stabilised)

    @property
    def vocabulary(self) -> int:
        """Rows of an embedding or a head that is whole in it, which may be more than the model's; 0 if none is."""
        whole = (one for one in self.stored if "lora_" not in one.key and _VOCABULARY.search(one.key))
        return max((one.shape[0] for one in whole if len(one.shape) == 2), default=0)


def factor_of(rank: int, alpha: float, *, rank_stabilised: bool) -> float:
    """What additions are multiplied by."""
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


def read_adapter(directory: Path) -> AdapterFiles:
    """The adapter in a directory; of its weights, the headers.

    Raises:
        UserError: it is none of LoRA as it is computed here, or its files are missing or damaged.
    """
    from tonnage.model.files import read_json_object

    path = directory / CONFIG
    said, problems = read_json_object(path), list[Problem]()

    def wrong(key: str, needed: str) -> None:
        found = f"{key} is {str(said.get(key))[:100]}"
        problems.append(Problem(found, needed, "merge it with peft (merge_and_unload), and train on that", str(path)))

    for key, value in said.items():
        if key in KNOWN and value not in KNOWN[key]:
            wrong(key, f"{' or '.join(str(one) for one in KNOWN[key])}: plain low-rank additions")
        elif key not in KNOWN and key not in NO_MATTER and value not in (None, False, {}, []):
            wrong(key, "a field that is known here")
    rank, alpha = said.get("r"), said.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        wrong("r", "the rank, a number of at least 1")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or alpha <= 0:
        wrong("lora_alpha", "a number above 0")
    dropout = said.get("lora_dropout", 0.0)
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        wrong("lora_dropout", "a number from 0 to below 1")
    base = said.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        wrong("base_model_name_or_path", "the directory or hub id of the model that the adapter belongs to")
    if not (directory / WEIGHTS).is_file():
        needed = f"{WEIGHTS} beside {CONFIG}"
        problems.append(Problem("an adapter without weights", needed, "save it as safetensors", str(directory)))
    if problems:
        raise UserError(*problems)
    assert isinstance(rank, int)
    assert isinstance(alpha, int | float)
    assert isinstance(dropout, int | float)
    assert isinstance(base, str)
    beside = directory / base
    revision, experts = said.get("revision"), said.get("target_parameters") or ()
    return AdapterFiles(
        directory,
        str(beside) if not Path(base).is_dir() and beside.is_dir() else base,
        revision if isinstance(revision, str) else None,
        rank,
        float(alpha),
        bool(said.get("use_rslora")),
        read_headers([directory / WEIGHTS]),
        tuple(str(one) for one in experts),
        float(dropout),
    )


def peft_names(targets: Sequence[Target], whole: Iterable[str]) -> dict[str, str]:
    """Our names of what is trained -> the names in peft's file. ``whole`` are names of parameters that are trained
    whole."""
    found = {name: f"{PREFIX}{name}" for name in whole}
    wrapped = {target.path.rpartition(".")[0] for target in targets if target.experts}
    outer = {path: [one for one in targets if one.path.rpartition(".")[0] == path][-1] for path in wrapped}
    for target in targets:
        place = target.path
        if target.experts:
            owner = target.path.rpartition(".")[0]
            place = owner if outer[owner] is target else f"{owner}.base_layer"
        for name in target.names():
            last = name.rpartition(".")[2]
            found[name] = f"{PREFIX}{place}.{last}" if target.embeds else f"{PREFIX}{place}.{name[-6:]}.weight"
    return found


def to_peft(name: str, value: Tensor) -> Tensor:
    """Our tensor as peft has it: experts' matrices side by side, in two dimensions."""
    if name.endswith("lora_embedding_A"):
        return value.t().contiguous()
    if value.dim() != 3:
        return value
    return value.flatten(0, 1) if name.endswith("lora_A") else value.permute(1, 2, 0).flatten(1).contiguous()


def from_peft(name: str, value: Tensor, shape: Sequence[int]) -> Tensor:
    """Peft's tensor as one of ``shape`` here."""
    if name.endswith("lora_embedding_A"):
        return value.t()
    if len(shape) != 3:
        return value
    experts, first, second = shape
    if name.endswith("lora_A"):
        return value.view(experts, first, second)
    return value.view(first, second, experts).permute(2, 0, 1)


def adapter_in(files: AdapterFiles, model: nn.Module, anatomy: Anatomy) -> Adapter:
    """What is adapted in ``model``, by the names in the adapter's file, and what is trained whole beside it.

    Raises:
        UserError: the file has tensors that the model has no place for, or of another shape: another model's.
    """
    from tonnage.model.adapters import Adapter, adaptable, find_targets, whole_of

    keys = {one.key: one for one in files.stored}
    there = list(adaptable(model, anatomy))
    adapted = [one for one in there if not one.experts or one.path.endswith(files.experts)]
    for one in adapted:
        if one.embeds and (stored := keys.pop(_kept_beside(one), None)) is not None:
            size = (one.shape[1], one.shape[0])
            if stored.shape != size:
                raise _another_model(files, f"{stored.key} of shape {stored.shape}, not {size}")
    names = peft_names(adapted, [name for name, _ in model.named_parameters(remove_duplicate=False)])
    ours = {theirs: name for name, theirs in names.items()}
    unknown = [key for key in keys if key not in ours]
    if unknown:
        raise _another_model(files, f"{len(unknown):,} tensors that the model has no place for, such as {unknown[0]}")
    found = {ours[key] for key in keys}
    targets = [one for one in adapted if found.issuperset(one.names())]
    half = found - {name for one in targets for name in one.names()}
    shapes = {name: shape for one in targets for name, shape in one.named_shapes(files.rank).items()}
    for name, shape in shapes.items():
        stored = keys[names[name]]
        wanted = _flat(name, shape)
        if stored.shape != wanted:
            raise _another_model(files, f"{stored.key} of shape {stored.shape}, not {wanted}")
    also = whole_of(model, anatomy, half)
    if also is None or not targets:
        raise _another_model(files, f"weights trained whole beside it: {', '.join(sorted(half)[:3])}")
    hidden = unreadable(model)
    readable = [one for one in there if one.experts or one.path.rpartition(".")[2] not in hidden]
    chosen = short_names(targets, readable)
    find_targets(model, anatomy, chosen, strict=False)  # refuses what cannot be adapted
    return Adapter(files.rank, files.factor, chosen, tuple(also))


def _kept_beside(target: Target) -> str:
    """Where peft's file has an embedding itself, beside its addition."""
    return f"{PREFIX}{target.path}.base_layer.weight"


def _flat(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) == 2:
        return (shape[1], shape[0]) if name.endswith("lora_embedding_A") else tuple(shape)
    experts, first, second = shape
    return (experts * first, second) if name.endswith("lora_A") else (first, second * experts)


def short_names(targets: Sequence[Target], there: Sequence[Target]) -> str | tuple[str, ...]:
    """How a config names ``targets`` out of all that are ``there``: shortest way first; embeddings last."""
    if embeddings := [one for one in targets if one.embeds]:
        plain = [one for one in targets if not one.embeds]
        others = short_names(plain, [one for one in there if not one.embeds]) if plain else ()
        ends = tuple(dict.fromkeys(one.path.rpartition(".")[2] for one in embeddings))
        return (*((others,) if isinstance(others, str) else others), *ends)
    there = [one for one in there if not one.embeds]
    if {one.path for one in targets} == {one.path for one in there}:
        return "all-linear"
    ends = tuple(dict.fromkeys(one.path.rpartition(".")[2] for one in targets))
    same = [one for one in there if one.path.rpartition(".")[2] in ends]
    return ends if len(same) == len(targets) else tuple(one.path for one in targets)


def fill(
    parameters: Mapping[str, Tensor], targets: Sequence[Target], files: AdapterFiles, trained: Sequence[str]
) -> None:
    """Read this rank's parts of what is ``trained`` from an adapter's file into ``parameters``, by their names here.

    Raises:
        UserError: the file's embedding is not the model's.
    """
    import torch

    from tonnage.kernels.regions import region_of
    from tonnage.model.adapters import is_addition

    whole = [name for name in trained if name in parameters and not is_addition(name)]
    names = {theirs: name for name, theirs in peft_names(targets, whole).items()}
    beside = {_kept_beside(one): one.weight for one in targets if one.embeds}
    with torch.no_grad():
        for one, view in read(files.stored):
            if beside.get(one.key) in parameters:
                _check_same(files, one.key, view[...], parameters[beside[one.key]])
            name = names.get(one.key, "")
            if name not in parameters:
                continue  # in another stage, or a head that is the embedding
            local, region = region_of(parameters[name].data)
            if local.numel():
                local.copy_(from_peft(name, view[...], parameters[name].shape)[region])


def _check_same(files: AdapterFiles, key: str, kept: Tensor, weight: Tensor) -> None:
    """Refuse an embedding in an adapter's file that is not the model's."""
    import torch

    from tonnage.kernels.regions import region_of

    local, region = region_of(weight.data)
    if local.numel() and not torch.equal(kept[region].to(local.device, local.dtype), local):
        raise _another_model(files, f"{key}, an embedding with other weights than the model's")


def _another_model(files: AdapterFiles, found: str) -> UserError:
    return UserError(
        Problem(
            where=str(files.directory / WEIGHTS),
            found=found,
            needed=f"an adapter of {files.base}, which its {CONFIG} names",
            change="use the model that the adapter was trained for, or mend base_model_name_or_path",
        )
    )


def merge(model: nn.Module, files: AdapterFiles) -> None:
    """Add an adapter's additions to the weights of a whole ``model`` on one device, each in fp32 and rounded once; what
    was trained whole takes the place of what is there.

    Raises:
        UserError: it is another model's.
    """
    import torch

    from tonnage.model.adapters import find_targets
    from tonnage.model.anatomy import dissect

    anatomy = dissect(model)  # type: ignore[arg-type]
    adapter = adapter_in(files, model, anatomy)
    targets = find_targets(model, anatomy, adapter.targets, strict=False)
    views = {one.key: view for one, view in read(files.stored)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = peft_names(targets, parameters)
    with torch.no_grad():
        for target in targets:
            shapes = target.named_shapes(files.rank)
            down, up = (from_peft(name, views[names[name]][...], shape) for name, shape in shapes.items())
            weight = parameters[target.weight]
            if target.embeds and (kept := views.get(_kept_beside(target))) is not None:
                _check_same(files, _kept_beside(target), kept[...], weight)
            weight.copy_(target.merged(weight, down, up, files.factor))
        for name, parameter in parameters.items():
            if (view := views.get(f"{PREFIX}{name}")) is not None:
                parameter.copy_(view[...])
