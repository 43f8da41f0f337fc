"""Chat templates by the names that other programs have for them.

Most are the texts of a family of models, which the tokenizers of that family bring along: then the model's own is taken
(``auto``). Where the model is another one, a built-in template of ours with the same text is, or the text is written
into the config (``turns`` has those); where we have neither, the name is refused. Texts were compared as Axolotl 0.19
and LLaMA-Factory 0.9.5 have them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import PurePath

from tonnage.migration.turns import COHERE, LLAMA_FACTORY, QWEN_3, QWEN_25, jinja

JINJA = (".jinja", ".jinja2", ".j2")
"""How files with a template end."""


@dataclass(frozen=True)
class Named:
    """A template under a name of another program."""

    family: str = ""
    """Models, by a pattern of their names in small letters, whose tokenizers bring it along."""
    ours: str = ""
    """A built-in template with the same text; empty if there is none."""
    differs: str = ""
    """In what the text that is taken is another one all the same."""
    text: str = ""
    """The same text as Jinja, for models of other families."""
    tokens: tuple[str, ...] = ()
    """Special tokens that the text needs."""
    thinks: bool = False
    """Whether the text has every answer begin with a thought."""
    joins: bool = False
    """Whether the text puts words right behind other words where an answer begins."""


_CHATML = Named(ours="chatml")
_GEMMA = Named(ours="gemma")
_LLAMA_3 = Named(ours="llama3")  # the tokenizers of 3.1 and later bring one along that tells the date
_QWEN_3 = r"qwen-?3(?!\.|.*(2507|coder|next))"
_QWEN_3_5 = r"qwen-?3\.5"
_MISTRAL_V3 = r"mistral-7b-instruct-v0\.3|mixtral-8x22b-instruct"
_PHI_3 = r"phi-?3"
_ALL_THINK = "LLaMA-Factory begins every turn that thinks nothing with an empty thought, the model's own the last one."

AXOLOTL_TEMPLATES: dict[str, Named] = {
    "chatml": _CHATML,
    "cohere": Named(r"command-r(?!7b)", text=jinja(COHERE)),
    "command_a": Named(r"command-?a"),
    "deepseek_v2": Named(r"deepseek-v2\.5"),
    "deepseek_v3": Named(r"deepseek-v3(?!\.)"),
    "exaone": Named(r"exaone-?3"),
    "exaone4": Named(r"exaone-?4"),
    "falcon_h1": Named(r"falcon-h1.*instruct", "chatml"),
    "gemma": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3n": _GEMMA,
    "gemma4": Named(r"gemma-?4.*-it\b", "gemma4"),
    "gemma4_unified": Named(r"gemma-?4.*-it\b", "gemma4"),
    "jamba": Named(r"jamba"),
    "llama3": _LLAMA_3,
    "llama3_2_vision": Named(r"llama-?3.*vision.*instruct"),
    "llama4": Named(r"llama-?4"),
    "mistral_v1": Named(r"mistral-7b-instruct-v0\.[12]|mixtral-8x7b-instruct"),
    "mistral_v2v3": Named(_MISTRAL_V3),
    "mistral_v3_tekken": Named(r"mistral-nemo-instruct|ministral-8b-instruct"),
    "mistral_v7_tekken": Named(r"mistral-small-24b-instruct-2501"),
    "nemotron_h": _CHATML,
    "phi_3": Named(_PHI_3),
    "phi_35": Named(r"phi-?3\.5"),
    "phi_4": Named(r"phi-?4-reasoning"),
    "qwen2_vl": Named(r"qwen-?2(\.5)?-vl"),
    "qwen3": Named(_QWEN_3, text=QWEN_3),
    "qwen3_5": Named(_QWEN_3_5),
    "qwen_25": Named(r"qwen-?2\.?5", text=jinja(QWEN_25)),
    "tokenizer_default": Named(r"."),
}
"""Of Axolotl's ``chat_template``. Its ``alpaca`` is not ours: nothing stands before the first instruction."""

_OF_FAMILIES: dict[str, Named] = {
    "chatml": _CHATML,
    "cohere": Named(r"command-r(?!7b)|aya"),
    "deepseek3": Named(r"deepseek-v3(?!\.)"),
    "empty": Named(
        ours="plain", differs="`empty` trains nothing that ends an answer; here the end of text is trained."
    ),
    "gemma": _GEMMA,
    "gemma2": Named(ours="gemma", differs="`gemma2` also trains <eos> after the last turn."),
    "gemma3": _GEMMA,
    "glm4": Named(r"glm-?4-\d+b"),
    "glm4_moe": Named(r"glm-?4\.[56]", differs=_ALL_THINK),
    "llama2": Named(r"llama-?2.*chat", differs="Llama 2's own writes a blank before the end of an answer."),
    "llama3": _LLAMA_3,
    "llama4": Named(r"llama-?4.*instruct"),
    "ministral": Named(r"ministral-8b"),
    "mistral": Named(_MISTRAL_V3),
    "phi": Named(_PHI_3),
    "phi4": Named(r"phi-?4$"),
    "phi4_mini": Named(r"phi-?4-mini-instruct"),
    "qwen": Named(r"qwen-?2\.?5"),
    "qwen3": Named(_QWEN_3, differs=_ALL_THINK),
    "qwen3_5": Named(_QWEN_3_5, differs=_ALL_THINK),
    "qwen3_5_nothink": _CHATML,
    "qwen3_nothink": _CHATML,
    "seed_oss": Named(r"seed-oss"),
    "smollm": _CHATML,
    "yi": _CHATML,
}
LLAMA_FACTORY_TEMPLATES: dict[str, Named] = _OF_FAMILIES | {
    name: replace(
        _OF_FAMILIES.get(name, Named()),
        text=jinja(turns),
        tokens=turns.tokens,
        thinks=turns.thinks,
        joins=turns.joins,
    )
    for name, turns in LLAMA_FACTORY.items()
}
"""Of LLaMA-Factory's ``template``. Names whose text is another one than the family's own, and is not in ``turns``, are
left out: ``gemma4``, ``gpt_oss``, ``granite4`` and ``lfm2`` begin with a system message of LLaMA-Factory. Those of the
models of ``granite3`` and ``mistral_small`` begin with one that LLaMA-Factory does not have."""

ROUTER_LOSS = ((r"mixtral-8x7b", 0.02), (r"mixtral-8x22b", 0.001))
"""Models, by a pattern of their names in small letters, and ``router_aux_loss_coef`` in their config.json."""
END_OF_TEXT = (
    (
        r"(llama-2-\d+b(-chat)?|llama-\d+b|codellama-\d+b(-python|-instruct)?)(-hf)?|open_llama_\d+b(_v2)?|"
        r"vicuna-\d+b-v[\d.]+(-16k)?|mi[sx]tral-(7b|8x7b|8x22b)(-instruct)?-v0\.\d|tinyllama[-_].*",
        "</s>",
    ),
    (r"(meta-)?llama-3(\.[12])?-\d+b", "<|end_of_text|>"),
    (
        r"falcon-\d+b(-instruct)?|pythia-[\d.]+[mb](-deduped)?|gpt-neox-20b|gpt2(-medium|-large|-xl)?|mpt-\d+b(-instruct)?|"
        r"starcoder(base)?(-\db)?|stablelm-base-alpha-\db|cerebras-gpt-[\d.]+[mb]|redpajama-incite-.*|phi-(1|1_5|2)|"
        r"dolly-v\d-\d+b",
        "<|endoftext|>",
    ),
)
"""Models, by a pattern of the whole of their names in small letters without the owner's, and the token that ends a text
in their vocabularies. Models that others made of them may end it otherwise. Sources: the defaults of transformers'
tokenizers (Llama; GPT-2, GPT-NeoX and CodeGen), Llama 3's own tokenizer, Falcon's table of special tokens."""


def ours_for(named: Named, model: str) -> str:
    """``auto`` or the name of a template of ours; empty if neither is right for a model."""
    if named.family and re.search(named.family, model.lower()):
        return "auto"
    return named.ours


def end_of_text(model: str) -> str:
    """The token that ends a text in a model's vocabulary; empty if the model is not known."""
    name = PurePath(model.lower()).name
    return next((token for family, token in END_OF_TEXT if re.fullmatch(family, name)), "")
