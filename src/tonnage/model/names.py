"""Names of tensors in weight files, and what a model calls them.

transformers renames many of the keys that published checkpoints have; its own functions are asked for each. What
wrappers of a model leave in a key is taken off where it fits nothing as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from tonnage.model.stored import Stored

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


class Names:
    """transformers' own mapping from the keys of a checkpoint to the names of a model's parameters."""

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._meta: dict[str, Any] = model.state_dict()
        self.buffers = frozenset(name for name, _ in model.named_buffers())
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        """Of every parameter; of tied ones under the first name."""
        self.tied = _tied_names(model)
        """Other names under which a checkpoint may hold a tied parameter -> the first."""
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        whole = {id(value) for end in ends if end is not None for value in end.parameters(recurse=False)}
        self.vocabulary = {name for name, value in model.named_parameters() if id(value) in whole}
        """Parameters that have a row for each token."""
        self.saved_buffers = self.buffers & set(self._meta)
        """Buffers that transformers saves with a model, so that their values may be trained ones."""
        self._unexpected = _pattern(model._keys_to_ignore_on_load_unexpected)
        self._missing = _pattern(model._keys_to_ignore_on_load_missing)
        self._found: dict[str, tuple[str | None, bool]] = {}

    def parameter(self, key: str) -> str | None:
        """The parameter that a key of a checkpoint is read into; None if there is none."""
        name = self.name(key)
        return name if name is None else self.tied.get(name, name)

    def name(self, key: str) -> str | None:
        """The name in the model of what a key of a checkpoint is read into, which may be one of several of a tied
        parameter; None if there is none."""
        return self._place(key)[0]

    def converts(self, key: str) -> bool:
        """Whether what a key names is merged or split on its way into the model."""
        return self._place(key)[1]

    def knows(self, key: str) -> bool:
        """Whether the model has a place for a key as it stands, with all prefixes."""
        return self._is_parameter(self._renamed(key)[0])

    def buffer(self, key: str) -> str | None:
        """The buffer that a key names; None if it names none."""
        name = self._renamed(unwrapped(key))[0]
        return name if name in self.buffers else None

    def means_nothing(self, one: Stored) -> bool:
        """Whether a tensor that is no parameter may be left out: because transformers does so on purpose, or because it
        is a buffer that some version saved, and that is computed."""
        left_out = any(bool(self._unexpected and self._unexpected.search(key)) for key in (one.key, unwrapped(one.key)))
        if left_out or COMPUTED.search(one.key) or self.buffer(one.key) is not None:
            return True
        is_square = len(one.shape) >= 2 and one.shape[-1] == one.shape[-2] and set(one.shape[:-2]) <= {1}
        return is_square and CAUSAL_MASK.search(one.key) is not None

    def may_be_missing(self, name: str) -> bool:
        """Whether transformers initialises a parameter that a checkpoint lacks without a word."""
        return bool(self._missing and self._missing.search(name))

    def _is_parameter(self, name: str) -> bool:
        return name in self.shapes or name in self.tied

    def _place(self, key: str) -> tuple[str | None, bool]:
        if key not in self._found:
            found: tuple[str | None, bool] = (None, False)
            for candidate in dict.fromkeys((key, unwrapped(key))):
                name, converts = self._renamed(candidate)
                if converts or self._is_parameter(name):
                    found = (None, True) if converts else (name, False)
                    break
            self._found[key] = found
        return self._found[key]

    def _renamed(self, key: str) -> tuple[str, bool]:
        from transformers.core_model_loading import rename_source_key

        arguments = (self._prefix, self._meta)
        name, converter = rename_source_key(key, self._renamings, self._converters, *arguments)
        if name not in self._meta and key in self._meta:  # named as the model does already
            name, converter = rename_source_key(key, [], [], *arguments)
        return name, converter is not None


def unwrapped(key: str) -> str:
    """A key without what wrappers of a model put into it."""
    before = None
    while key != before:
        before, key = key, WRAPPERS.sub("", key).removeprefix(ADAPTED)
    return key


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    return {name: canonical for name, canonical in names.items() if name != canonical}


def _pattern(patterns: Iterable[str] | None) -> re.Pattern[str] | None:
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None
