"""Whether a model of text that is given features computes what the whole model does: it is asked, not believed.

What a family does with an image besides putting its features in the places of tokens, no list says: Gemma 3 lets the
tokens of an image look ahead, Qwen counts their positions in three dimensions. So a tiny model of the very architecture
is computed twice in plain transformers: whole, with features drawn at random where its tower's would be, and as text
alone with the same features and positions, which is how training computes it. Logits must be equal. Where they are not,
the tokens of the image are let see each other, by the attention of training: in all layers, or in those with windows.
How many tokens an image has, and what else the family is told of it, the model's own processor says of a small one.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from tonnage.data.images.processing import ImageRecipe, tower_inputs, versions
from tonnage.data.packs.features import images_of
from tonnage.errors import UserError, user_error
from tonnage.host.cachedir import remembered
from tonnage.model.attention import IN_ALL, IN_WINDOWS, looking_ahead, packing_arguments, register
from tonnage.model.names import Whole
from tonnage.model.tiny import VOCABULARY, draw, shrink
from tonnage.model.towers import find_whole, text_config
from tonnage.model.vision import accepted, added_features, behind_blocks, beside_embeddings, image_token, positions_of

BEFORE, AFTER = 7, 9
"""Tokens of text around the image."""
GAINS = (1.0, 2.0, 4.0)
SHOWS = 1e-2
"""By how much features must change the logits of a token, for a trial to show anything."""
FLOOR = 1e-4
"""By how much logits may differ, relative to the largest."""
IMAGE_SIDE = 64
OUTPUTS = "mm_encoder_outputs"
"""The argument by which transformers' models take features from outside."""
FORMAT = 2


@dataclass(frozen=True)
class Trial:
    """What a trial came to."""

    fault: str = ""
    """Why features may not be computed apart; empty where they may."""
    look_ahead: str = ""
    """In which layers the tokens of an image see those after them (``planning.plan.DataProfile``)."""


def check_sight(whole: PreTrainedConfig, recipe: ImageRecipe, cache: Path | None = None) -> Trial:
    """Ask a tiny model of the architecture that ``whole`` describes. The answer is kept in ``sight`` of ``cache``.

    Raises:
        UserError: its tokens do more with an image than to take its features, or nothing can be shown.
    """
    described = whole.to_dict()
    described.pop("_name_or_path", None)
    inputs = [described, recipe.key(), versions(), torch.__version__, FORMAT]
    place = None if cache is None else (cache, "sight", "")
    sight = remembered(place, inputs, Trial, lambda: _sight(whole, recipe), "the model is asked again every time")
    if sight.fault:
        raise user_error(
            where=f"model type {whole.model_type}",
            found=f"rows with images, and {sight.fault}",
            needed="a causal language model in which an image is its features, in the places of its tokens",
            change="train on rows of text, or choose another model (Qwen2.5-VL and LLaVA, for instance)",
        )
    return sight


def _sight(whole: PreTrainedConfig, recipe: ImageRecipe) -> Trial:
    try:
        return _asked(whole, recipe)
    except Exception as error:  # whatever the classes of the families stumble over
        line = str(error).strip().split("\n")[0][:200]
        return Trial(f"a tiny model of the family that cannot be tried ({type(error).__name__}: {line})")


def _asked(described: PreTrainedConfig, recipe: ImageRecipe) -> Trial:
    """What a tiny model does with an image."""
    small = shrink(text_config(described))
    config = copy.deepcopy(described)
    config.text_config = small
    ids, inputs = _document(config, recipe)
    for gain in GAINS:
        text = AutoModelForCausalLM.from_config(copy.deepcopy(small), dtype=torch.float32, attn_implementation="eager")
        draw(text, gain)
        whole = _around(text.eval(), config)
        if OUTPUTS not in inspect.signature(whole.forward).parameters:
            name = type(whole).__name__
            return Trial(f"{name}, which takes no features from outside in the installed transformers")
        token = image_token(config)
        assert token is not None
        number = int((ids == token).sum())
        width = text.get_input_embeddings().embedding_dim
        features = torch.randn(number, (1 + added_features(config)) * width)
        expected = _logits_of_whole(whole, ids, features, inputs, token)
        ours = _logits_of_text(text, whole, ids, features, inputs, token)
        others = _logits_of_text(text, whole, ids, torch.randn_like(features), inputs, token)
        largest = float(expected.abs().max())
        if not float((ours[-AFTER:] - others[-AFTER:]).abs().max()) >= SHOWS:
            continue
        off = float((ours - expected).abs().max())
        for look_ahead in ("", IN_ALL, IN_WINDOWS):
            if look_ahead:
                try:
                    ours = _logits_of_text(text, whole, ids, features, inputs, token, look_ahead)
                except UserError:  # attention in both directions, which that of training is not
                    break
            if float((ours - expected).abs().max()) <= FLOOR * max(1.0, largest):
                return Trial(look_ahead=look_ahead)
        return Trial(
            "tokens that do more with an image than to take its features and to look ahead in it (attention of the "
            f"whole prompt, or across): logits of a tiny model are off by {off / max(largest, 1e-9):.2g} of the largest"
        )
    return Trial("a tiny model of the family whose answers do not depend on its images")


def _document(config: PreTrainedConfig, recipe: ImageRecipe) -> tuple[Tensor, dict[str, Any]]:
    """Tokens with those of an image among them, int64 (tokens,), and what the processor says of it. The
    configuration's token of an image is changed to one of the tiny vocabulary."""
    from PIL import Image

    image = Image.effect_noise((IMAGE_SIDE, IMAGE_SIDE), 64.0).convert("RGB")
    inputs, expanded = tower_inputs(recipe, [image])
    config.image_token_id = token = VOCABULARY - 1
    inside = [token if one == recipe.token_id else 3 + one % 12 for one in expanded]
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(3, 15, (BEFORE + AFTER,), generator=generator).tolist()
    ids = torch.tensor([*words[:BEFORE], *inside, *words[BEFORE:]])
    return ids, {name: value for name, value in inputs.items() if not name.startswith("pixel_values")}


def _around(text: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """The whole model whose model of text is ``text``; what is no text has no memory."""
    whole = find_whole(text, config)
    assert isinstance(whole, Whole)
    tensors = dict(text.named_parameters(remove_duplicate=False)) | dict(text.named_buffers(remove_duplicate=False))
    for name, own in whole.own.items():
        path, _, leaf = name.rpartition(".")
        module: nn.Module = whole.model.get_submodule(path)
        members: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
        if own in tensors:
            members[leaf] = tensors[own]
    for module in whole.model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:  # never used, but asked for its device
                module._parameters[leaf] = nn.Parameter(torch.empty(0))
    model: PreTrainedModel = whole.model.eval()
    return model


@torch.no_grad()
def _logits_of_whole(
    whole: PreTrainedModel, ids: Tensor, features: Tensor, inputs: dict[str, Any], token: int
) -> Tensor:
    kinds = (ids == token).long().unsqueeze(0)
    beside = accepted(whole.forward, {**inputs, "mm_token_type_ids": kinds, "token_type_ids": kinds})
    error: Exception | None = None
    own, *added = features.split(whole.get_input_embeddings().embedding_dim, dim=1)
    both: tuple[Any, ...] = ([own], own.unsqueeze(0))
    for pooled in both:  # some families have a list, some a tensor of all
        of_tower: Any = BaseModelOutputWithPooling(pooler_output=pooled)
        if added:
            of_tower.deepstack_features = [[level] for level in added]
        outputs: Any = {"image": of_tower}
        try:
            logits: Tensor = whole(input_ids=ids.unsqueeze(0), use_cache=False, **{OUTPUTS: outputs}, **beside).logits[
                0
            ]
            return logits.float()
        except Exception as raised:
            error = error or raised
    assert error is not None
    raise error


@torch.no_grad()
def _logits_of_text(
    text: PreTrainedModel,
    whole: PreTrainedModel,
    ids: Tensor,
    features: Tensor,
    inputs: dict[str, Any],
    token: int,
    look_ahead: str = "",
) -> Tensor:
    embedded = text.get_input_embeddings()(ids).clone()
    width, places = embedded.shape[1], (ids == token).nonzero()[:, 0]
    embedded[places] = features[:, :width]
    positions = positions_of(whole, ids, token, inputs)
    more = behind_blocks(features[:, width:], width, places, ids.unsqueeze(0))
    more |= beside_embeddings(text.base_model, ids.unsqueeze(0), places)
    if look_ahead:  # by the attention of training
        text.set_attn_implementation(register())
        images = (
            torch.full_like(ids, -1).index_copy(0, places, torch.from_numpy(images_of(places.numpy()))).unsqueeze(0)
        )
        packing = packing_arguments((len(ids),), ids.device)
        more |= looking_ahead(packing, images, look_ahead, ids.device)
    if positions is not None:
        more["position_ids"] = positions.unsqueeze(1)
    logits: Tensor = text(inputs_embeds=embedded.unsqueeze(0), use_cache=False, **more).logits[0]
    return logits.float()
