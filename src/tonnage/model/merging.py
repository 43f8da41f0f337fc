"""Parameters that are stored as several tensors, and tensors that hold several parameters.

    experts.0.gate_proj ─┐
    experts.1.gate_proj ─┴─ stack ─┐
    experts.0.up_proj ───┐         ├─ concatenate ──► experts.gate_up_proj
    experts.1.up_proj ───┴─ stack ─┘

What belongs together, and by which operations, is transformers' own answer (``WeightConverter``), and its operations
convert: on shapes alone, which finds what is lost or of another shape before a weight is read, and then on the tensors
of one group at a time. Of a group that only stacks whole tensors, a rank reads those of its own rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    revert_weight_conversion,
)

from tonnage.errors import Problem
from tonnage.model.dtypes import DTYPES
from tonnage.model.names import MergedPart, Names, Whole
from tonnage.model.stored import StoredTensor, read

SHOWN = 5


@dataclass(frozen=True)
class Group:
    """Stored tensors that belong together, and the parameters that come of them."""

    target: str
    """The first of the parameters, by its name in the model of the files."""
    converter: WeightConverter
    sources: tuple[tuple[StoredTensor, MergedPart], ...]
    """In the order in which they are merged."""
    parameters: Mapping[str, str]
    """Parameters in the model of the files -> in the model that is trained."""

    def row_sources(self) -> list[list[StoredTensor]] | None:
        """The stored tensors of every row, where rows of the parameter are whole tensors side by side; else None."""
        first, *others = self.converter.operations
        is_stack = isinstance(first, MergeModulelist) and first.dim == 0 and len(self.converter.target_patterns) == 1
        if not is_stack or not all(map(_keeps_rows, others)):
            return None
        rows: dict[int, list[StoredTensor]] = {}
        for stored, slot in self.sources:
            if slot.number is None:
                return None
            rows.setdefault(slot.number, []).append(stored)
        return [rows[number] for number in sorted(rows)]

    def read(self, model: PreTrainedModel, rows: Sequence[Sequence[StoredTensor]] | None = None) -> dict[str, Tensor]:
        """The parameters, or some of their ``row_sources``, read from the files. ``model`` as for ``converted``."""
        sources = [stored for stored, _ in self.sources] if rows is None else [one for row in rows for one in row]
        return self.converted({stored: view[...] for stored, view in read(sources)}, model)

    def converted(self, tensors: dict[StoredTensor, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """The parameters that come of ``tensors``: all of the group's, or those of some rows; they are taken out.

        ``model`` is the model of the files, on the meta device; its shapes and its configuration are asked for.
        """
        converter = copy.deepcopy(self.converter)
        for stored, slot in self.sources:
            if stored in tensors:
                converter.add_tensor(self.target, stored.key, slot.pattern, tensors.pop(stored))  # type: ignore[arg-type]
        converted = converter.convert(self.target, model=model, config=model.config)
        return {
            self.parameters[name]: value[0] if isinstance(value, list) else value
            for name, value in converted.items()
            if name in self.parameters
        }


@dataclass(frozen=True)
class Match:
    """Which stored tensor goes where."""

    places: tuple[tuple[StoredTensor, str], ...]
    """Stored tensors, and the parameters that they are read into; in the order of the files."""
    groups: tuple[Group, ...] = ()
    """Stored tensors that are merged or split into parameters."""
    buffers: tuple[tuple[StoredTensor, str], ...] = ()
    """Stored values that a model keeps beside its parameters, with their names: they are loaded and never trained."""
    carried: tuple[StoredTensor, ...] = ()
    """What is not trained and belongs to the model nevertheless: an export takes it from the files."""
    whole: Whole | None = None
    """The model of the files, where only a part of it is trained."""
    unpacked: str | None = None
    """How the weights are packed that are not read as they are stored; None if there are none."""
    missing: tuple[str, ...] = ()
    """Parameters that the files lack and the user allowed them to; they are initialised."""
    left_out: tuple[str, ...] = ()
    """Keys that the model has no place for and the user allowed to be left out."""
    unwrapped: bool = False
    """Whether prefixes of wrappers were taken off."""
    zeroed: Mapping[str, range] = field(default_factory=dict)
    """Rows of parameters that are zero once they are loaded, whatever is stored (``zeroed``)."""

    @property
    def sources(self) -> list[StoredTensor]:
        """All stored tensors that parameters are made of."""
        merged = (stored for group in self.groups for stored, _ in group.sources)
        return [*(stored for stored, _ in self.places), *merged]


def _keeps_rows(operation: Any) -> bool:
    match operation:
        case Concatenate() | Interleave():
            return bool(operation.dim > 0)
        case Transpose():
            return bool(operation.dim0 > 0 and operation.dim1 > 0 and not operation.check_dims)
    return False


def gather(names: Names, stored: Sequence[StoredTensor]) -> list[Group]:
    """The groups among ``stored`` tensors, whole or not."""
    by_target: dict[str, list[tuple[StoredTensor, MergedPart]]] = {}
    for tensor in stored:
        if (part := names.merged(tensor.key)) is not None:
            target, slot = part
            by_target.setdefault(target, []).append((tensor, slot))
    groups = []
    for target, sources in by_target.items():
        sources.sort(key=lambda source: (source[1].pattern, source[1].number or 0))
        converter = names.converter(sources[0][1].pattern)
        others = (target.replace(converter.target_patterns[0], other, 1) for other in converter.target_patterns)
        own = {other: names.tied.get(names.own[other], names.own[other]) for other in others if other in names.own}
        groups.append(Group(target, converter, tuple(sources), own))
    return groups


def faults(groups: Sequence[Group], names: Names, model: PreTrainedModel, where: str) -> Iterator[Problem]:
    """What is wrong with groups: tensors that are lost, there twice, or of another shape than ``config.json`` says.

    ``model`` is the model of the files, on the meta device.
    """
    wrong = [group for group in groups if not _fits(group, names, model)]
    for group in wrong[:SHOWN]:
        yield from _explained(group, names, model, where)


def _fits(group: Group, names: Names, model: PreTrainedModel) -> bool:
    slots = [slot for _, slot in group.sources]
    patterns: dict[str, list[int | None]] = {}
    for slot in slots:
        patterns.setdefault(slot.pattern, []).append(slot.number)
    lists = [numbers for pattern, numbers in patterns.items() if "*" in pattern]
    if len(set(slots)) < len(slots) or any(numbers != list(range(len(lists[0]))) for numbers in lists):
        return False
    try:
        empty = {
            stored: torch.empty(stored.shape, dtype=DTYPES.get(stored.dtype, torch.float32), device="meta")
            for stored, _ in group.sources
        }
        converted = group.converted(empty, model)
    except Exception:  # whatever operations make of shapes that do not fit together
        return False
    return {name: tuple(value.shape) for name, value in converted.items()} == {
        name: names.shapes[name] for name in group.parameters.values()
    }


def _explained(group: Group, names: Names, model: PreTrainedModel, where: str) -> Iterator[Problem]:
    by_slot: dict[MergedPart, list[StoredTensor]] = {}
    for stored, slot in group.sources:
        by_slot.setdefault(slot, []).append(stored)
    parameter = next(iter(group.parameters.values()))
    expected = _wanted(group, names, model)
    lost = [key for slot, (key, _) in expected.items() if slot not in by_slot]
    problems = []
    if lost:
        observed = (
            f"{len(lost):,} of the {len(expected):,} tensors that make up {parameter} are not in the weight files"
        )
        change = "download the model again, or give complete weights"
        problems.append(Problem(f"{observed}: {some(lost)}", "all of them", change, where))
    for slot, several in by_slot.items():
        if len(several) > 1:
            problems.append(several_for(f"one part of {parameter}", several))
        if slot in expected and several[0].shape != expected[slot][1]:
            problems.append(of_another_shape(several[0], expected[slot][1]))
    if expected and (more := [several[0].key for slot, several in by_slot.items() if slot not in expected]):
        observed = f"{len(more):,} tensors more than the {len(expected):,} that make up {parameter}: {some(more)}"
        change = "use the config.json that belongs to these weights"
        problems.append(Problem(observed, "as many as config.json says", change, where))
    if not problems:
        keys = [stored.key for stored, _ in group.sources]
        observed = f"{len(keys):,} tensors that cannot be merged into {parameter}: {some(keys)}"
        needed = f"tensors that make up {names.shapes[parameter]}, as config.json says"
        problems.append(
            Problem(observed, needed, "give complete weights, and the config.json that belongs to them", where)
        )
    yield from problems[:SHOWN]


def _wanted(group: Group, names: Names, model: PreTrainedModel) -> dict[MergedPart, tuple[str, tuple[int, ...]]]:
    """The tensors that a group should have: slot -> key as transformers would write it, and shape."""
    whole = {name: model.get_parameter(name).detach() for name in group.parameters}
    try:
        written = revert_weight_conversion(model, whole)
    except Exception:  # of conversions that cannot be reverted, nothing is known
        return {}
    parts = {key: (names.merged(key), tuple(value.shape)) for key, value in written.items()}
    return {part[1]: (key, shape) for key, (part, shape) in parts.items() if part is not None}


def several_for(place: str, several: Sequence[StoredTensor]) -> Problem:
    """The problem with tensors of which a place takes one."""
    observed = f"{len(several)} tensors for {place}: {some([stored.key for stored in several])}"
    return Problem(observed, "one", "save the model again with transformers", several[0].file.name)


def of_another_shape(stored: StoredTensor, expected: tuple[int, ...]) -> Problem:
    """The problem with a tensor of another shape than the model's."""
    change = "use the config.json that belongs to these weights"
    where = f"{stored.file.name}: {stored.key}"
    return Problem(f"shape {stored.shape}", f"{expected}, as config.json says", change, where)


def some(keys: Sequence[str]) -> str:
    """The first of some keys, and how many more there are."""
    rest = len(keys) - SHOWN
    return ", ".join(keys[:SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")
