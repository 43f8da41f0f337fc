"""The part of a model that sees: its vision tower and projector, apart from the model of text that is trained.

    image ──► processor ──► pixels ──► tower, projector ──► features (tokens, hidden) ──► in the places of the tokens
                                                                                          that stand for the image

It is the whole model as transformers builds it, of which only what is no text has memory. What differs between
families is asked of it: ``get_image_features`` gives the features, ``get_rope_index``, where there is one, the
positions of three dimensions that tokens have beside an image.

Some towers give several features for each token ("deepstack"): the first stands in its place, the others are added to
the hidden states there behind as many blocks, the first ones. They lie side by side in one row.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tonnage.errors import user_error
from tonnage.model.build import allocate_part, fill_part, on_meta
from tonnage.model.files import ModelFiles, read_whole_config
from tonnage.model.matching import missing_from_files, sort
from tonnage.model.names import Names
from tonnage.model.stored import read_headers
from tonnage.model.towers import TOWER, find_whole, same_modules, whole_class, without_text

FEATURES, POSITIONS = "get_image_features", "get_rope_index"
"""Methods of models of images."""
DEEPSTACK = "deepstack_visual_indexes"
"""The key for the layers of a tower whose features are added behind blocks of the language model."""


def image_token(whole: PreTrainedConfig) -> int | None:
    """The token in whose places features of images go; None of a model that takes none so."""
    kind, token = whole_class(whole), getattr(whole, "image_token_id", None)
    is_apart = isinstance(getattr(whole, "text_config", None), PreTrainedConfig)
    return token if is_apart and hasattr(kind, FEATURES) and isinstance(token, int) else None


def added_features(whole: PreTrainedConfig) -> int:
    """How many features of a token are added behind blocks."""
    return len(getattr(getattr(whole, "vision_config", None), DEEPSTACK, None) or ())


def behind_blocks(added: Tensor, hidden: int, places: Tensor, ids: Tensor, blocks: int = 0) -> dict[str, Any]:
    """Arguments of a backbone that adds features behind its first blocks; none where there are none.

    ``added`` (image tokens, hidden x blocks) stand in the ``places``, int64 (image tokens,), of ``ids`` (rows, tokens),
    row after row. Behind the first ``blocks`` blocks nothing is added: a stage before did.
    """
    if not added.shape[1]:
        return {}
    levels = added.split(hidden, dim=1)
    of_images = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device).index_fill(0, places, True)
    return {
        "visual_pos_masks": of_images.view_as(ids),
        "deepstack_visual_embeds": [
            torch.zeros_like(level) if block < blocks else level for block, level in enumerate(levels)
        ],
    }


@dataclass(frozen=True)
class Tower:
    """What sees, with its weights."""

    model: PreTrainedModel
    """The whole; what is text has no memory."""
    token_id: int
    device: torch.device
    dtype: torch.dtype

    def features(self, inputs: Mapping[str, Any]) -> Tensor:
        """Features of the images of a row, one after another: (tokens, hidden), and in each row of these after the
        first those that are added behind blocks. ``inputs`` are the processor's."""
        compute = getattr(self.model.base_model, FEATURES, None) or getattr(self.model, FEATURES)
        on_device = self.sent(inputs)
        output = compute(**accepted(compute, on_device), return_dict=True)
        added = getattr(output, "deepstack_features", None) or ()
        return torch.cat([_in_rows(features) for features in (output.pooler_output, *added)], dim=1)

    def positions(self, ids: Tensor, inputs: Mapping[str, Any]) -> Tensor | None:
        """Positions of a document's tokens, int64 (3, tokens); None of a family whose tokens have one each."""
        return positions_of(self.model, ids, self.token_id, inputs)

    def sent(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs where the tower is, in its type."""
        sent = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                sent[name] = value.to(self.device, self.dtype if value.is_floating_point() else None)
        return sent

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


def beside_embeddings(backbone: nn.Module, ids: Tensor, places: Tensor) -> dict[str, Any]:
    """Arguments of a backbone whose blocks have embeddings of their own (Gemma 4's smaller ones): of ``ids`` (rows,
    tokens), and of padding in the ``places`` of features; none of one whose blocks have none."""
    config: Any = backbone.config
    if not getattr(config, "hidden_size_per_layer_input", None):
        return {}
    of_text = ids.flatten().index_fill(0, places, config.pad_token_id).view_as(ids)
    look_up: Any = backbone.get_per_layer_inputs
    return {"per_layer_inputs": look_up(of_text)}


def _in_rows(features: Any) -> Tensor:
    """Features of images, apart or together, as rows: (tokens, hidden)."""
    if isinstance(features, list | tuple):
        features = torch.cat([of_image.flatten(0, -2) for of_image in features])
    rows: Tensor = features.flatten(0, -2)
    return rows


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
    in_dtype(whole.model, dtype)
    allocate_part(whole.model, outside | beside, device)
    fill_part(whole.model, places)
    return Tower(whole.model.eval(), token, device, dtype)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Give parameters, which have no memory, a type; buffers, such as frequencies, keep theirs, as in transformers."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                module._parameters[name] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)


class AttachedTower(nn.Module):
    """The part that sees, as a part of the model of text, with whose parameters its own are sharded, updated and saved.

    Its children are those of the whole, so that names are the whole's.
    """

    def __init__(self, whole: PreTrainedModel, token_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._whole, self.token_id, self._dtype = (whole,), token_id, dtype  # a tuple, as it is no child
        for name, child in whole.named_children():
            self.add_module(name, child)

    @property
    def learns(self) -> bool:
        """Whether any of its parameters are trained."""
        return any(parameter.requires_grad for parameter in self.parameters())

    def forward(self, rows: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Features of the images of some rows, each (tokens, hidden), from what the processor makes of them."""
        tower = self._tower()
        return [tower.features(inputs) for inputs in rows]

    def positions(self, ids: Tensor, inputs: Mapping[str, Any]) -> Tensor | None:
        """As ``Tower.positions``."""
        return self._tower().positions(ids, inputs)

    def _tower(self) -> Tower:
        device = next(parameter.device for parameter in self.parameters())
        return Tower(self._whole[0], self.token_id, device, self._dtype)


def attach_tower(model: PreTrainedModel, files: ModelFiles, dtype: torch.dtype) -> AttachedTower:
    """Give ``model``, of text and on the meta device, what sees for the whole model in ``files``, in ``dtype``, that of
    the forward pass."""
    described = read_whole_config(files, trust_remote_code=hasattr(model.config, "auto_map"))
    token = image_token(described)
    assert token is not None, "decided before"
    whole = without_text(model, described)
    in_dtype(whole, dtype)
    tower = AttachedTower(whole.eval(), token, dtype)
    model.add_module(TOWER, tower)
    return tower
