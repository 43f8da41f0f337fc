"""Which stored tensor goes where in a model, decided before a weight is read.

    keys of the files ──► wrappers' prefixes off ──► transformers' own renaming ──► parameters
                                                                                     │
              what is left over on either side is an error, unless it is known to mean nothing or the user names it

A run must not start from weights that nobody found, nor leave out weights that belong to the model. What transformers
itself leaves out on purpose is left out, and so are buffers that old versions saved and every version computes.
"""

from __future__ import annotations

import copy
import glob
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tonnage.errors import Problem, UserError
from tonnage.model.build import computed_buffers, on_meta
from tonnage.model.files import ModelFiles
from tonnage.model.names import Names
from tonnage.model.quantised import method_of, quantised
from tonnage.model.stored import Stored, read, read_headers

ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|base_layer|modules_to_save|ia3_l|oft_[A-Za-z]+|vera_[A-Za-z_]+)(\.|$)")
ANY = ("*",)
"""Patterns that match all names."""
SHOWN = 5
ROWS = 4096


@dataclass(frozen=True)
class Match:
    """Which stored tensor goes where."""

    places: tuple[tuple[Stored, str], ...]
    """Stored tensors, and the parameters that they are read into; in the order of the files."""
    missing: tuple[str, ...] = ()
    """Parameters that the files lack and the user allowed them to; they are initialised."""
    left_out: tuple[str, ...] = ()
    """Keys that the model has no place for and the user allowed to be left out."""
    unwrapped: bool = False
    """Whether prefixes of wrappers were taken off."""


@dataclass(frozen=True)
class Weights:
    """What is to be said of a model's weight files, and whoever reads them must know."""

    missing: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unwrapped: bool = False
    untied: bool = False
    """Whether the head is stored beside an embedding that it is said to be tied to, and is another one."""
    once_quantised: str | None = None
    """What the configuration says that the weights are quantised with, although they are not."""


def check_weights(
    files: ModelFiles,
    config: PreTrainedConfig,
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    converts: bool = False,
) -> Weights:
    """Check that ``files`` hold the weights of the model that ``config`` describes; headers alone are read.

    A head that is stored and differs from the embedding that it is said to be tied to is kept, as transformers keeps
    it: ``config`` is changed so that they are not tied. Both are read then, until they differ. ``allow_missing`` and
    ``allow_unexpected`` are patterns of parameters that may be missing and of keys that may be left out. With
    ``converts`` transformers itself will read them, which can merge and split tensors, and unpack quantised ones that
    the configuration describes: what needs that is not looked at further.

    Raises:
        UserError: the weights are quantised or an adapter's, tensors are missing or of another shape, the model has no
            place for some, or a file is damaged.
    """
    stored = read_headers(files.weights, files.index)
    where, method = str(files.directory), method_of(config)
    model = on_meta(copy.deepcopy(config), torch.float32)
    names = Names(model)
    if converts and any(names.converts(one.key) for one in stored):
        return Weights()
    try:
        found = match(model, stored, where, allow_missing, allow_unexpected)
    except _Quantised:
        if converts and method is not None:
            return Weights()
        raise
    untied = bool(names.tied) and _head_differs(found)
    if untied:
        config.tie_word_embeddings = False
        model = on_meta(copy.deepcopy(config), torch.float32)
        if Names(model).tied:
            raise UserError(
                Problem(
                    where=where,
                    found="a head that is another one than the embedding",
                    needed=f"one tensor: a {config.model_type} ties them",
                    change="save the model again with transformers",
                )
            )
        found = match(model, stored, where, allow_missing, allow_unexpected)
    if not converts:
        _check_buffers(model, stored, where)
    return Weights(found.missing, found.left_out, found.unwrapped, untied, method)


def find_places(
    model: PreTrainedModel, files: ModelFiles, allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = ()
) -> Match:
    """Where the parameters of ``model``, the whole of it, are in ``files``, which ``check_weights`` has looked at; its
    vocabulary may have grown since.

    Raises:
        UserError: as ``check_weights``.
    """
    stored = read_headers(files.weights, files.index)
    return match(model, stored, str(files.directory), allow_missing, allow_unexpected, grows=True)


class _Quantised(UserError):
    """The weights of a checkpoint are quantised."""


def match(
    model: PreTrainedModel,
    stored: Sequence[Stored],
    where: str,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    *,
    grows: bool = False,
) -> Match:
    """Decide which of the ``stored`` tensors goes where in ``model``, the whole of it, on the meta device.

    ``where`` is what errors name. ``grows``: the vocabulary of the model may have more rows than the stored one.

    Raises:
        UserError: as ``check_weights``.
    """
    names = Names(model)
    places, missing, unplaced = sort(names, stored)
    method = method_of(model.config)
    if problem := quantised(unplaced, places, lambda key: names.parameter(key) is not None, method, where):
        raise _Quantised(problem)
    if conversions := [one.key for one in unplaced if names.converts(one.key)]:
        raise UserError(_needs_conversion(model, conversions, where))
    if adapters := [one.key for one in unplaced if ADAPTER.search(one.key)]:
        raise UserError(
            Problem(
                where=where,
                found=f"{len(adapters):,} tensors of an adapter that is not merged, such as {adapters[0]}",
                needed="a model",
                change="merge it first (peft: model.merge_and_unload().save_pretrained(DIR))",
            )
        )
    if not places:
        raise UserError(_nothing_found(stored, len(missing), where))
    initialised = [name for name in missing if _matches(name, allow_missing) or names.may_be_missing(name)]
    left_out = [one.key for one in unplaced if _matches(one.key, allow_unexpected)]
    problems = [
        *_missing([name for name in missing if name not in initialised], names, model.config, where),
        *_unexpected([one.key for one in unplaced if one.key not in left_out], where),
        *_other_shapes(places, names, grows=grows),
        *_twice(places, names),
    ]
    if problems:
        raise UserError(*problems)
    wrapped = any(not names.knows(one.key) for one in places)
    return Match(tuple(places.items()), tuple(initialised), tuple(left_out), wrapped)


def sort(names: Names, stored: Sequence[Stored]) -> tuple[dict[Stored, str], list[str], list[Stored]]:
    """Stored tensors with the parameters that they are read into, parameters without one, and tensors without one that
    mean something."""
    places = {one: name for one in stored if (name := names.parameter(one.key)) is not None}
    missing = sorted(set(names.shapes) - set(places.values()))
    return places, missing, [one for one in stored if one not in places and not names.means_nothing(one)]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _needs_conversion(model: PreTrainedModel, keys: Sequence[str], where: str) -> Problem:
    return Problem(
        where=where,
        found=f"{len(keys):,} tensors of a {model.config.model_type} that must be merged or split on the way into the "
        f"model, such as {keys[0]}",
        needed="a checkpoint whose tensors are the model's own, one to one",
        change="choose a model of another family, such as a dense one",
    )


def _nothing_found(stored: Sequence[Stored], num_parameters: int, where: str) -> Problem:
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
    yield Problem(
        where=where,
        found=f"{len(lost):,} of the model's {len(names.shapes):,} parameters are not in the weight files: "
        f"{_some(lost)}",
        needed="every parameter",
        change=change,
    )


def _patterns(lost: Sequence[str], names: Names) -> list[str]:
    """Patterns that match the lost parameters and no others: of whole blocks, of one in every block, or a name."""
    gone, found = set(lost), []
    for name in lost:
        parts = name.split(".")
        number = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
        wider = []
        if number is not None:
            heads = (parts[:number], parts[: number + 1])
            wider = [*(".".join([*head, "*"]) for head in heads), ".".join([*heads[0], "*", *parts[number + 1 :]])]
        fitting = (one for one in wider if all(of in gone for of in names.shapes if fnmatchcase(of, one)))
        found.append(next(fitting, name))
    return list(dict.fromkeys(found))


def _unexpected(keys: Sequence[str], where: str) -> Iterator[Problem]:
    if keys:
        patterns = dict.fromkeys(_beginning(key) for key in keys)
        yield Problem(
            where=where,
            found=f"{len(keys):,} tensors that the model has no place for: {_some(keys)}",
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
    """As an item of a list in a config: keys of strangers may hold what means something else to YAML."""
    return pattern if re.fullmatch(r"[A-Za-z_][\w.*-]*", pattern) else json.dumps(pattern)


def _other_shapes(places: Mapping[Stored, str], names: Names, *, grows: bool) -> Iterator[Problem]:
    wrong = []
    for one, name in places.items():
        wanted = names.shapes[name]
        has_grown = grows and name in names.vocabulary and one.shape[1:] == wanted[1:] and one.shape[:1] < wanted[:1]
        if one.shape != wanted and not (has_grown and len(one.shape) == len(wanted)):
            wrong.append(
                Problem(
                    where=f"{one.file.name}: {one.key}",
                    found=f"shape {one.shape}",
                    needed=f"{wanted}, as config.json says",
                    change="use the config.json that belongs to these weights",
                )
            )
    yield from wrong[:SHOWN]


def _twice(places: Mapping[Stored, str], names: Names) -> Iterator[Problem]:
    by_name: dict[str, list[Stored]] = {}
    for one in places:
        by_name.setdefault(str(names.name(one.key)), []).append(one)
    for name, several in by_name.items():
        if len(several) > 1:
            yield Problem(
                where=several[0].file.name,
                found=f"{len(several)} tensors for {name}: {_some([one.key for one in several])}",
                needed="one",
                change="save the model again with transformers",
            )


def _some(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")


def _head_differs(found: Match) -> bool:
    """Whether two stored tensors of one tied parameter are not the same."""
    by_name: dict[str, list[Stored]] = {}
    for one, name in found.places:
        by_name.setdefault(name, []).append(one)
    return any(not _equal(first, other) for first, *others in by_name.values() for other in others)


def _equal(first: Stored, other: Stored) -> bool:
    for start in range(0, first.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        (_, a), (_, b) = next(read([first])), next(read([other]))
        if not torch.equal(a[rows].float(), b[rows].float()):
            return False
    return True


def _check_buffers(model: PreTrainedModel, stored: Sequence[Stored], where: str) -> None:
    """Refuse files that hold something else for a buffer than what is computed: it would be lost.

    Buffers that transformers saves too are looked at; what it only computes may have been saved by old versions.
    """
    names = Names(model)
    kept = {one: name for one in stored if (name := names.buffer(one.key)) in names.saved_buffers}
    computed = computed_buffers(model, set(kept.values())) if kept else {}
    other = []
    for one, view in read(list(kept)):
        value = computed[kept[one]]
        if one.shape != tuple(value.shape) or not torch.equal(value.to((held := view[...]).dtype), held):
            other.append(one.key)
    if other:
        raise UserError(
            Problem(
                where=where,
                found=f"{len(other):,} trained values that a {model.config.model_type} keeps beside its parameters: "
                f"{_some(other)}",
                needed="a model whose values are all parameters, as only these are trained and exported",
                change="choose a model of another family",
            )
        )
