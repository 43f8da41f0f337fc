"""Names of tensors in weight files, and what a model calls them.

transformers renames many of the keys that published checkpoints have; its own functions are asked for each. What
wrappers of a model leave in a key is taken off where it fits nothing as it stands.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from tonnage.model.stored import StoredTensor

WRAPPERS = re.compile(
    r"(?:(?<=\.)|^)(?:_orig_mod|module|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""What torch.compile, DDP, DeepSpeed, Lightning, FSDP and recompute put into the names of what they wrap."""
ADAPTED = "base_model.model."
"""What peft puts before the names of a model."""
COMPUTED = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|cos_cached|sin_cached|position_ids|masked_bias|causal_mask|attn_mask)$"
)
"""Buffers that versions of transformers saved at some time, and that are computed."""
CAUSAL_MASK = re.compile(r"(^|\.)(attn|attention|self_attn|self_attention)\.bias$")


@dataclass(frozen=True)
class MergedPart:
    """The part of a stored tensor among those that it is merged with; no two of them have the same."""

    pattern: str
    """Of the converter: what the tensor is there, such as the ``gate_proj`` of an expert."""
    number: int | None = None
    """Which one of a list it is, such as the number of the expert; None where there is no list."""


@dataclass(frozen=True)
class Whole:
    """The model that files describe, where only a part of it is trained: on the meta device."""

    model: PreTrainedModel
    own: Mapping[str, str]
    """Name of a parameter or buffer of the whole -> its name in the part that is trained, for those that are in it."""


class Names:
    """transformers' own mapping from the keys of a checkpoint to the names of a model's parameters.

    ``whole`` is the model whose checkpoint it is where ``model`` is only a part of it, such as the one of text.
    """

    def __init__(self, model: PreTrainedModel, whole: Whole | None = None) -> None:
        of_files = whole.model if whole is not None else model
        transforms = get_model_conversion_mapping(of_files)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._prefix = of_files.base_model_prefix
        self._meta: dict[str, Any] = of_files.state_dict()
        self.buffers = frozenset(name for name, _ in model.named_buffers())
        everything = (*self._meta, *self.buffers)
        self.own: Mapping[str, str] = whole.own if whole is not None else {name: name for name in everything}
        """Name in the model of the files -> in the model that is trained."""
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        """Of every parameter; of tied ones under the first name."""
        self.tied = tied_names(model)
        """Other names under which a checkpoint may hold a tied parameter -> the first."""
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        vocabulary = {id(value) for end in ends if end is not None for value in end.parameters(recurse=False)}
        self.vocabulary = {name for name, value in model.named_parameters() if id(value) in vocabulary}
        """Parameters that have a row for each token."""
        self.saved_buffers = self.buffers & set(model.state_dict())
        """Buffers that transformers saves with a model, so that their values may be trained ones."""
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ())]
        ignored += of_files._keys_to_ignore_on_load_unexpected or ()
        self._unexpected = _pattern(ignored)
        self._missing = _pattern(model._keys_to_ignore_on_load_missing)
        self._found: dict[str, tuple[str | None, str | None]] = {}

    def see(self, keys: Iterable[str]) -> None:
        """Look at all keys of a checkpoint in transformers' order, which some of its renamings depend on."""
        for key in sorted(keys, key=dot_natural_key):
            self._place(key)

    def parameter(self, key: str) -> str | None:
        """The parameter that a key of a checkpoint is read into; None if there is none, or other keys with it."""
        name = self.name(key)
        return name if name is None else self.tied.get(name, name)

    def name(self, key: str) -> str | None:
        """The name in the model of what a key of a checkpoint is read into, which may be one of several of a tied
        parameter; None if there is none."""
        name, pattern = self._place(key)
        return self.own.get(name) if name is not None and pattern is None else None

    def merged(self, key: str) -> tuple[str, MergedPart] | None:
        """The first parameter, in the words of the model of the files, that a key is merged or split into, and its part
        in that; None if it is nothing of the kind."""
        name, pattern = self._place(key)
        return None if name is None or pattern is None else (name, MergedPart(pattern, self._number(key, pattern)))

    def has_place(self, key: str) -> bool:
        """Whether a key of a checkpoint is read into some parameter."""
        return self._place(key)[0] is not None

    def converter(self, pattern: str) -> WeightConverter:
        """What merges or splits the tensors of a pattern; a new one."""
        return copy.deepcopy({source: one for one in self._converters for source in one.source_patterns}[pattern])

    def knows(self, key: str) -> bool:
        """Whether the model has a place for a key as it stands, with all prefixes."""
        return self._renamed(key)[0] in self._meta

    def elsewhere(self, key: str) -> str | None:
        """The name of what a key stands for in parts of the whole model that are not trained; None if in none."""
        for candidate in (key, unwrapped(key)):
            name, _ = self._renamed(candidate)
            if name in self._meta and name not in self.own:
                return name
        return None

    def buffer(self, key: str) -> str | None:
        """The buffer that a key names; None if it names none."""
        name = self.own.get(self._renamed(unwrapped(key))[0])
        return name if name in self.buffers else None

    def is_computed(self, stored: StoredTensor) -> bool:
        """Whether a tensor that is no parameter is a buffer that some version saved, and that is computed."""
        if COMPUTED.search(stored.key) or self.buffer(stored.key) is not None:
            return True
        is_square = len(stored.shape) >= 2 and stored.shape[-1] == stored.shape[-2] and set(stored.shape[:-2]) <= {1}
        return is_square and CAUSAL_MASK.search(stored.key) is not None

    def is_left_out(self, key: str) -> bool:
        """Whether transformers leaves a key out on purpose, such as one of layers that predict further tokens."""
        return any(bool(self._unexpected and self._unexpected.search(one)) for one in (key, unwrapped(key)))

    def may_be_missing(self, name: str) -> bool:
        """Whether transformers initialises a parameter that a checkpoint lacks without a word."""
        return bool(self._missing and self._missing.search(name))

    def _place(self, key: str) -> tuple[str | None, str | None]:
        """The name of a parameter in the model of the files, and the pattern by which it is converted, if it is."""
        if key not in self._found:
            place: tuple[str | None, str | None] = (None, None)
            for candidate in dict.fromkeys((key, unwrapped(key))):
                name, pattern = self._renamed(candidate)
                own = self.own.get(name)
                if own in self.shapes or own in self.tied:
                    place = (name, pattern)
                    break
            self._found[key] = place
        return self._found[key]

    def _number(self, key: str, pattern: str) -> int | None:
        """Which one of a list a key is, such as the number of an expert."""
        if "*." not in pattern:
            return None
        numbered = re.compile(pattern.replace("*.", r"(?P<number>.*?)\.", 1))
        name = unwrapped(key)
        for renaming in self._renamings:  # transformers 5.17 has no function for all of them
            name, _ = renaming.rename_source_key(name)
        match = numbered.search(name)
        number = match["number"] if match else ""
        return int(number) if number.isdecimal() and len(number) < 10 else None

    def _renamed(self, key: str) -> tuple[str, str | None]:
        arguments = (self._prefix, self._meta)
        name, pattern = rename_source_key(key, self._renamings, self._converters, *arguments)
        if name not in self._meta and key in self._meta:  # named as the model does already
            name, pattern = rename_source_key(key, [], [], *arguments)
        return name, pattern


def unwrapped(key: str) -> str:
    """A key without what wrappers of a model put into it."""
    before = None
    while key != before:
        before, key = key, WRAPPERS.sub("", key).removeprefix(ADAPTED)
    return key


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are another's as well -> the first of its names."""
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
    return {name: canonical for name, canonical in names.items() if name != canonical}


def _pattern(patterns: Iterable[str] | None) -> re.Pattern[str] | None:
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None
