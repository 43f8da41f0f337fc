"""Chat templates by the names that other programs have for them.

Most are the texts of a family of models, which the tokenizers of that family bring along: then the model's own is taken
(``auto``). Where the model is another one, a built-in template of ours with the same text is; where there is none, the
name is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Named:
    """A template under a name of another program."""

    family: str = ""
    """Models, by a pattern of their names in small letters, whose tokenizers bring it along."""
    ours: str = ""
    """A built-in template with the same text; empty if there is none."""


_LLAMA_3 = Named(r"llama-?_?3.*(instruct|chat)", "llama3")
_GEMMA = Named(r"gemma.*-it\b", "gemma")
_QWEN_3 = Named(r"qwen-?3")
_DEEPSEEK = Named(r"deepseek")

AXOLOTL_TEMPLATES: dict[str, Named] = {
    "alpaca": Named(ours="alpaca"),
    "chatml": Named(ours="chatml"),
    "cohere": Named(r"command|c4ai"),
    "command_a": Named(r"command-?a"),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "exaone": Named(r"exaone"),
    "exaone4": Named(r"exaone-?4"),
    "falcon_h1": Named(r"falcon-h1.*instruct", "chatml"),
    "gemma": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3n": _GEMMA,
    "gemma4": Named(r"gemma-?4.*-it\b", "gemma4"),
    "gemma4_unified": Named(r"gemma-?4.*-it\b", "gemma4"),
    "jamba": Named(r"jamba"),
    "llama3": _LLAMA_3,
    "llama3_2_vision": Named(r"llama-?3.*vision.*instruct", "llama3"),
    "llama4": Named(r"llama-?4"),
    "mistral_v1": Named(r"(mistral|mixtral).*instruct"),
    "mistral_v2v3": Named(r"(mistral|mixtral).*instruct"),
    "mistral_v3_tekken": Named(r"(mistral|ministral).*instruct"),
    "mistral_v7_tekken": Named(r"(mistral|ministral|devstral|magistral)"),
    "nemotron_h": Named(r"nemotron"),
    "phi_3": Named(r"phi-?3"),
    "phi_35": Named(r"phi-?3\.5"),
    "phi_4": Named(r"phi-?4"),
    "qwen2_vl": Named(r"qwen-?2"),
    "qwen3": _QWEN_3,
    "qwen3_5": Named(r"qwen-?3\.5"),
    "qwen_25": Named(r"qwen-?2\.?5"),
    "tokenizer_default": Named(r"."),
}
"""Of Axolotl's ``chat_template``."""

LLAMA_FACTORY_TEMPLATES: dict[str, Named] = {
    "chatml": Named(ours="chatml"),
    "cohere": Named(r"command|c4ai|aya"),
    "deepseek": _DEEPSEEK,
    "deepseek3": _DEEPSEEK,
    "deepseekr1": _DEEPSEEK,
    "empty": Named(ours="plain"),
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": Named(r"gemma-?4.*-it\b", "gemma4"),
    "glm4": Named(r"glm-?4"),
    "glm4_moe": Named(r"glm-?4"),
    "gpt_oss": Named(r"gpt-oss"),
    "granite3": Named(r"granite-3"),
    "granite4": Named(r"granite-4"),
    "lfm2": Named(r"lfm2"),
    "llama2": Named(r"llama-?2.*chat"),
    "llama3": _LLAMA_3,
    "llama4": Named(r"llama-?4.*instruct"),
    "ministral": Named(r"ministral"),
    "mistral": Named(r"(mistral|mixtral).*instruct"),
    "mistral_small": Named(r"mistral-small"),
    "olmo": Named(r"olmo"),
    "phi": Named(r"phi-?3"),
    "phi4": Named(r"phi-?4"),
    "phi4_mini": Named(r"phi-?4-mini"),
    "qwen": Named(r"qwen-?2\.?5"),
    "qwen3": _QWEN_3,
    "qwen3_5": Named(r"qwen-?3\.5"),
    "qwen3_5_nothink": Named(r"qwen-?3\.5"),
    "qwen3_nothink": Named(ours="chatml"),
    "seed_oss": Named(r"seed-oss"),
    "smollm": Named(r"smollm-.*instruct"),
    "smollm2": Named(r"smollm2.*instruct"),
    "yi": Named(r"\byi-.*chat", "chatml"),
    "zephyr": Named(r"zephyr"),
}
"""Of LLaMA-Factory's ``template``."""

ROUTER_LOSS = ((r"mixtral-8x7b", 0.02), (r"mixtral-8x22b", 0.001))
"""Models, by a pattern of their names in small letters, and ``router_aux_loss_coef`` in their config.json."""
END_OF_TEXT = (
    (r"llama-?2|code-?llama|open_?llama|vicuna|mistral|mixtral|tinyllama", "</s>"),
    (r"llama-?3(?!.*instruct)", "<|end_of_text|>"),
    (
        r"falcon|pythia|gpt-?neox|gpt-?2|mpt-|starcoder|stablelm|replit|cerebras|redpajama|phi-(1|2)|dolly",
        "<|endoftext|>",
    ),
)
"""Families, by a pattern of their names in small letters, and the token that ends a text in their vocabularies."""


def ours_for(named: Named, model: str) -> str:
    """``auto`` or the name of a template of ours; empty if neither is right for a model."""
    if named.family and re.search(named.family, model.lower()):
        return "auto"
    return named.ours


def end_of_text(model: str) -> str:
    """The token that ends a text in a family's vocabulary; empty if the family is not known."""
    return next((token for family, token in END_OF_TEXT if re.search(family, model.lower())), "")
