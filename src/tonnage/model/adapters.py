"""What of a model is trained: all of it, some of its parameters, or low-rank additions to its layers (LoRA).

An adapter is a property of a layer, no wrapper around a model: the layer gets two more parameters, and computes
with them. So whoever divides, shards, streams, weighs or saves parameters meets it as it meets any other.

    layer.weight (out, in)               frozen
    layer.lora_A (rank, in)              drawn from a seed and the layer's name, whatever the layout
    layer.lora_B (out, rank)             zero at first

With magnitudes (DoRA) a layer has two vectors more, both fp32:

    layer.lora_magnitude (out,)          the length that each row of the sum has; at first that of the frozen weight's
    layer.lora_norms (out,)              the lengths of the frozen weight's rows, which stay as they are

Rotations (OFT) are of the layer's inputs, and in place of the two matrices:

    layer.oft_R (blocks, size * (size - 1) / 2)    of each block the numbers above the diagonal, fp32; zero at first

The experts of a mixture are stacked, and so are their additions: ``experts.gate_up_proj_lora_A`` is (experts, rank,
in), ``_lora_B`` (experts, out, rank). An embedding's are the other way round, as peft has them: what is looked up is
zero at first.

    embedding.lora_embedding_A (vocabulary, rank)    zero at first; peft's file has it turned
    embedding.lora_embedding_B (hidden, rank)        drawn

What is frozen is stored in the type that is computed with; what is trained, as parameters always are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tonnage.errors import UserError, user_error
from tonnage.host.quantized import Format
from tonnage.kernels.embedding import adapted_embedding, looks_up_alone
from tonnage.kernels.fake_quantized import Scheme
from tonnage.kernels.fp8 import Fp8
from tonnage.kernels.magnitudes import lengthened, lengths_of, scaled
from tonnage.kernels.quantized import PackedWeight
from tonnage.kernels.regions import fill_local, region_of
from tonnage.kernels.rotations import rotated, rotated_columns
from tonnage.model.anatomy import Anatomy, is_norm
from tonnage.model.build import seed_of
from tonnage.model.dropout import Drawn, LayerDropout
from tonnage.model.packed_layers import compute, forward_linear, is_linear, keep_stored, packed_weight, stacks_of
from tonnage.model.towers import in_tower

DOWN, UP = "lora_A", "lora_B"
EMBEDDING_DOWN, EMBEDDING_UP = "lora_embedding_A", "lora_embedding_B"
MAGNITUDE, NORMS = "lora_magnitude", "lora_norms"
"""Of DoRA: the lengths that rows have, which are trained, and those of the frozen weight."""
ROTATIONS = "oft_R"
"""Of OFT: what its rotations are made of."""
ALL_LINEAR = "all-linear"
MOST_NAMES = 12
NOT_LOADED = "peft could not load the addition"
Whole = Literal["embeddings", "head", "norms"]
STATE_SPACE = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Families whose ``out_proj`` peft refuses: kernels of theirs compute with its weight alone."""
DT_PROJ_NOT_CALLED = frozenset({"falcon_mamba", "jamba", "mamba"})
"""Families that never call ``dt_proj``, but multiply by its weight."""
STACKED = frozenset({"gate_proj", "up_proj", "down_proj"})
"""Names of layers that experts had before transformers stacked them: in families that it converts like Qwen 2's
mixture, peft takes them for the experts, and has no addition to a layer of that name beside them."""


@dataclass(frozen=True)
class Ranked:
    """The additions of some layers."""

    match: str
    """Name or pattern of the layers."""
    rank: int
    alpha: float
    factor: float
    """By which the product of the two matrices is multiplied: it follows from the two."""


@dataclass(frozen=True)
class AdapterSpec:
    """Low-rank additions, and what is trained beside them."""

    rank: int
    factor: float
    """By which the product of the two matrices is multiplied."""
    targets: str | tuple[str, ...] = ALL_LINEAR
    """Names or patterns of layers; ``all-linear``, alone or among them, is every linear layer but the head, and all
    experts."""
    also: tuple[Whole, ...] = ()
    """What is trained whole."""
    dropout: float = 0.0
    """The probability that a number of an addition's inputs is zero in training."""
    patterns: tuple[Ranked, ...] = ()
    """Layers whose additions differ in rank or factor; the first that matches counts."""
    magnitudes: bool = False
    """Whether the lengths of rows are trained apart (DoRA)."""
    oft_block_size: int = 0
    """Inputs that are rotated together where no matrices are added (OFT)."""
    init: Literal["zero", "pissa", "loftq"] = "zero"
    """Where additions begin (``starts``)."""
    rounds: int = 0
    """Of what finds it."""

    def pattern_of(self, path: str) -> Ranked | None:
        """The pattern that decides for the layer at a path; None where it is like the rest."""
        return next((ranked for ranked in self.patterns if _matches(path, ranked.match)), None)

    def rank_of(self, path: str) -> int:
        return self.rank if (ranked := self.pattern_of(path)) is None else ranked.rank

    def factor_of(self, path: str) -> float:
        return self.factor if (ranked := self.pattern_of(path)) is None else ranked.factor


@dataclass(frozen=True)
class Trains:
    """What of a model is trained; nothing said is all of it."""

    adapter: AdapterSpec | None = None
    patterns: tuple[str, ...] = ()
    """Of names of parameters."""
    quantize: Format | None = None
    """How frozen weights of linear layers and experts of the blocks rest; None is as they are."""
    stored: tuple[tuple[str, Format], ...] = ()
    """Weights that keep the form in which a quantised checkpoint has them where they are frozen, and that form."""
    tower: tuple[str, ...] = ()
    """Of patterns and targets those that name parts of a tower, where they are set apart (``apart``)."""
    aware: Scheme | None = None
    """How linear layers of the blocks round what they multiply; None: not at all."""
    fp8: Fp8 | None = None
    """How they multiply in fp8; None: not at all."""

    @property
    def packs(self) -> bool:
        """Whether weights rest in fewer bits than are computed with."""
        return self.quantize is not None or bool(self.stored)

    @property
    def all(self) -> bool:
        """Whether nothing is frozen."""
        return self.adapter is None and not self.patterns and not self.tower


EVERYTHING = Trains()


@dataclass(frozen=True)
class Target:
    """A matrix, or a stack of them, that gets an addition."""

    path: str
    """Of the module; for experts that of the parameter."""
    owner: nn.Module
    prefix: str
    """Of the names of the addition's parameters in ``owner``."""
    shape: tuple[int, int]
    """Outputs and inputs."""
    experts: int = 0
    """How many are stacked; 0 is a linear layer."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def embeds(self) -> bool:
        """Whether it is an embedding, whose inputs are the vocabulary."""
        return isinstance(self.owner, nn.Embedding)

    @property
    def is_layer(self) -> bool:
        """Whether it is a linear layer, which has a weight of its own that it multiplies by."""
        return not self.experts and not self.embeds

    def shapes(self, adapter: AdapterSpec) -> dict[str, tuple[int, ...]]:
        """Of the addition's parameters, by their names in ``owner``."""
        (outputs, inputs), rank, size = self.shape, adapter.rank_of(self.path), adapter.oft_block_size
        if size:
            return {ROTATIONS: (inputs // size, size * (size - 1) // 2)}
        if self.embeds:
            return {EMBEDDING_DOWN: (inputs, rank), EMBEDDING_UP: (outputs, rank)}
        stack = (self.experts,) if self.experts else ()
        length = {MAGNITUDE: (outputs,)} if adapter.magnitudes and self.is_layer else {}
        return {self.prefix + DOWN: (*stack, rank, inputs), self.prefix + UP: (*stack, outputs, rank)} | length

    def names(self) -> tuple[str, str]:
        """Of the two matrices of the addition in the model."""
        down, up = (EMBEDDING_DOWN, EMBEDDING_UP) if self.embeds else (DOWN, UP)
        joint = "_" if self.experts else "."
        return f"{self.path}{joint}{down}", f"{self.path}{joint}{up}"

    @property
    def weight(self) -> str:
        """Name of the matrix, or the stack, in the model."""
        return self.path if self.experts else f"{self.path}.weight"

    @property
    def lies_turned(self) -> bool:
        """Whether its rows are inputs: GPT-2's layers, and some families' experts."""
        return bool(self.owner.is_transposed) if self.experts else type(self.owner) is Conv1D

    def merged(self, weight: Tensor, adapter: AdapterSpec, values: Sequence[Tensor]) -> Tensor:
        """``weight`` with what is trained beside it, ``values`` in the order of ``named_shapes``, in fp32."""
        if adapter.oft_block_size:
            return rotated_columns(weight.float(), values[0].float().to(weight.device))
        (down, up), factor = values[:2], adapter.factor_of(self.path)
        if self.embeds:
            return weight.float() + torch.matmul(down.float(), up.float().t()).mul_(factor).to(weight.device)
        added = torch.matmul(up.float(), down.float()).mul_(factor)
        summed = weight.float() + (added.transpose(-1, -2) if self.lies_turned else added).to(weight.device)
        if not adapter.magnitudes:
            return summed
        turned = summed.t() if self.lies_turned else summed
        turned = lengthened(turned, values[2].to(weight.device))
        return turned.t() if self.lies_turned else turned

    def named_shapes(self, adapter: AdapterSpec) -> dict[str, tuple[int, ...]]:
        """Of the addition's parameters, by their names in the model."""
        joint = "_" if self.experts else "."
        shapes = self.shapes(adapter).items()
        return {f"{self.path}{joint}{name.removeprefix(self.prefix)}": shape for name, shape in shapes}


def prepare(
    model: nn.Module, anatomy: Anatomy, trains: Trains, storage: torch.dtype, drawn: Drawn | None = None
) -> list[Target]:
    """Add what ``trains`` asks for to ``model``, on the meta device, and freeze the rest. ``storage`` is the type of
    trained parameters, unless they are fp32 already. Returns the targets that got an addition.

    Additions with dropout draw their masks for what is ``drawn``; without it, nothing is dropped.

    Raises:
        UserError: a target that matches nothing or cannot be adapted, experts whose additions are to have dropout.
    """
    if trains.all:
        return []
    keep_stored(model, trains.stored)
    if trains.packs:
        for module in (one for block in anatomy.blocks for one in block.modules() if is_linear(one)):
            module.forward = MethodType(forward_linear, module)
    names = trained_names(model, anatomy, trains)
    targets = find_targets(model, anatomy, trains.adapter.targets) if trains.adapter is not None else []
    replaced: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                trained = _join(path, name) in names
                value = parameter.detach()
                value = value.to(storage) if trained and value.dtype != torch.float32 else value
                replaced[id(parameter)] = nn.Parameter(value, requires_grad=trained)
            module._parameters[name] = replaced[id(parameter)]
    if trains.adapter is not None:
        _check_dropout(trains.adapter, targets)
        _check_whole(trains.adapter, targets, anatomy)
        _check_patterns(trains.adapter, targets)
        _check_kind(trains.adapter, targets)
        _check_start(trains.adapter, targets, anatomy)
        for target in targets:
            attach(target, trains.adapter, storage, drawn)
    return targets


def trained_names(model: nn.Module, anatomy: Anatomy, trains: Trains) -> set[str]:
    """Names of the model's own parameters that are trained.

    Raises:
        UserError: a pattern matches none.
    """
    parameters = list(model.named_parameters(remove_duplicate=False))
    if trains.adapter is None:
        names = [name for name, _ in parameters]
        paths = {id(module): path for path, module in model.named_modules()}
        blocks = [paths[id(block)] for block in anatomy.blocks]
        matched = {
            pattern: _of_text_first({name for name in names if is_named(name, pattern, blocks)})
            for pattern in trains.patterns
        }
        if nothing := [pattern for pattern, those in matched.items() if not those]:
            raise matches_nothing("train", nothing, names, "parameters")
        chosen = set().union(*matched.values())
        whole = {id(one) for name, one in parameters if name in chosen}
    else:
        whole = {id(one) for also in trains.adapter.also for one in _whole(model, anatomy, also)}
    return {name for name, one in parameters if id(one) in whole}  # a tied one by each of its names


def _of_text_first(names: set[str]) -> set[str]:
    """What a pattern names that matches so much: of the model of text, or of the tower where that has none of it."""
    return {name for name in names if not in_tower(name)} or names


def apart(model: nn.Module, anatomy: Anatomy, trains: Trains) -> Trains:
    """What is trained of a ``model`` with its tower, with the patterns and targets set apart that name the tower's.

    Raises:
        UserError: a pattern matches nothing, or something that cannot be adapted.
    """
    patterns = trains.patterns
    if trains.adapter is not None:
        patterns = (trains.adapter.targets,) if isinstance(trains.adapter.targets, str) else trains.adapter.targets

    def sees(pattern: str) -> bool:
        if trains.adapter is not None:
            return any(in_tower(target.path) for target in find_targets(model, anatomy, (pattern,)))
        return any(map(in_tower, trained_names(model, anatomy, replace(trains, patterns=(pattern,)))))

    tower = tuple(pattern for pattern in patterns if sees(pattern))
    if not tower:
        return trains
    rest = tuple(pattern for pattern in patterns if pattern not in tower)
    if trains.adapter is None:
        return replace(trains, patterns=rest, tower=tower)
    _check_dropout(trains.adapter, find_targets(model, anatomy, tower))
    return replace(trains, adapter=replace(trains.adapter, targets=rest), tower=tower)


_BLOCKS = re.compile(r"blocks\[(-?\d+)?:(-?\d+)?\](.*)")


def is_named(name: str, pattern: str, blocks: Sequence[str]) -> bool:
    """Whether a pattern names a parameter; ``blocks[-2:].*`` is of the last two of the blocks, whatever they are
    called."""
    if (some := _BLOCKS.fullmatch(pattern)) is None:
        return _matches(name, pattern)
    first, last = (int(one) if one else None for one in some.group(1, 2))
    return any(fnmatchcase(name, f"{block}{some[3]}") for block in blocks[first:last])


def _whole(model: nn.Module, anatomy: Anatomy, part: Whole) -> Iterator[nn.Parameter]:
    match part:
        case "embeddings":
            yield from anatomy.embedding.parameters()
        case "head":
            yield from anatomy.head.parameters()
        case "norms":
            for path, module in model.named_modules():
                if is_norm(path, module) and not in_tower(path):
                    yield from module.parameters(recurse=False)


def whole_of(model: nn.Module, anatomy: Anatomy, names: Collection[str]) -> list[Whole] | None:
    """The parts, of those that may be trained whole, that the parameters ``names`` make up; None if they make up
    none."""
    kinds: tuple[Whole, ...] = get_args(Whole)
    trained = {id(one) for name, one in model.named_parameters(remove_duplicate=False) if name in names}
    whole, covered = list[Whole](), set[int]()
    for kind in kinds:
        part = {id(parameter) for parameter in _whole(model, anatomy, kind)}
        if part <= trained and not part <= covered:  # a tied head is the embedding
            whole.append(kind)
            covered |= part
    return whole if covered == trained else None


def not_adapted(model: nn.Module) -> Mapping[str, str]:
    """Last names of linear layers of a model that take no addition, and why not."""
    from transformers import conversion_mapping

    family = str(getattr(getattr(model, "config", None), "model_type", ""))
    patterns: Mapping[str, str] = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
    reasons = dict[str, str]()
    if patterns.get(family) == "qwen2_moe":
        reasons |= dict.fromkeys(sorted(STACKED), NOT_LOADED)
    if family in STATE_SPACE:
        reasons["out_proj"] = NOT_LOADED
    if family in DT_PROJ_NOT_CALLED:
        reasons["dt_proj"] = "the model reads its weight and does not call it: an addition would not be computed"
    return reasons


def find_targets(
    model: nn.Module, anatomy: Anatomy, targets: str | Sequence[str], *, strict: bool = True
) -> list[Target]:
    """The matrices of ``model`` that ``targets`` name, in the model's order; ``strict``: for training, where
    ``all-linear`` is no matrix less than all of the blocks, and what is trained can be loaded by peft.

    Raises:
        UserError: a name or pattern that matches nothing, or something that cannot be adapted.
    """
    everything, excluded = list(adaptable(model, anatomy)), not_adapted(model)
    adapted = [target for target in everything if target.experts or target.name not in excluded]
    eligible = adapted if strict else everything
    linear = [target for target in adapted if not target.embeds and not in_tower(target.path)]
    patterns = (targets,) if isinstance(targets, str) else targets
    if ALL_LINEAR in patterns and strict and (left_out := _cannot_be_adapted(model, anatomy, linear)):
        raise _cannot(ALL_LINEAR, left_out, linear)
    matched = {name: linear if name == ALL_LINEAR else _targets_named(name, eligible) for name in patterns}
    nothing = [name for name, those in matched.items() if not those]
    for name in nothing:
        others = [path for path, _ in model.named_modules() if path and _matches(path, name)]
        if others:
            reasons = {excluded[last] for path in others if (last := path.rpartition(".")[2]) in excluded}
            raise _cannot(name, others, linear, f" ({'; '.join(sorted(reasons))})" if reasons else "")
    if nothing:
        raise matches_nothing("adapter.targets", nothing, [target.path for target in eligible], "layers")
    chosen_ids = {id(target) for those in matched.values() for target in those}
    chosen = [target for target in eligible if id(target) in chosen_ids]
    if anatomy.tied and (tied := [target.path for target in chosen if target.owner is anatomy.embedding]):
        raise _is_the_head(tied[0])
    return chosen


def _targets_named(pattern: str, eligible: Sequence[Target]) -> list[Target]:
    matched = [target for target in eligible if _matches(target.path, pattern)]
    paths = _of_text_first({target.path for target in matched})
    return [target for target in matched if target.path in paths]


def adaptable(model: nn.Module, anatomy: Anatomy) -> Iterator[Target]:
    """What of a model can get an addition, in its order: linear layers but the head, stacks of experts, embeddings; of
    a tower linear layers alone."""
    for path, module in model.named_modules():
        if module is anatomy.head or (in_tower(path) and not is_linear(module)):
            continue
        if is_linear(module):
            yield Target(path, module, "", (module.out_features, module.in_features))
        elif type(module) is Conv1D:
            yield Target(path, module, "", (module.weight.shape[1], module.weight.shape[0]))
        elif looks_up_alone(module):
            yield embedding_at(model, path)
        for name, parameter in stacks_of(module).items():
            first, second = parameter.shape[1:]
            shape = (second, first) if module.is_transposed else (first, second)
            yield Target(_join(path, name), module, f"{name}_", shape, len(parameter))


KINDS = (
    (re.compile(r"att|delta"), "attention"),
    (re.compile(r"mlp|moe|expert|feed|ffn|\bfc|dense"), "MLPs"),
    (re.compile(r"mamba|mixer|ssm|conv|recurrent"), "state-space layers and convolutions"),
)
"""What the class of a layer's parent, or else its path, says of it; the first that matches counts."""


def count_adapted(model: nn.Module, anatomy: Anatomy, targets: Iterable[Target]) -> tuple[tuple[str, int, int], ...]:
    """How many matrices of each kind are among ``targets``, and how many of it there are in the model. Of a stack of
    experts each is counted; embeddings are if any has an addition."""
    chosen, counts = {target.path for target in targets}, dict[str, list[int]]()
    for target in adaptable(model, anatomy):
        number = target.experts or 1
        parent = model.get_submodule(target.path.rpartition(".")[0])
        count = counts.setdefault(_kind_of(target, type(parent).__name__), [0, 0])
        count[0] += number if target.path in chosen else 0
        count[1] += number
    shown = {kind: count for kind, count in counts.items() if count[0] or kind != "embeddings"}
    return tuple((kind, adapted, whole) for kind, (adapted, whole) in shown.items())


def _kind_of(target: Target, parent: str) -> str:
    if target.experts or target.embeds:
        return "experts" if target.experts else "embeddings"
    said = (text.lower() for text in (parent, target.path))
    return next((kind for text in said for names, kind in KINDS if names.search(text)), "other layers")


def _cannot_be_adapted(model: nn.Module, anatomy: Anatomy, targets: Iterable[Target]) -> list[str]:
    """Matrices of the blocks that hold a good part of them and are neither linear layers nor experts as above."""
    adaptable_ids = {id(parameter) for target in targets for parameter in target.owner.parameters(recurse=False)}
    inside = {id(parameter) for block in anatomy.blocks for parameter in block.parameters()}
    least = max((math.prod(target.shape) for target in targets), default=0)
    return [
        name
        for name, parameter in model.named_parameters()
        if id(parameter) in inside
        and id(parameter) not in adaptable_ids
        and parameter.dim() == 3
        and parameter.numel() >= least
    ]


def _check_dropout(adapter: AdapterSpec, targets: Sequence[Target]) -> None:
    """Refuse dropout in additions to experts, whose rows are tokens that a router has sorted, and to a tower, whose
    rows are no tokens."""
    experts = [target.path for target in targets if target.experts]
    if adapter.dropout and experts:
        raise user_error(
            where="adapter.dropout",
            found=f"dropout of {adapter.dropout:g}, and {_ends(experts)} are stacks of experts",
            needed="no dropout where experts are adapted (peft has none there either)",
            change="adapter.dropout=0, or adapter.targets without the experts",
        )
    if adapter.dropout and (seeing := [target.path for target in targets if in_tower(target.path)]):
        raise user_error(
            where="adapter.dropout",
            found=f"dropout of {adapter.dropout:g}, and {_ends(seeing)} of the vision tower among the targets",
            needed="no dropout there: which inputs are dropped is drawn for each token of text",
            change="adapter.dropout=0, or adapter.targets of the language model alone",
        )


def _check_whole(adapter: AdapterSpec, targets: Sequence[Target], anatomy: Anatomy) -> None:
    """Refuse an addition to an embedding that is trained whole."""
    both = [target.path for target in targets if target.owner is anatomy.embedding]
    if both and "embeddings" in adapter.also:
        raise user_error(
            where="adapter.targets, adapter.also",
            found=f"{_ends(both)} among the targets, and embeddings trained whole",
            needed="one of the two",
            change=f"adapter.targets without {_ends(both)}, or adapter.also without embeddings",
        )


def _check_patterns(adapter: AdapterSpec, targets: Sequence[Target]) -> None:
    """Refuse a pattern of ranks that decides for no target."""
    key = "adapter.patterns"
    deciding = {target.path: adapter.pattern_of(target.path) for target in targets}
    for ranked in adapter.patterns:
        matched = [path for path in deciding if _matches(path, ranked.match)]
        if not matched:
            raise matches_nothing(key, [ranked.match], deciding, "targets")
        if all(deciding[path] is not ranked for path in matched):
            raise user_error(
                where=key,
                found=f"{ranked.match}: all that matches is matched by a pattern before",
                needed="layers for each pattern: of several that match, the first counts",
                change=f"put {ranked.match} before the others, or leave it out",
            )


def _check_kind(adapter: AdapterSpec, targets: Sequence[Target]) -> None:
    """Refuse lengths of rows and rotations of inputs where there is no layer of the language model's, and rotations of
    inputs that their blocks do not divide."""
    if not adapter.magnitudes and not adapter.oft_block_size:
        return
    kind, additions = ("oft", "rotations") if adapter.oft_block_size else ("dora", "magnitudes")
    others = [
        target.path
        for target in targets
        if not target.is_layer or in_tower(target.path) or (adapter.oft_block_size and type(target.owner) is Conv1D)
    ]
    if others:
        linear = dict.fromkeys(target.name for target in targets if target.path not in others)
        raise user_error(
            where="adapter.kind, adapter.targets",
            found=f"{kind}, and {_ends(others)} among the targets",
            needed=f"linear layers of the language model: experts, towers and embeddings have no {additions} here"
            + (", nor have GPT-2's layers" if adapter.oft_block_size else ""),
            change=f"adapter.targets=[{','.join(linear)}], or adapter.kind=lora" if linear else "adapter.kind=lora",
        )
    if adapter.oft_block_size and (cut := [target for target in targets if target.shape[1] % adapter.oft_block_size]):
        common = math.gcd(*(target.shape[1] for target in targets))
        fitting = [size for size in range(2, min(common, 256) + 1) if common % size == 0]
        raise user_error(
            where="adapter.oft_block_size",
            found=f"{adapter.oft_block_size}, and {cut[0].path} has {cut[0].shape[1]:,} inputs",
            needed="a size that divides the inputs of all targets"
            + (f", such as {', '.join(map(str, fitting[-MOST_NAMES:]))}" if fitting else ""),
            change=f"adapter.oft_block_size={fitting[-1]}" if fitting else "name other adapter.targets",
        )


def _check_start(adapter: AdapterSpec, targets: Sequence[Target], anatomy: Anatomy) -> None:
    """Refuse additions that cannot begin as a part of a weight."""
    if adapter.init == "zero":
        return
    inside = {id(module) for block in anatomy.blocks for module in block.modules()}
    others = [target.path for target in targets if not target.is_layer or id(target.owner) not in inside]
    if others:
        linear = dict.fromkeys(target.name for target in targets if target.path not in others)
        raise user_error(
            where="adapter.init, adapter.targets",
            found=f"{adapter.init}, and {_ends(others)} among the targets",
            needed="linear layers of the blocks alone: other additions begin at zero",
            change=f"adapter.targets=[{','.join(linear)}], or adapter.init=zero" if linear else "adapter.init=zero",
        )
    small = min(targets, key=lambda target: min(target.shape) - adapter.rank_of(target.path))
    if adapter.rank_of(small.path) > min(small.shape):
        raise user_error(
            where="adapter.rank, adapter.init",
            found=f"rank {adapter.rank_of(small.path)}, and {small.path} is a matrix of {small.shape[0]:,} x "
            f"{small.shape[1]:,}",
            needed=f"a rank of at most {min(small.shape)}: it has no more singular values",
            change=f"adapter.rank={min(small.shape)}, a rank of its own in adapter.patterns, or adapter.init=zero",
        )


def _is_the_head(path: str) -> UserError:
    """The problem with an addition to an embedding that is the head as well: peft computes with it where tokens are
    looked up and without it in the head, but its merged model has it in both, or has another head than was trained."""
    return user_error(
        where="adapter.targets",
        found=f"{path}, and the model's head is the same matrix (tie_word_embeddings)",
        needed="an embedding of its own: an addition to one of the two uses of a matrix cannot be merged into it",
        change=f"adapter.also=[embeddings] trains both whole, as one; or adapter.targets without {_ends([path])}",
    )


def attach(target: Target, adapter: AdapterSpec, storage: torch.dtype, drawn: Drawn | None = None) -> None:
    """Let a matrix, on the meta device, have an addition. As in peft, that of an embedding has no dropout."""
    for name, shape in target.shapes(adapter).items():
        dtype = torch.float32 if name in (MAGNITUDE, ROTATIONS) else storage
        target.owner.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
    owner: Any = target.owner
    if adapter.magnitudes:
        norms = torch.empty(target.shape[0], device="meta")
        owner.register_parameter(NORMS, nn.Parameter(norms, requires_grad=False))
    setattr(owner, f"{target.prefix}lora_factor", adapter.factor_of(target.path))
    if adapter.oft_block_size:
        owner.forward = MethodType(_forward_rotated, owner)
        return
    if target.embeds:
        owner.forward = MethodType(_forward_embedding, owner)
        return
    if adapter.dropout and drawn is not None:
        owner.lora_dropout = LayerDropout(target.path, adapter.dropout, drawn)
    if adapter.magnitudes:
        owner.forward = MethodType(_forward_with_magnitudes, owner)
    elif not target.experts:
        owner.forward = MethodType(_forward_conv1d if type(owner) is Conv1D else forward_linear, owner)


def embedding_at(model: nn.Module, path: str) -> Target:
    """The embedding at a path of a model as a target."""
    module = model.get_submodule(path)
    assert isinstance(module, nn.Embedding)
    return Target(path, module, "", (module.embedding_dim, module.num_embeddings))


def _forward_embedding(module: Any, ids: Tensor) -> Tensor:
    """Forward pass of an embedding with an addition."""
    down, up = module.lora_embedding_A, module.lora_embedding_B
    return adapted_embedding(ids, module.weight, down, up, module.lora_factor, module.padding_idx)


def _forward_rotated(module: Any, inputs: Tensor) -> Tensor:
    """A layer whose inputs are rotated."""
    own = module._parameters
    return compute(module, rotated(inputs, own[ROTATIONS]), own.get("weight"), own.get("bias"))


def _forward_conv1d(module: Any, inputs: Tensor) -> Tensor:
    """GPT-2's layer, whose weight is the other way round."""
    return compute(module, inputs, module.weight.t(), module.bias, module.lora_A, module.lora_B)


def _forward_with_magnitudes(module: Any, inputs: Tensor) -> Tensor:
    """A layer whose rows have lengths of their own: of a weight either way round, or of a packed one."""
    own = module._parameters
    down, up, weight = own[DOWN], own[UP], own.get("weight")
    if type(module) is Conv1D:
        weight = weight.t()
    frozen: Tensor | PackedWeight | None = packed_weight(module, "weight") if weight is None else weight
    assert frozen is not None
    lengths = lengths_of(frozen, own[NORMS], down, up, module.lora_factor)
    return scaled(compute(module, inputs, weight, None, down, up), own[MAGNITUDE], lengths, own.get("bias"))


@torch.no_grad()
def fill_norms(target: Target, weight: Tensor, parameters: Mapping[str, Tensor], names: Collection[str]) -> None:
    """Fill this rank's parts of parameters that are lengths of the rows of a target's whole frozen ``weight``, as it
    is computed with: those of ``names``, which end in ``NORMS`` or ``MAGNITUDE``."""
    lengths = torch.linalg.vector_norm(weight.float(), dim=0 if target.lies_turned else 1)
    for name in names:
        if (parameter := parameters.get(f"{target.path}.{name}")) is not None:
            fill_local(parameter, lengths)


@torch.no_grad()
def initialise(parameters: Mapping[str, Tensor], seed: int) -> None:
    """Fill this rank's parts of all additions among ``parameters``: ``lora_A`` as a linear layer's weight begins
    (uniform, at most one over the root of its inputs), ``lora_B`` with zeros; an embedding's ``lora_embedding_B`` from
    a normal distribution, its ``lora_embedding_A`` with zeros; rotations with zeros, which turn nothing. All depend on
    ``seed`` and the name."""
    for name, parameter in parameters.items():
        if name.endswith((UP, EMBEDDING_DOWN, ROTATIONS)):
            region_of(parameter)[0].zero_()
        elif name.endswith((DOWN, EMBEDDING_UP)):
            generator = torch.Generator().manual_seed(seed_of(name, seed))
            whole = torch.empty(parameter.shape, dtype=torch.float32)
            if name.endswith(EMBEDDING_UP):
                whole.normal_(generator=generator)
            else:
                bound = 1 / math.sqrt(parameter.shape[-1])
                whole.uniform_(-bound, bound, generator=generator)
            fill_local(parameter, whole)


def is_addition(name: str) -> bool:
    """Whether a parameter is part of a low-rank addition, or of a rotation."""
    return name.endswith((DOWN, UP, EMBEDDING_DOWN, EMBEDDING_UP, MAGNITUDE, ROTATIONS))


def _matches(path: str, pattern: str) -> bool:
    """A name matches the end of a path, from a dot on; a pattern with wildcards the whole of it or such an end."""
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")
    return path == pattern or path.endswith(f".{pattern}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _ends(paths: Iterable[str]) -> str:
    """The last parts of paths, each once."""
    ends = list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    return ", ".join(ends[:MOST_NAMES]) + (f" and {len(ends) - MOST_NAMES} more" if len(ends) > MOST_NAMES else "")


def matches_nothing(where: str, patterns: Sequence[str], names: Iterable[str], kind: str) -> UserError:
    """The problem with patterns that match nothing of a model."""
    all_names = list(names)
    modules = [pattern for pattern in patterns if any(name.startswith(f"{pattern}.") for name in all_names)]
    change = f"mend {where}"
    if kind == "layers":
        change = f"{where}=all-linear takes every linear layer"
    elif modules:
        change = f"all that belongs to {modules[0]} is {modules[0]}.*"
    shown = ", ".join(all_names[:3] + ["..."] * (len(all_names) > 3)) if kind == "parameters" else _ends(all_names)
    return user_error(
        where=where,
        found=f"{', '.join(patterns)}: no {kind} of the model",
        needed=f"names of {kind}, or patterns of them; there are {shown}",
        change=change,
    )


def _cannot(pattern: str, unsuitable: Sequence[str], targets: Sequence[Target], why: str = "") -> UserError:
    return user_error(
        where="adapter.targets",
        found=f"{pattern}: {_ends(unsuitable)} cannot be adapted{why}",
        needed="linear layers of the blocks, experts or embeddings; there are "
        f"{_ends(target.path for target in targets)}",
        change=f"adapter.targets=[{','.join(dict.fromkeys(target.name for target in targets))}]"
        + (", or adapter.also=[head] to train the head whole" if "head" in _ends(unsuitable) else ""),
    )
