"""The part of a model that sees: its vision tower and projector, apart from the model of text that is trained.

    image ──► processor ──► pixels ──► tower, projector ──► features (tokens, hidden) ──► in the places of the tokens
                                                                                          that stand for the image

It is the whole model as transformers builds it, of which only what is no text has memory. What differs between
families is asked of it: ``get_image_features`` gives the features, ``get_rope_index``, where there is one, the
positions of three dimensions that tokens have beside an image.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tonnage.errors import user_error
from tonnage.model.build import allocate_part, fill_part, on_meta
from tonnage.model.files import ModelFiles, read_whole_config
from tonnage.model.matching import missing_from_files, sort
from tonnage.model.names import Names
from tonnage.model.stored import read_headers
from tonnage.model.towers import find_whole, same_modules, whole_class

FEATURES, POSITIONS = "get_image_features", "get_rope_index"
"""Methods of models of images."""
DEEPSTACK = "deepstack_visual_indexes"
"""Layers of a tower whose features are added behind blocks of the language model, too."""


def image_token(whole: PreTrainedConfig) -> int | None:
    """The token in whose places features of images go; None of a model that takes none so."""
    kind, token = whole_class(whole), getattr(whole, "image_token_id", None)
    is_apart = isinstance(getattr(whole, "text_config", None), PreTrainedConfig)
    return token if is_apart and hasattr(kind, FEATURES) and isinstance(token, int) else None


def check_tower(whole: PreTrainedConfig) -> None:
    """Refuse a tower whose features do not only stand in the places of tokens. Raises ``UserError``."""
    if getattr(getattr(whole, "vision_config", None), DEEPSTACK, None):
        raise user_error(
            where=f"model type {whole.model_type}",
            found="rows with images, and a tower whose features are added behind several blocks as well (deepstack)",
            needed="features that stand in the places of the image's tokens alone",
            change="train on rows of text, or choose another model (Qwen2.5-VL and LLaVA, for instance)",
        )


@dataclass(frozen=True)
class Tower:
    """What sees, with its weights."""

    model: PreTrainedModel
    """The whole; what is text has no memory."""
    token_id: int
    device: torch.device
    dtype: torch.dtype

    @torch.no_grad()
    def features(self, inputs: Mapping[str, Any]) -> Tensor:
        """Features of the images of a row, one after another: (tokens, hidden). ``inputs`` are the processor's."""
        compute = getattr(self.model.base_model, FEATURES, None) or getattr(self.model, FEATURES)
        on_device = self.sent(inputs)
        output = compute(**accepted(compute, on_device), return_dict=True)
        pooled = output.pooler_output
        if isinstance(pooled, list | tuple):
            pooled = torch.cat([one.flatten(0, -2) for one in pooled])
        rows: Tensor = pooled.flatten(0, -2)
        return rows

    def positions(self, ids: Tensor, inputs: Mapping[str, Any]) -> Tensor | None:
        """Positions of a document's tokens, int64 (3, tokens); None of a family whose tokens have one each."""
        return positions_of(self.model, ids, self.token_id, inputs)

    def sent(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs where the tower is, in its type."""
        return {name: self._sent(value) for name, value in inputs.items()}

    def _sent(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device, self.dtype if value.is_floating_point() else None)

    def around(self, text: PreTrainedModel) -> PreTrainedModel:
        """The whole model with ``text`` as its model of text, whose modules both then have: what was done to these, and
        will be, holds for the whole."""
        whole: Any = self.model
        for outer, inner in list(same_modules(text, whole)):
            path, _, leaf = next(name for name, module in whole.named_modules() if module is outer).rpartition(".")
            setattr(whole.get_submodule(path), leaf, inner)
        whole.generation_config = text.generation_config
        return self.model


def positions_of(whole: PreTrainedModel, ids: Tensor, token_id: int, inputs: Mapping[str, Any]) -> Tensor | None:
    """As ``Tower.positions``, of any model of the family; it needs no weights. ``ids``: int64 (tokens,)."""
    compute = getattr(whole.base_model, POSITIONS, None)
    if compute is None:
        return None
    kinds = (ids == token_id).long().unsqueeze(0)
    values = {**inputs, "input_ids": ids.unsqueeze(0), "mm_token_type_ids": kinds, "token_type_ids": kinds}
    positions: Tensor = compute(**accepted(compute, values))[0]
    return positions[:, 0]


def accepted(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that a function names among its parameters."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in names}


def load_tower(
    files: ModelFiles, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, *, trusts: bool = False
) -> Tower:
    """The tower of the model in ``files``, whose model of text ``config`` describes, with its weights in ``dtype``.

    Raises:
        UserError: some of its weights are not in the files.
    """
    described = read_whole_config(files, trust_remote_code=trusts)
    text = on_meta(copy.deepcopy(config), dtype)
    whole, token = find_whole(text, described), image_token(described)
    assert whole is not None, "decided before"
    assert token is not None
    names = Names(text, whole)
    outside = {name for name, _ in whole.model.named_parameters(remove_duplicate=False) if name not in whole.own}
    beside = {name for name, _ in whole.model.named_buffers(remove_duplicate=False) if name not in whole.own}
    places = {}
    for stored in sort(names, read_headers(files.weights, files.index)).carried:
        name = names.elsewhere(stored.key)
        if name in outside or name in beside:
            places[name] = stored
    if lost := sorted(outside - places.keys()):
        (problem,) = missing_from_files(lost, len(outside), str(files.directory))
        raise user_error(problem.found, "every parameter of the tower, stored by itself", where=problem.where)
    whole.model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    allocate_part(whole.model, outside | beside, device)
    fill_part(whole.model, places)
    return Tower(whole.model.eval(), token, device, dtype)
