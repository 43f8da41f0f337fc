"""What of a model is trained: an adapter, with which the rest is frozen and perhaps quantised, or some parameters."""

from __future__ import annotations

import re
from typing import Any

from tonnage.migration.models import peft_targets
from tonnage.migration.patterns import patterns_of
from tonnage.migration.sheet import Need, Pick, Sheet, flag, number, text, whole, words

LORA = ("lora", "qlora")
WHOLE = ("full", "none", "")
FREEZE = "freeze"
TRAINED_BLOCKS = 2
"""``freeze_trainable_layers`` where it is not given."""
EVERYTHING = ("all", "all-linear", "all_linear")
PARTS = (
    *("adapter.rank", "adapter.alpha", "adapter.dropout", "adapter.targets", "all_linear", "stacked", "adapter.also"),
    "adapter.scaling",
)
QUANTISING = ("bits", "bits4", "bits8", "double", "quant_type", "quant_method")
CROSS_ATTENTION = r"llama-?3\.2.*vision|mllama"
"""Models whose blocks have layers of that name; expressions over layers are copied from one model to the next."""
BESIDE = {
    **dict.fromkeys(("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings"), "embeddings"),
    **dict.fromkeys(("lm_head", "embed_out", "output"), "head"),
    **dict.fromkeys(("norm", "norms", "ln_f", "layernorm"), "norms"),
}
"""Modules that are trained whole beside an adapter, by their names in models, and what we call them."""


def trained(sheet: Sheet) -> None:
    """Adapter, quantisation of what it leaves frozen, or patterns of parameters."""
    if any(str(value).strip().lower() == FREEZE for value in sheet.raw("lora")):
        _some_blocks(sheet)
        return
    _drop(sheet, ("freeze_layers", "freeze_modules", "freeze_extra"), "Belongs to freeze.")
    kind = sheet.first("lora", _is_lora)
    is_on = kind.value if kind is not None else _is_lora_by_default(sheet)
    if kind is not None and not is_on:
        sheet.drop(kind, "All weights are trained.")
    if not is_on:
        _drop(sheet, (*PARTS, *QUANTISING), "There is no adapter.")
    else:
        _parts(sheet, kind)
        _quantise(sheet, kind)
    _patterns(sheet)


def _some_blocks(sheet: Sheet) -> None:
    """LLaMA-Factory's ``freeze``: the last blocks are trained, or the first, or some of their layers."""
    kind, number_of = sheet.first("lora", lambda value: text(value).lower()), sheet.first("freeze_layers", whole)
    parts, others = sheet.first("freeze_modules", words), sheet.first("freeze_extra", words)
    count = number_of.value if number_of is not None else TRAINED_BLOCKS
    blocks = f"blocks[{-count}:]" if count > 0 else f"blocks[:{-count}]"
    names = parts.value if parts is not None else ["all"]
    patterns = [f"{blocks}.{'' if name == 'all' else name}*" for name in names] if count else []
    patterns += [f"*{name}*" for name in (others.value if others is not None else [])]
    if patterns:
        sheet.put("train", patterns, kind, number_of, parts, others)
    elif number_of is not None:
        sheet.refuse(number_of, "No block would be trained.")
    _drop(sheet, (*PARTS, *QUANTISING), "There is no adapter.")


def _is_lora(value: Any) -> bool:
    word = "none" if value is None or value is False else "lora" if value is True else str(value).strip().lower()
    if word in ("true", "false"):
        return word == "true"
    if word not in (*LORA, *WHOLE):
        raise ValueError("is neither LoRA nor training of all weights")
    return word in LORA


def _is_lora_by_default(sheet: Sheet) -> bool:
    """LLaMA-Factory trains an adapter unless told otherwise."""
    if sheet.program.name != "LLaMA-Factory" or sheet.has("lora"):
        return False
    sheet.notes.append("LLaMA-Factory trains a LoRA adapter where finetuning_type is not given.")
    return True


def _drop(sheet: Sheet, quantities: tuple[str, ...], reason: str) -> None:
    for quantity in quantities:
        for pick in sheet.every(quantity, lambda value: value):
            sheet.drop(pick, reason)


def _parts(sheet: Sheet, kind: Pick[bool] | None) -> None:
    rank = sheet.first("adapter.rank", whole)
    if rank is not None:
        sheet.put("adapter.rank", rank.value, rank, kind)
    else:
        sheet.imply_default("adapter.rank")
        if "adapter.rank" not in sheet.tree:
            need = Need("adapter.rank", "the rank of the adapter, which no key says", "16")
            sheet.leave_open(need, rank, kind)
    alpha = sheet.first("adapter.alpha", number)
    if alpha is not None:
        sheet.put("adapter.alpha", alpha.value, alpha)
    elif sheet.program.name == "LLaMA-Factory" and "adapter.rank" in sheet.tree:
        sheet.imply_default("adapter.alpha", value=float(2 * sheet.tree["adapter.rank"]))
    elif sheet.default("adapter.alpha") is not None:
        sheet.imply_default("adapter.alpha")
    else:
        sheet.leave_open(Need("adapter.alpha", "the alpha of the adapter, which no key says", "32"))
    dropout = sheet.copy("adapter.dropout", number)
    if dropout is None:
        sheet.imply_default("adapter.dropout")
    if kind is not None and rank is None:
        sheet.put("adapter.rank", sheet.tree["adapter.rank"], kind) if "adapter.rank" in sheet.tree else None
    _targets(sheet)
    _beside(sheet)
    sheet.copy("adapter.scaling", lambda value: "rank_stabilised" if flag(value) else "plain")


def _targets(sheet: Sheet) -> None:
    named, every = sheet.first("adapter.targets", _names), sheet.first("all_linear", flag)
    stacked = sheet.first("stacked", _names)
    if named is not None and not re.search(CROSS_ATTENTION, str(sheet.tree.get("model", "")).lower()):
        named = Pick([name for name in named.value if ".cross_attn." not in name], named.givens)
    picks: list[Pick[Any]] = [pick for pick in (named, stacked) if pick is not None and pick.value]
    if every is not None and every.value:
        sheet.put("adapter.targets", "all-linear", every, *picks)
    elif named is not None and named.value == ["all-linear"]:
        sheet.put("adapter.targets", "all-linear", *picks)
    elif picks:
        sheet.put("adapter.targets", [name for pick in picks for name in pick.value], *picks)
    else:
        targets = peft_targets(str(sheet.tree.get("model", "")))
        if sheet.program.name == "TRL" and targets is not None:
            sheet.imply("adapter.targets", targets, "PEFT's choice for models of this name")
        sheet.imply_default("adapter.targets")
        if "adapter.targets" not in sheet.tree:
            sheet.imply("adapter.targets", "all-linear", "nothing says what is adapted")
    for pick in (named, every, stacked):
        if pick is not None and not pick.value:
            sheet.drop(pick, "Other keys say what is adapted.")
    if sheet.tree.get("adapter.targets") == "all-linear":
        sheet.notes.append(
            "Of a mixture of experts, all-linear adapts the experts too, which the other program leaves as they are "
            "where they are stacked in one tensor: name layers in adapter.targets for less."
        )


def _names(value: Any) -> list[str]:
    """Names of layers as patterns: a last part of a name by itself, a path with ``*`` before it."""
    if isinstance(value, list):
        found = [text(item) for item in value]
    elif any(letter in text(value) for letter in "\\()|[]+^$"):
        return [name for name in patterns_of(text(value), whole=True) if _may_be(name)]
    else:
        found = [name.strip() for name in text(value).split(",") if name.strip()]
    if any(name.lower() in EVERYTHING for name in found):
        return ["all-linear"]
    if misplaced := [name for name in found if BESIDE.get(name) == "head"]:
        raise ValueError(f"has {', '.join(misplaced)}, which has no adapter here")
    return [f"*.{name}" if "." in name else name for name in found]


def _may_be(name: str) -> bool:
    """Whether a model may have a layer of a name: expressions pair each part of a block with the layers of all."""
    layer = name.rpartition(".")[2]
    of_attention = layer in ("q_proj", "k_proj", "v_proj", "o_proj")
    of_mlp = layer in ("up_proj", "down_proj", "gate_proj")
    wrapped = "_checkpoint_wrapped_module" in name
    return not (wrapped or (of_attention and ".mlp." in name) or (of_mlp and "_attn." in name))


def _beside(sheet: Sheet) -> None:
    sheet.copy("adapter.also", _known_parts)


def _known_parts(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [name.strip() for name in text(value).split(",")]
    unknown = [str(name) for name in names if str(name) not in BESIDE]
    if unknown:
        raise ValueError(f"has {', '.join(unknown)}: embeddings, the head or norms are trained whole beside an adapter")
    return list(dict.fromkeys(BESIDE[str(name)] for name in names))


def _quantise(sheet: Sheet, kind: Pick[bool] | None) -> None:
    bits, four, eight = sheet.first("bits", whole), sheet.first("bits4", flag), sheet.first("bits8", flag)
    double, of_kind = sheet.first("double", flag), sheet.first("quant_type", text)
    method = sheet.first("quant_method", text)
    asked = 4 if four is not None and four.value else 8 if eight is not None and eight.value else 0
    asked = bits.value if bits is not None else asked
    says: list[Pick[Any]] = [pick for pick in (bits, four, eight) if pick is not None and pick.value]
    is_double = double.value if double is not None else sheet.program.name != "TRL"
    if method is not None and method.value.lower() not in ("bnb", "bitsandbytes", "auto"):
        sheet.refuse(method, f"Frozen weights rest in NF4 or int8 (adapter.quantize), not as {method.value} has them.")
    elif of_kind is not None and of_kind.value.lower() != "nf4" and asked == 4:
        sheet.refuse(of_kind, f"4 bits are NF4, not {of_kind.value}.")
    elif asked == 4:
        sheet.put("adapter.quantize", "nf4-double" if is_double else "nf4", *says, double, of_kind, method)
    elif asked == 8:
        note = "Columns that stand out are not kept apart, as LLM.int8() does."
        sheet.put("adapter.quantize", "int8", *says, note=note)
    elif asked:
        assert bits is not None
        sheet.refuse(bits, f"4 or 8 bits, not {asked}.")
    for pick in (bits, four, eight, double, of_kind, method):
        sheet.drop(pick, "Nothing is quantised." if not asked else "Other keys say how.")
    if asked and kind is not None and "adapter.quantize" in sheet.tree:
        sheet.put("adapter.quantize", sheet.tree["adapter.quantize"], kind)


def _patterns(sheet: Sheet) -> None:
    """Parameters that are trained where there is no adapter."""
    pick = sheet.first("train", _parameters)
    if pick is None:
        return
    if any(key.startswith("adapter.") for key in sheet.tree):
        if all(_names_all_text(given.value) for given in pick.givens):
            sheet.drop(pick, "Towers are left as they are, and beside an adapter nothing else of the model is trained.")
            sheet.notes.append(
                "Axolotl freezes by these names when the adapter is there, whose parameters have other names: it may "
                "find nothing left to train. Here the adapter is trained."
            )
        else:
            sheet.refuse(pick, "Beside an adapter, adapter.also says what is trained whole.")
    else:
        sheet.put("train", pick.value, pick)


ALL_TEXT = {
    "model",
    "model.language_model",
    "language_model",
    "language_model.model",
    "lm_head",
    "language_model.lm_head",
}
"""Modules that are all of a model but its towers."""


def _names_all_text(value: Any) -> bool:
    """Whether expressions name all of a model of text, and so say no more than that its towers are frozen."""
    items = [str(item) for item in (value if isinstance(value, list) else [value])]
    named = {re.sub(r"(\.weight)?\$?$", "", item.removeprefix("^").removesuffix(".*")) for item in items}
    return named <= ALL_TEXT and bool(named - {"lm_head", "language_model.lm_head"})


def _parameters(value: Any) -> list[str]:
    items = value if isinstance(value, list) else [value]
    if not items:
        raise ValueError("names nothing")
    if ranged := [item for item in items if str(item).rstrip().endswith("]") and "[:" in str(item)]:
        raise ValueError(f"has {ranged[0]}: rows of a parameter are not trained apart")
    return list(dict.fromkeys(one for item in items for one in patterns_of(text(item), whole=False)))
