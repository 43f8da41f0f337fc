"""Which stored tensor goes where in a model, decided before a weight is read.

    keys of the files ──► wrappers' prefixes off ──► transformers' own renaming ──► parameters, or groups of tensors
                                                                                     │       that make up some
              what is left over on either side is an error, unless it is known to mean nothing or the user names it

A run must not start from weights that nobody found, nor leave out weights that belong to the model. What transformers
itself leaves out on purpose is left out, and so are buffers that old versions saved and every version computes.
"""

from __future__ import annotations

import copy
import glob
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tonnage.errors import Problem, UserError, user_error
from tonnage.model.build import on_meta
from tonnage.model.files import ModelFiles, read_whole_config
from tonnage.model.merging import Group, Match, faults, gather, of_another_shape, several_for, some
from tonnage.model.names import Names, Whole
from tonnage.model.packed import packing, unpack
from tonnage.model.quantised import method_of, quantised
from tonnage.model.scorer import HEAD, as_causal, is_scorer
from tonnage.model.stored import StoredTensor, read_headers, same_numbers
from tonnage.model.stored_layers import forms_of
from tonnage.model.towers import described, digest, find_whole
from tonnage.model.zeroed import zeroed_rows
from tonnage.rundir.weights import WeightFacts

ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|base_layer|modules_to_save|ia3_l|oft_[A-Za-z]+|vera_[A-Za-z_]+)(\.|$)")
ANY = ("*",)
"""Patterns that match all names."""
SHOWN = 5


def check_weights(
    files: ModelFiles,
    config: PreTrainedConfig,
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    unpacks: bool = False,
    identifies: bool = False,
) -> WeightFacts:
    """Check that ``files`` hold the weights of the model that ``config`` describes; headers alone are read.

    A head that is stored and differs from the embedding that it is said to be tied to is kept, as transformers keeps
    it: ``config`` is changed so that they are not tied. Both are read then, until they differ. ``allow_missing`` and
    ``allow_unexpected`` are patterns of parameters that may be missing and of keys that may be left out. With
    ``unpacks`` transformers itself will read them, which can unpack quantised ones that the configuration describes:
    those are not looked at further. ``identifies``: the ends of every tensor are read too, for ``base_digest``.

    Raises:
        UserError: the weights are quantised or an adapter's, tensors are missing or of another shape, the model has no
            place for some, or a file is damaged.
    """
    stored = read_headers(files.weights, files.index)
    where, method = str(files.directory), method_of(config)
    model = on_meta(copy.deepcopy(config), torch.float32)
    described_whole = read_whole_config(files, trust_remote_code=hasattr(config, "auto_map"))
    whole = find_whole(model, described_whole)
    grows = files.adapter is not None  # which may bring a larger embedding along
    try:
        matched = match(model, stored, where, allow_missing, allow_unexpected, grows=grows, whole=whole)
    except _Quantised:
        if unpacks and method is not None:
            return WeightFacts()
        raise
    untied = bool(Names(model).tied) and _head_differs(matched)
    if untied:
        config.tie_word_embeddings = False
        model = on_meta(copy.deepcopy(config), torch.float32)
        if Names(model).tied:
            raise user_error(
                where=where,
                found="a head that is another one than the embedding",
                needed=f"one tensor: a {config.model_type} ties them",
                change="save the model again with transformers",
            )
        whole = find_whole(model, described_whole)
        matched = match(model, stored, where, allow_missing, allow_unexpected, grows=grows, whole=whole)
    return WeightFacts(
        missing=matched.missing,
        left_out=matched.left_out,
        scores=is_scorer(config),
        unwrapped=matched.unwrapped,
        untied=untied,
        once_quantised=method if matched.unpacked is None else None,
        unpacked=matched.unpacked,
        stored=forms_of(matched, {name: tuple(one.shape) for name, one in model.named_parameters()}),
        carried=described(matched.carried, Names(model, whole)),
        carried_digest=digest(matched.carried) if matched.carried else "",
        base_digest=digest(matched.sources) if identifies else "",
        base_stamp=_stamp(files.weights) if identifies else "",
    )


def _stamp(files: Iterable[Path]) -> str:
    entries = sorted((file.name, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()])
    return hashlib.sha256(repr(entries).encode()).hexdigest()[:32]


def find_places(
    model: PreTrainedModel, files: ModelFiles, allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = ()
) -> Match:
    """Where the parameters of the whole ``model`` are in ``files``, which ``check_weights`` has checked; its vocabulary
    may have grown since.

    Raises:
        UserError: as ``check_weights``.
    """
    stored = read_headers(files.weights, files.index)
    whole = find_whole(model, read_whole_config(files, trust_remote_code=hasattr(model.config, "auto_map")))
    return match(model, stored, str(files.directory), allow_missing, allow_unexpected, grows=True, whole=whole)


def keeps_buffers(model: PreTrainedModel) -> bool:
    """Whether a model's files may hold values beside its parameters."""
    return bool(Names(model).saved_buffers)


class _Quantised(UserError):
    """The weights of a checkpoint are quantised."""


def match(
    model: PreTrainedModel,
    stored: Sequence[StoredTensor],
    where: str,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    *,
    grows: bool = False,
    whole: Whole | None = None,
) -> Match:
    """Decide which of the ``stored`` tensors goes where in ``model``, the whole of it, on the meta device.

    ``where`` is what errors name. ``grows``: the vocabulary of the model may have more rows than the stored one.
    ``whole`` is the model of the files, where ``model`` is a part of it.

    Raises:
        UserError: as ``check_weights``.
    """
    stored, names = unpack(stored, model.config), Names(model, whole)
    sorted_out = sort(names, stored)
    places, groups, missing, unplaced = sorted_out.places, sorted_out.groups, sorted_out.missing, sorted_out.unplaced
    method, placed = method_of(model.config), [*places, *(tensor for group in groups for tensor, _ in group.sources)]
    if problem := quantised(unplaced, placed, names.has_place, method, where):
        raise _Quantised(problem)
    if adapters := [tensor.key for tensor in unplaced if ADAPTER.search(tensor.key)]:
        raise user_error(
            where=where,
            found=f"{len(adapters):,} tensors of an adapter that is not merged, such as {adapters[0]}",
            needed="a model",
            change="merge it first (peft: model.merge_and_unload().save_pretrained(DIR))",
        )
    if not placed:
        raise UserError(_nothing_found(stored, len(missing), where))
    buffers = {tensor: name for tensor in stored if (name := names.buffer(tensor.key)) in names.saved_buffers}
    if is_scorer(model.config):
        allow_missing = (*allow_missing, f"{HEAD}.*")
        allow_unexpected = (*allow_unexpected, *map(glob.escape, _of_logits(model.config, unplaced)))
    initialised = [name for name in missing if matches(name, allow_missing) or names.may_be_missing(name)]
    left_out = [tensor.key for tensor in unplaced if matches(tensor.key, allow_unexpected)]
    problems = [
        *_missing([name for name in missing if name not in initialised], names, model.config, where),
        *unexpected([tensor.key for tensor in unplaced if tensor.key not in left_out], where),
        *_other_shapes(places, names.shapes, names.vocabulary if grows else ()),
        *_other_shapes(buffers, {name: tuple(model.get_buffer(name).shape) for name in buffers.values()}),
        *faults(groups, names, whole.model if whole is not None else model, where),
        *_twice(places, groups, names),
    ]
    if problems:
        raise UserError(*problems)
    wrapped = any(not names.knows(tensor.key) for tensor in places)
    return Match(
        places=tuple(places.items()),
        groups=tuple(groups),
        buffers=tuple(buffers.items()),
        carried=(*buffers, *sorted_out.carried),
        whole=whole,
        unpacked=packing(placed),
        missing=tuple(initialised),
        left_out=tuple(left_out),
        unwrapped=wrapped,
        zeroed=zeroed_rows(model),
    )


def _of_logits(config: PreTrainedConfig, unplaced: Sequence[StoredTensor]) -> list[str]:
    """Keys of those tensors without a place in a scorer that are the head of its family's model of logits."""
    if not unplaced:
        return []
    model = on_meta(as_causal(config), torch.float32)
    head, names = model.get_output_embeddings(), Names(model)
    values = {id(value) for value in head.parameters()} if head is not None else set()
    own = {name for name, value in model.named_parameters(remove_duplicate=False) if id(value) in values}
    return [tensor.key for tensor in unplaced if names.name(tensor.key) in own]


@dataclass(frozen=True)
class Sorted:
    """Stored tensors, sorted by their places in a model."""

    places: dict[StoredTensor, str]
    """Each with the parameter that it is read into."""
    groups: list[Group]
    """Those that are merged or split, whole or not."""
    missing: list[str]
    """Parameters that nothing is stored for."""
    unplaced: list[StoredTensor]
    """Those without a place that mean something."""
    carried: list[StoredTensor]
    """Those of other parts of the whole model, and those that transformers leaves out on purpose."""


def sort(names: Names, stored: Sequence[StoredTensor]) -> Sorted:
    """Where the ``stored`` tensors belong; whether they fit there is another question."""
    names.see(tensor.key for tensor in stored)
    places = {tensor: name for tensor in stored if (name := names.parameter(tensor.key)) is not None}
    groups = gather(names, [tensor for tensor in stored if tensor not in places])
    of_groups = {tensor for group in groups for tensor, _ in group.sources}
    filled = {*places.values(), *(name for group in groups for name in group.parameters.values())}
    rest = [tensor for tensor in stored if tensor not in places and tensor not in of_groups]
    meaning = [tensor for tensor in rest if not names.is_computed(tensor)]
    carried = {
        tensor: None for tensor in meaning if names.elsewhere(tensor.key) is not None or names.is_left_out(tensor.key)
    }
    unplaced = [tensor for tensor in meaning if tensor not in carried]
    return Sorted(places, groups, sorted(set(names.shapes) - filled), unplaced, list(carried))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one that patterns allow."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _nothing_found(stored: Sequence[StoredTensor], num_parameters: int, where: str) -> Problem:
    held = f"{len(stored):,} tensors, such as {stored[0].key}, and none" if stored else "no tensor"
    return Problem(
        where=where,
        found=f"weight files with {held} of the model's {num_parameters:,} parameters",
        needed="the weights of the model that config.json describes",
        change="put config.json and weights of one model together, or write init: random to train from scratch",
    )


def _missing(lost: Sequence[str], names: Names, config: PreTrainedConfig, where: str) -> Iterator[Problem]:
    if not lost:
        return
    patterns = ", ".join(_patterns(lost, names))
    change = f"give complete weights, or, to have them initialised, allow_missing: [{patterns}]"
    if set(lost) < names.vocabulary and getattr(config, "tie_word_embeddings", None) is False:
        change += '; if the head is the embedding, write "tie_word_embeddings": true into config.json'
    yield from missing_from_files(lost, len(names.shapes), where, change)


def missing_from_files(
    lost: Sequence[str], number: int, where: str, change: str = "give complete weights"
) -> Iterator[Problem]:
    """What is said of ``lost`` parameters, of the ``number`` that a model has."""
    if lost:
        yield Problem(
            where=where,
            found=f"{len(lost):,} of the model's {number:,} parameters are not in the weight files: {some(lost)}",
            needed="every parameter",
            change=change,
        )


def _patterns(lost: Sequence[str], names: Names) -> list[str]:
    """Patterns that match the lost parameters and no others: of whole blocks, of one in every block, or a name."""
    gone, patterns = set(lost), []
    for name in lost:
        parts = name.split(".")
        number = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
        wider = []
        if number is not None:
            heads = (parts[:number], parts[: number + 1])
            wider = [*(".".join([*head, "*"]) for head in heads), ".".join([*heads[0], "*", *parts[number + 1 :]])]
        fitting = (one for one in wider if all(of in gone for of in names.shapes if fnmatchcase(of, one)))
        patterns.append(next(fitting, name))
    return list(dict.fromkeys(patterns))


def unexpected(keys: Sequence[str], where: str) -> Iterator[Problem]:
    """What is said of tensors that a model has no place for."""
    if keys:
        patterns = dict.fromkeys(_beginning(key) for key in keys)
        yield Problem(
            where=where,
            found=f"{len(keys):,} tensors that the model has no place for: {some(keys)}",
            needed="the weights of the model that config.json describes, and nothing else",
            change=f"put the right config.json beside them, or, to go on without them, "
            f"allow_unexpected: [{', '.join(map(_written, patterns))}]",
        )


def _beginning(key: str) -> str:
    """A pattern of a key and of others like it: up to a block's number, or its first part."""
    parts = glob.escape(key).split(".")
    number = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    if len(parts) == 1:
        return parts[0]
    return ".".join([*(parts[:-1] if number is None else parts[: number + 1]), "*"])


def _written(pattern: str) -> str:
    """A pattern in a list of a config: in quotes where YAML might take a stranger's key for something else."""
    return pattern if re.fullmatch(r"[A-Za-z_][\w.*-]*", pattern) else json.dumps(pattern)


def _other_shapes(
    places: Mapping[StoredTensor, str], shapes: Mapping[str, tuple[int, ...]], growing: Collection[str] = ()
) -> Iterator[Problem]:
    wrong = []
    for stored, name in places.items():
        expected = shapes[name]
        has_grown = name in growing and stored.shape[1:] == expected[1:] and stored.shape[:1] < expected[:1]
        if stored.shape != expected and not (has_grown and len(stored.shape) == len(expected)):
            wrong.append(of_another_shape(stored, expected))
    yield from wrong[:SHOWN]


def _twice(places: Mapping[StoredTensor, str], groups: Sequence[Group], names: Names) -> Iterator[Problem]:
    by_name: dict[str, list[StoredTensor]] = {}
    for stored in places:
        by_name.setdefault(str(names.name(stored.key)), []).append(stored)
    for group in groups:
        for name in group.parameters.values():
            by_name.setdefault(name, []).append(group.sources[0][0])
    for name, several in by_name.items():
        if len(several) > 1:
            yield several_for(name, several)


def _head_differs(matched: Match) -> bool:
    """Whether two stored tensors of one tied parameter are not the same."""
    by_name: dict[str, list[StoredTensor]] = {}
    for stored, name in matched.places:
        by_name.setdefault(name, []).append(stored)
    return any(not same_numbers(first, other) for first, *others in by_name.values() for other in others)
