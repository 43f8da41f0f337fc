"""Adapters as peft stores them: a directory with ``adapter_config.json`` and ``adapter_model.safetensors``.

    ours                                      peft's, in the file
    PATH.lora_A (rank, in)                    base_model.model.PATH.lora_A.weight
    PATH.experts.down_proj_lora_A (e, r, in)  base_model.model.PATH.experts.lora_A.weight (e r, in)
    PATH.experts.down_proj_lora_B (e, out, r) base_model.model.PATH.experts.lora_B.weight (out, r e)
    PATH.lora_embedding_A (vocabulary, rank)  base_model.model.PATH.lora_embedding_A (rank, vocabulary)
    PATH.lora_magnitude (out)                 base_model.model.PATH.lora_magnitude_vector
    PATH.oft_R (blocks, numbers)              base_model.model.PATH.oft_R.weight
    PATH.weight, trained whole                base_model.model.PATH.weight

Of two stacks of experts that are both adapted, peft wraps the first into the second, and calls it ``base_layer``.
Beside the addition to an embedding it keeps the embedding itself, ``base_model.model.PATH.base_layer.weight``, which
must be the model's; none is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from tonnage.errors import UserError, user_error
from tonnage.kernels.regions import fill_local, region_of
from tonnage.model.adapter_files import CONFIG, WEIGHTS, AdapterFiles, factor_of
from tonnage.model.adapters import (
    DOWN,
    MAGNITUDE,
    AdapterSpec,
    Ranked,
    Target,
    adaptable,
    find_targets,
    is_addition,
    not_adapted,
    whole_of,
)
from tonnage.model.anatomy import Anatomy, dissect
from tonnage.model.names import tied_names
from tonnage.model.stored import StoredTensor, read, same_numbers

PREFIX = "base_model.model."


def peft_names(targets: Sequence[Target], whole: Iterable[str], adapter: AdapterSpec) -> dict[str, str]:
    """Our names of what is trained -> the names in peft's file. ``whole`` are names of parameters that are trained
    whole; of the ``adapter`` its kind counts."""
    names = {name: f"{PREFIX}{name}" for name in whole}
    wrapped = {target.path.rpartition(".")[0] for target in targets if target.experts}
    outer = {path: [one for one in targets if one.path.rpartition(".")[0] == path][-1] for path in wrapped}
    for target in targets:
        place = target.path
        if target.experts:
            owner = target.path.rpartition(".")[0]
            place = owner if outer[owner] is target else f"{owner}.base_layer"
        for name in target.named_shapes(adapter):
            last = name[-len(DOWN) :] if target.experts else name.rpartition(".")[2]
            in_file = f"{last}_vector" if last == MAGNITUDE else last if target.embeds else f"{last}.weight"
            names[name] = f"{PREFIX}{place}.{in_file}"
    return names


def to_peft(name: str, value: Tensor) -> Tensor:
    """Our tensor as peft stores it: in two dimensions, experts' matrices side by side."""
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


def spec_of(files: AdapterFiles) -> AdapterSpec:
    """An adapter's kind, and what its layers have that are like the rest."""
    return AdapterSpec(files.rank, files.factor, magnitudes=files.magnitudes, oft_block_size=files.oft_block_size)


def adapter_in(files: AdapterFiles, model: nn.Module, anatomy: Anatomy) -> AdapterSpec:
    """What is adapted in ``model``, by the names in the adapter's file, and what is trained whole beside it.

    Raises:
        UserError: the file has tensors that the model has no place for, or of another shape: another model's.
    """
    keys = {target.key: target for target in files.stored}
    eligible = list(adaptable(model, anatomy))
    adapted = [target for target in eligible if not target.experts or target.path.endswith(files.experts)]
    for target in adapted:
        if target.embeds and (stored := keys.pop(_kept_beside(target), None)) is not None:
            size = (target.shape[1], target.shape[0])
            if stored.shape != size:
                raise _another_model(files, f"{stored.key} of shape {stored.shape}, not {size}")
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    plain = spec_of(files)
    names = peft_names(adapted, parameters, plain)
    ours = {theirs: name for name, theirs in names.items()}
    unknown = [key for key in keys if key not in ours]
    if unknown:
        raise _another_model(files, f"{len(unknown):,} tensors that the model has no place for, such as {unknown[0]}")
    _check_tied(files, model, {ours[key]: stored for key, stored in keys.items()})
    own = {ours[key] for key in keys}
    targets = [target for target in adapted if own.issuperset(target.named_shapes(plain))]
    half = own - {name for target in targets for name in target.named_shapes(plain)}
    spec = replace(plain, patterns=_patterns(files, targets))
    shapes = {name: shape for target in targets for name, shape in target.named_shapes(spec).items()}
    for name, shape in shapes.items():
        stored = keys[names[name]]
        expected = tuple(to_peft(name, torch.empty(shape, device="meta")).shape)
        if stored.shape != expected:
            raise _another_model(files, f"{stored.key} of shape {stored.shape}, not {expected}")
    also = whole_of(model, anatomy, half)
    if also is None or not targets:
        raise _another_model(files, f"weights trained whole beside it: {', '.join(sorted(half)[:3])}")
    excluded = not_adapted(model)
    chosen = short_names(targets, [target for target in eligible if target.experts or target.name not in excluded])
    find_targets(model, anatomy, chosen, strict=False)  # refuses what cannot be adapted
    return replace(spec, targets=chosen, also=tuple(also))


def _patterns(files: AdapterFiles, targets: Sequence[Target]) -> tuple[Ranked, ...]:
    """The layers among ``targets`` whose rank or alpha is another than the adapter's: by the last parts of their names
    where all of that name are alike, else each by itself."""
    sizes = {target.path: (files.rank_of(target.path), files.alpha_of(target.path)) for target in targets}
    by_end: dict[str, set[tuple[int, float]]] = {}
    for target in targets:
        by_end.setdefault(target.name, set()).add(sizes[target.path])
    by_match = dict[str, Ranked]()
    for target in targets:
        rank, alpha = sizes[target.path]
        if (rank, alpha) != (files.rank, files.alpha):
            match = target.name if len(by_end[target.name]) == 1 else target.path
            factor = factor_of(rank, alpha, rank_stabilised=files.rank_stabilised)
            by_match[match] = Ranked(match, rank, alpha, factor)
    return tuple(by_match.values())


def _kept_beside(target: Target) -> str:
    """Where peft's file has an embedding itself, beside its addition."""
    return f"{PREFIX}{target.path}.base_layer.weight"


def short_names(targets: Sequence[Target], eligible: Sequence[Target]) -> str | tuple[str, ...]:
    """The shortest way in which a config can name ``targets`` among the ``eligible``; embeddings last."""
    if embeddings := [target for target in targets if target.embeds]:
        plain = [target for target in targets if not target.embeds]
        others = short_names(plain, [target for target in eligible if not target.embeds]) if plain else ()
        ends = tuple(dict.fromkeys(target.name for target in embeddings))
        return (*((others,) if isinstance(others, str) else others), *ends)
    eligible = [target for target in eligible if not target.embeds]
    if {target.path for target in targets} == {target.path for target in eligible}:
        return "all-linear"
    ends = tuple(dict.fromkeys(target.name for target in targets))
    same = [target for target in eligible if target.name in ends]
    return ends if len(same) == len(targets) else tuple(target.path for target in targets)


def fill(
    parameters: Mapping[str, Tensor], targets: Sequence[Target], files: AdapterFiles, trained: Sequence[str]
) -> None:
    """Read this rank's parts of what is ``trained`` from an adapter's file into ``parameters``, by their names here.

    Raises:
        UserError: the file's embedding is not the model's.
    """
    whole = [name for name in trained if name in parameters and not is_addition(name)]
    names = {theirs: name for name, theirs in peft_names(targets, whole, spec_of(files)).items()}
    beside = {_kept_beside(stored): stored.weight for stored in targets if stored.embeds}
    with torch.no_grad():
        for stored, view in read(files.stored):
            if beside.get(stored.key) in parameters:
                _check_same(files, stored.key, view[...], parameters[beside[stored.key]])
            name = names.get(stored.key, "")
            if name not in parameters:
                continue  # in another stage, or a head that is the embedding
            fill_local(parameters[name], from_peft(name, view[...], parameters[name].shape))


def _check_same(files: AdapterFiles, key: str, stored: Tensor, weight: Tensor) -> None:
    """Refuse an embedding in an adapter's file that is not the model's."""
    local, region = region_of(weight.data)
    if local.numel() and not torch.equal(stored[region].to(local.device, local.dtype), local):
        raise _another_model(files, f"{key}, an embedding with other weights than the model's")


def _another_model(files: AdapterFiles, observed: str) -> UserError:
    return user_error(
        where=str(files.directory / WEIGHTS),
        found=observed,
        needed=f"an adapter of {files.base}, which its {CONFIG} names, and of layers that are adapted here",
        change="use the model that the adapter was trained for (or mend base_model_name_or_path); or merge it with "
        "peft (merge_and_unload), and use what comes out as the model",
    )


def _check_tied(files: AdapterFiles, model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Refuse an embedding and a head that are one in the model and two in the adapter, as peft makes them where it is
    not asked to ``ensure_weight_tying``. ``stored`` are the adapter's tensors by their names in the model."""
    for name, first in tied_names(model).items():
        of_both = [stored[one] for one in (name, first) if one in stored]
        if not of_both or (len(of_both) == 1 and files.ties) or (len(of_both) == 2 and same_numbers(*of_both)):
            continue
        raise user_error(
            where=str(files.directory / WEIGHTS),
            found=f"{' and '.join(tensor.key for tensor in of_both)}, trained apart, of a model in which "
            f"{first} and {name} are one",
            needed="one tensor for both, as peft trains them with ensure_weight_tying=True",
            change="merge it with peft (merge_and_unload), set config.tie_word_embeddings = False of what comes out, "
            "save it, and use that as the model",
        )


def merge(model: nn.Module, files: AdapterFiles) -> None:
    """Add an adapter's additions to the weights of a whole ``model`` on one device, each in fp32 and rounded once;
    parameters that were trained whole replace the model's.

    Raises:
        UserError: it is another model's.
    """
    anatomy = dissect(model)  # type: ignore[arg-type]
    adapter = adapter_in(files, model, anatomy)
    targets = find_targets(model, anatomy, adapter.targets, strict=False)
    views = {stored.key: view for stored, view in read(files.stored)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = peft_names(targets, parameters, adapter)
    with torch.no_grad():
        for target in targets:
            shapes = target.named_shapes(adapter)
            values = [from_peft(name, views[names[name]][...], shape) for name, shape in shapes.items()]
            weight = parameters[target.weight]
            if target.embeds and (beside := views.get(_kept_beside(target))) is not None:
                _check_same(files, _kept_beside(target), beside[...], weight)
            weight.copy_(target.merged(weight, adapter, values))
        for name, parameter in parameters.items():
            if (view := views.get(f"{PREFIX}{name}")) is not None:
                parameter.copy_(view[...])
