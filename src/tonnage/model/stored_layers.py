"""Weights that keep the form of a quantised checkpoint: which can, and what is read of them.

A parameter that is several stored tensors, such as a stack of experts, keeps a form if all of them have it and rows
are only put side by side: then transformers' own operations put rows of codes and scales together as those of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist

from tonnage.errors import user_error
from tonnage.kernels.quantized import PackedWeight
from tonnage.kernels.stored_forms import are_finite
from tonnage.model.packed_views import Packed

if TYPE_CHECKING:
    from tonnage.model.merging import Group, Match
    from tonnage.model.stored import StoredTensor


def forms_of(match: Match, shapes: Mapping[str, tuple[int, ...]]) -> tuple[tuple[str, str], ...]:
    """The parameters, of given ``shapes``, that can keep the form in which they are stored, and its name."""
    places = {name: stored.form.name for stored, name in match.places if isinstance(stored, Packed) and stored.can_stay}
    for group in match.groups:
        if (form := _form_of(group)) is not None:
            places |= dict.fromkeys(group.parameters.values(), form)
    return tuple(sorted((name, form) for name, form in places.items() if len(shapes.get(name, ())) in (2, 3)))


def _form_of(group: Group) -> str | None:
    forms = {stored.form if isinstance(stored, Packed) else None for stored, _ in group.sources}
    stacks, *others = group.converter.operations
    joins = isinstance(stacks, MergeModulelist) and stacks.dim == 0 and len(group.parameters) == 1
    joins = joins and all(isinstance(one, Concatenate) and one.dim == 1 for one in others)
    form = next(iter(forms))
    return form.name if joins and len(forms) == 1 and form is not None and form.group != 1 and not form.turned else None


def stored_values(match: Match, names: Mapping[str, str], model: PreTrainedModel) -> Iterator[tuple[str, PackedWeight]]:
    """Whole parameters as they are stored, of those ``names`` that have a form; ``model`` is that of the files, on the
    meta device.

    Raises:
        UserError: a scale or a number is not finite.
    """
    for stored, name in match.places:
        if name in names and isinstance(stored, Packed):
            yield name, _checked(stored, stored.whole())
    for group in match.groups:
        for name in group.parameters.values():
            if name in names:
                yield name, _joined(group, name, model)


def _joined(group: Group, name: str, model: PreTrainedModel) -> PackedWeight:
    codes: dict[StoredTensor, Tensor] = {}
    scales: dict[StoredTensor, Tensor] = {}
    form, columns = "", 0
    for stored, _ in group.sources:
        assert isinstance(stored, Packed)
        packed = _checked(stored, stored.whole())
        codes[stored], scales[stored] = packed.codes, packed.scales
        form, columns = packed.form, packed.shape[-1]
    parts = [group.converted(one, model)[name] for one in (codes, scales)]
    shape = (*parts[0].shape[:-1], columns)
    return PackedWeight(form, shape, parts[0].flatten(0, -2), parts[1].flatten(0, -2))


def _checked(stored: Packed, packed: PackedWeight) -> PackedWeight:
    if not are_finite(stored.form, packed.codes, packed.scales, packed.shape[-1]):
        raise user_error(
            where=f"{stored.file}: {stored.key}",
            found="numbers or scales that are not finite",
            needed="weights without NaN and infinity",
            change="use a whole copy of the model",
        )
    return packed
