"""The model: which, from which weights, for how many positions, and what its vocabulary is given."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from tonnage.errors import UserError
from tonnage.migration.adapters import has_adapter
from tonnage.migration.draft import Draft
from tonnage.migration.families import end_of_text, of_family, origin_of
from tonnage.migration.values import flag, number, text, texts, whole, words


def model(draft: Draft) -> None:
    """The model, at which revision, and whether its own code may run."""
    name = draft.first("model", text)
    method = _quantised(draft, name.value) if name is not None else ""
    stays = method.lower() in STAY_UNDER_ADAPTERS and has_adapter(draft)
    if name is not None and stays:
        draft.put("model", name.value, name, note="Its weights stay as they are stored, under the adapter.")
    elif name is not None and method and (origin := origin_of(name.value)) and has_adapter(draft):
        draft.put("model", origin, name, note=f"What the weights of {method} were made of.")
        draft.note("weights of four bits", model=name.value, origin=origin)
        draft.is_quantised = True
    elif name is not None and method:
        draft.refuse(
            name,
            f"Weights of {method} are not trained on: name the model that they were made of, which adapter.quantize "
            "rests in 4 or 8 bits.",
        )
    elif name is not None:
        draft.put("model", name.value, name)
    gptq = draft.first("gptq", flag)
    draft.drop(gptq if gptq is not None and not gptq.value else None, "Off.")
    draft.drop(gptq if draft.is_quantised else None, "The model is named of which these weights were made.")
    draft.drop(gptq if stays else None, "The model's files say it.")
    draft.refuse(gptq)
    kind = draft.first("model_class", text)
    is_scorer = draft.method == "reward" and kind is not None and kind.value.endswith("ForSequenceClassification")
    draft.drop(kind if is_scorer else None, "The class of a reward model follows from the model's files.")
    draft.apply("model_class", kind)
    _start(draft)
    tokenizer = draft.first("tokenizer", text)
    if tokenizer is not None and name is not None and tokenizer.value in (name.value, draft.model):
        draft.drop(tokenizer, "The model's own.")
    elif tokenizer is not None and any(setting.name == "base_model_config" for setting in tokenizer.settings):
        draft.refuse(tokenizer, "The configuration is the one in the model's directory.")
    elif tokenizer is not None:
        draft.put("tokenizer", tokenizer.value, tokenizer)
    draft.follow("revision")
    if draft.method == "reward":
        draft.drop_every("A reward model is of a family that transformers itself has.", "trust_remote_code")
    draft.copy("trust_remote_code", flag)


QUANTISED = (
    r"(?<![a-z0-9])(awq|gptq|aqlm|hqq|eetq|exl[23]|quip|quanto|spqr|vptq|autoround|torchao|bnb|mlx|w[48]a\d+|"
    r"(?:int|nf|fp|nvfp)4|int8|[2-8]-?bit)(?![a-z0-9])"
)
"""What names of models say that hold quantised weights, in small letters."""
READ_AS_BF16 = ("mxfp4", "fp8")
"""``quant_method`` of a model's config.json whose weights are widened where they are trained."""
STAY_UNDER_ADAPTERS = ("gptq", "awq", "nvfp4", "modelopt", "compressed-tensors")
"""The same, or what names of models say, whose weights are trained on where an adapter leaves them frozen."""


def _quantised(draft: Draft, model: str) -> str:
    """With what a model's weights are quantised, as its config.json says where it is here, else its name."""
    path = draft.files.find(f"{model}/config.json")
    if path is None:
        named = re.search(QUANTISED, PurePath(model.lower()).name)
        return named[0].upper() if named else ""
    with suppress(UserError):
        method = (draft.files.read(path).get("quantization_config") or {}).get("quant_method", "")
        return "" if str(method).lower() in READ_AS_BF16 else str(method)
    return ""


def _start(draft: Draft) -> None:
    """From the model's weights, or from random ones; and what routers are told."""
    draft.switch("init", "init", "random", "The model's weights.")
    routers = draft.first("router_logits", flag)
    loss = of_family("router_loss", draft.model)
    if routers is not None and routers.value and loss is not None:
        draft.put("router_loss", loss, routers, note="As the model's config.json has it.")
    elif routers is not None and routers.value:
        sentence = "router_aux_loss_coef of the model's config.json, which counts here"
        draft.leave_open("router_loss", sentence, routers, example="0.02")
    elif routers is not None:
        draft.put("router_loss", 0.0, routers)


OF_ROPE = (
    *("rope.factor", "rope.theta", "rope.attention_factor", "rope.beta_fast", "rope.beta_slow"),
    *("rope.low_freq_factor", "rope.high_freq_factor"),
)
FACTOR = "how many times as many positions as the model has there are to be, which follows there from the model's files"


def positions(draft: Draft) -> None:
    """Rotary positions scaled for more of them than the model was trained with: types and their numbers, or a type
    alone, whose factor the other program computes from the model's files."""
    longest = draft.first("longest_positions", whole)
    draft.copy("rope.type", lambda value: text(value).lower())
    draft.copy("rope.original_max_position_embeddings", whole)
    for key in OF_ROPE:
        draft.copy(key, number)
    if "rope.theta" in draft.tree:
        draft.imply("rope.type", "default", "another base of the frequencies, which are not scaled")
    if "rope.type" in draft.tree and "rope.factor" not in draft.tree:
        draft.leave_open("rope.factor", FACTOR, longest, example="4.0")
    draft.drop(longest if "rope.factor" in draft.tree else None, "rope.factor says it.")
    draft.refuse(longest, "Positions are the model's own, or rope.factor times as many.")


def tokens(draft: Draft) -> None:
    """Tokens that a vocabulary is given or that get another meaning, and what becomes of them in rows."""
    draft.copy("data.control_tokens", _control_tokens)
    draft.copy("data.eos_token", text, usual=end_of_text(draft.model), reason="The model's own.")
    added = draft.first("data.added_tokens", _listed_tokens)
    brought = {"<|im_start|>", "<|im_end|>"} if draft.tree.get("data.template") == "chatml" else set()
    if added is not None and set(added.value) <= brought:
        draft.drop(added, "The template brings them along.")
    elif added is not None:
        draft.put("data.added_tokens", added.value, added)
    if "data.added_tokens" in draft.tree or "data.eos_token" in draft.tree:
        draft.note("new tokens")


def _control_tokens(value: Any) -> str:
    """LLaMA-Factory's ``split_special_tokens``, if it says anything."""
    if value is None:
        raise ValueError("says nothing")
    return "text" if flag(value) else "keep"


def _listed_tokens(value: Any) -> list[str]:
    """Axolotl lists them, LLaMA-Factory writes commas between them."""
    return texts(value) if isinstance(value, list) else words(value)
