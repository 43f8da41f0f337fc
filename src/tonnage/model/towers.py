"""Models of more than text: the part of them that is trained, and what of their files belongs to the others.

    Gemma3ForConditionalGeneration                          Gemma3ForCausalLM
        model.vision_tower            carried
        model.multi_modal_projector   carried
        model.language_model.*        ──────────────────►   model.*
        lm_head                       ──────────────────►   lm_head

The text model is trained as if it stood alone. Nothing else takes memory: an export takes it from the files of the
model, and is again the whole model.

Where images are looked at while the model is trained, what sees is attached to the model of text as ``tower``, and its
parameters have the names of the whole with that before them: ``tower.model.vision_tower.*``.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from tonnage.errors import user_error
from tonnage.model.names import Names, Whole
from tonnage.model.quantised import QUANTISATION
from tonnage.model.stored import StoredTensor, read
from tonnage.rundir.weights import Carried

HEAD_WEIGHT = "lm_head.weight"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOWER = "tower"
"""Where in the model of text what sees is attached, if it is."""


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text model in the model that ``config`` describes: ``config`` itself, if that is all of
    it, or if transformers has no causal language model for its text alone."""
    text = getattr(config, "text_config", None)
    if isinstance(text, PreTrainedConfig):
        give_head(text, config)
    is_known = isinstance(text, PreTrainedConfig) and MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None) is not None
    if not is_known or whole_class(config) is None:
        return config
    assert isinstance(text, PreTrainedConfig)
    text = copy.deepcopy(text)
    text.tie_word_embeddings = config.tie_word_embeddings  # the outermost model ties its head, or does not
    for name in TOKENS:
        if getattr(text, name, None) is None and getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    for name in QUANTISATION:
        if getattr(config, name, None):
            setattr(text, name, getattr(config, name))
    return text


def give_head(text: PreTrainedConfig, config: PreTrainedConfig) -> None:
    """See to it that transformers has a causal language model for ``text``, the part of ``config`` that describes a
    model of text: where it has one of these without a head (Qwen2.5-VL's), one with the head that the whole has is
    registered with it. A whole whose head is no ``lm_head`` alone, or that takes no features, is left alone."""
    kind: Any = MODEL_MAPPING.get(type(text), None)
    whole = whole_class(config)
    if MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None) is not None or not isinstance(kind, type) or whole is None:
        return
    tied = getattr(whole, "_tied_weights_keys", None)
    takes_features = hasattr(whole, "get_image_features")  # in the places of tokens, and does not attend across
    if takes_features and isinstance(tied, dict) and set(tied) == {HEAD_WEIGHT}:
        transformers.AutoModelForCausalLM.register(type(text), _headed(kind), exist_ok=True)


def _headed(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A causal language model whose backbone is of a class of transformers."""
    family: Any = next(one for one in kind.__mro__[1:] if issubclass(one, PreTrainedModel))

    class TextForCausalLM(family, transformers.GenerationMixin):  # type: ignore[misc]
        """The model of text of a model of more than that, with its head."""

        config_class = kind.config_class
        base_model_prefix = "model"
        _tied_weights_keys: ClassVar = {HEAD_WEIGHT: "model.embed_tokens.weight"}

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = kind(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self, input_ids: Any = None, logits_to_keep: int = 0, labels: None = None, **how: Any
        ) -> CausalLMOutputWithPast:
            output = self.model(input_ids=input_ids, **how)
            hidden = output.last_hidden_state
            logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
            return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)

    return TextForCausalLM


def whole_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of transformers that ``config`` names as the architecture of the whole model; None if it names none."""
    if not config.architectures:
        usual = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
        return usual if isinstance(usual, type) else None
    try:
        named = [getattr(transformers, name, None) for name in config.architectures if isinstance(name, str)]
    except Exception:  # a module of transformers that needs what is not installed
        return None
    fitting = [one for one in named if isinstance(one, type) and issubclass(one, PreTrainedModel)]
    return next((one for one in fitting if one.config_class is type(config)), None)


def find_whole(model: PreTrainedModel, config: PreTrainedConfig) -> Whole | None:
    """The whole of which ``model`` is the text part, on the meta device, as ``config`` describes it; None if ``model``
    is all of it.

    Raises:
        UserError: the whole cannot be built, or the text model is no part of it that can be found.
    """
    kind = whole_class(config)
    if type(config) is type(model.config) or kind is None:
        return None
    config = copy.deepcopy(config)
    config.tie_word_embeddings = model.config.tie_word_embeddings
    if (size := getattr(model.config, "vocab_size", None)) is not None:
        config.get_text_config().vocab_size = size
    try:
        with torch.device("meta"):
            whole = kind(config)
        parts = list(same_modules(model, whole))
    except Exception as error:  # whatever the classes of the families stumble over
        raise user_error(
            where=f"model type {config.model_type}",
            found=f"no {kind.__name__} can be built as config.json says ({type(error).__name__}: "
            f"{str(error).strip()[:300]})",
            needed="the configuration of a model of more than text that the installed transformers can build",
            change="mend config.json, or choose another model",
        ) from error
    own: dict[str, str] = {}
    for outer, inner in parts:
        inner_tensors = inner.state_dict() | dict(inner.named_buffers())
        prefix, own_prefix = _path(whole, outer), _path(model, inner)
        own |= {f"{prefix}{name}": f"{own_prefix}{name}" for name in inner_tensors if not in_tower(name)}
    if (tower := getattr(model, TOWER, None)) is not None:
        own |= {name: f"{TOWER}.{name}" for name in tower.state_dict() | dict(tower.named_buffers())}
    return Whole(whole, own)


def in_tower(name: str) -> bool:
    """Whether a parameter or module of a model of text is one of the tower that is attached to it."""
    return name == TOWER or name.startswith(f"{TOWER}.")


def without_text(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """The whole that ``config`` describes, on the meta device, without the text part of it that ``model`` is."""
    whole = find_whole(model, config)
    assert whole is not None, "decided before"
    for outer, _ in list(same_modules(model, whole.model)):
        path = _path(whole.model, outer).rstrip(".")
        parent, _, name = path.rpartition(".")
        setattr(whole.model.get_submodule(parent), name, nn.Module())
    return whole.model


def same_modules(model: PreTrainedModel, whole: PreTrainedModel) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Modules of the whole, with those of the text model that they are."""
    inside = next((one for one in whole.modules() if type(one) is type(model)), None)
    if inside is not None:
        yield inside, model
        return
    base: list[nn.Module] = [one for one in whole.modules() if type(one) is type(model.base_model)]
    yield base[0], model.base_model
    yield whole.get_output_embeddings(), model.get_output_embeddings()


def _path(model: nn.Module, module: nn.Module) -> str:
    path = next(name for name, child in model.named_modules() if child is module)
    return f"{path}." if path else ""


def described(carried: Sequence[StoredTensor], names: Names) -> tuple[Carried, ...]:
    """What is carried, by what it belongs to; in the order of the files."""
    counted: dict[str, list[int]] = {}
    for tensor in carried:
        counted.setdefault(_part(tensor.key, names), []).append(tensor.num_bytes)
    return tuple(Carried(part, len(sizes), sum(sizes)) for part, sizes in counted.items())


def _part(key: str, names: Names) -> str:
    if (buffer := names.buffer(key)) is not None:
        return buffer.rpartition(".")[2]
    name = (names.elsewhere(key) or key).removeprefix("model.")
    first, _, rest = name.partition(".")
    return f"{first} {rest.partition('.')[0]}" if first == "layers" else first.replace("_", " ")


def digest(carried: Sequence[StoredTensor]) -> str:
    """A digest that tells these tensors from others: names, types, shapes, and the first and last row of
    each."""
    sha256 = hashlib.sha256()
    for stored, view in sorted(((stored, view) for stored, view in read(carried)), key=lambda pair: pair[0].key):
        sha256.update(f"{stored.key} {stored.dtype} {stored.shape}\n".encode())
        ends = (
            [view[...]]
            if not stored.shape
            else [view[at : at + 1] for at in (0, stored.shape[0] - 1) if stored.shape[0]]
        )
        for end in ends:
            sha256.update(end.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()[:32]
