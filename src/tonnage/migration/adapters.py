"""What of a model is trained: an adapter, with which the rest is frozen and perhaps quantised, or some parameters."""

from __future__ import annotations

import re
from typing import Any

from tonnage.migration.draft import Draft, Pick
from tonnage.migration.families import ALL_TEXT, BESIDE, of_family
from tonnage.migration.images import in_text_model, may_have_images, names_tower
from tonnage.migration.keys import asks_for_nothing
from tonnage.migration.patterns import patterns_of
from tonnage.migration.programs import LLAMA_FACTORY_1, LLAMA_FACTORY_YAML, TRL
from tonnage.migration.values import flag, listed, number, text, whole, words

LORA = ("lora", "qlora")
ROTATED = "oft"
"""LLaMA-Factory's word for peft's OFT."""
WHOLE = ("full", "none", "")
OFT_BLOCK_SIZE = 32
"""``oft_block_size`` where it is not given."""
FREEZE = "freeze"
TRAINED_BLOCKS = 2
"""``freeze_trainable_layers`` where it is not given."""
EVERYTHING = ("all", "all-linear", "all_linear")
PARTS = (
    *("adapter.rank", "adapter.alpha", "adapter.dropout", "adapter.targets", "all_linear", "stacked", "adapter.also"),
    *("adapter.scaling", "task_type", "dora", "start", "pissa", "pissa_rounds", "loftq_bits"),
    *("rank_pattern", "alpha_pattern"),
)
PISSA_ROUNDS = 16
"""``pissa_iter`` where it is not given."""
OFT = ("adapter.oft_block_size", "oft_rank", "oft_dropout")
QUANTISED_IN = {4: "nf4", 8: "int8"}
"""Bits of LoftQ -> how weights are quantised."""
LOFTQ_FACTOR = (
    "What quantising takes is divided by what additions are multiplied by; PEFT's is not, unless alpha is rank."
)
HEADS = ("score", "v_head", *(name for name, part in BESIDE.items() if part == "head"))
"""Names of what a model ends in."""
QUANTISING = ("bits", "bits4", "bits8", "double", "quant_type", "quant_method")
CROSS_ATTENTION = r"llama-?3\.2.*vision|mllama"
"""Models whose blocks have layers of that name; expressions over layers are copied from one model to the next."""


def trained(draft: Draft) -> None:
    """Adapter, quantisation of what it leaves frozen, or patterns of parameters."""
    if any(str(setting.value).strip().lower() == FREEZE for setting in draft.settings("lora")):
        _some_blocks(draft)
        return
    draft.drop_every("Belongs to freeze.", "freeze_layers", "freeze_modules", "freeze_extra")
    if _rotates(draft):
        _rotations(draft)
        return
    draft.drop_every("Belongs to OFT.", *OFT)
    kind = draft.first("lora", _is_lora)
    is_on = kind.value if kind is not None else _is_lora_by_default(draft)
    if kind is not None and not is_on:
        draft.drop(kind, "All weights are trained.")
    if not is_on:
        draft.drop_every("There is no adapter.", *PARTS, *QUANTISING)
    else:
        _parts(draft, kind)
        _quantise(draft, kind)
        _begin(draft)
    _patterns(draft)


def has_adapter(draft: Draft) -> bool:
    """Whether an adapter is asked for, whose word is not one that is refused."""
    words_for_it = {str(setting.value).strip().lower() for setting in draft.settings("lora")}
    has_default = not words_for_it and draft.program.name == "LLaMA-Factory"
    return bool(words_for_it & {*LORA, "true"}) or has_default or _rotates(draft)


def _rotates(draft: Draft) -> bool:
    """Whether inputs of layers are rotated, which LLaMA-Factory alone has a word for."""
    words_for_it = {str(setting.value).strip().lower() for setting in draft.settings("lora")}
    return words_for_it == {ROTATED} and draft.program is LLAMA_FACTORY_YAML


def _rotations(draft: Draft) -> None:
    """LLaMA-Factory's ``oft``: peft's rotations, of the layers that ``lora_target`` names."""
    kind, size = draft.first("lora", text), draft.first("adapter.oft_block_size", whole)
    draft.put("adapter.kind", "oft", kind)
    draft.put("adapter.oft_block_size", OFT_BLOCK_SIZE if size is None else size.value, size, kind)
    otherwise = "Blocks are named by their size (oft_block_size), which is the same in all layers."
    draft.only("oft_rank", whole, 0, "oft_block_size says it.", otherwise)
    draft.only("oft_dropout", number, 0, "The default.", "Rotations have no dropout.")
    _targets(draft)
    _beside(draft)
    _quantise(draft, kind)
    draft.drop_every("Belongs to LoRA.", *PARTS)
    _patterns(draft)


def _some_blocks(draft: Draft) -> None:
    """LLaMA-Factory's ``freeze``: the last blocks are trained, or the first, or some of their layers."""
    kind, number_of = draft.first("lora", lambda value: text(value).lower()), draft.first("freeze_layers", whole)
    parts, others = draft.first("freeze_modules", words), draft.first("freeze_extra", words)
    count = number_of.value if number_of is not None else TRAINED_BLOCKS
    blocks = f"blocks[{-count}:]" if count > 0 else f"blocks[:{-count}]"
    names = parts.value if parts is not None else ["all"]
    patterns = [f"{blocks}.{'' if name == 'all' else name}*" for name in names] if count else []
    patterns += [f"*{name}*" for name in (others.value if others is not None else [])]
    if patterns:
        draft.put("train", patterns, kind, number_of, parts, others)
    elif number_of is not None:
        draft.refuse(number_of, "No block would be trained.")
    draft.drop_every("There is no adapter.", *PARTS, *OFT, *QUANTISING)


def _is_lora(value: Any) -> bool:
    word = "none" if value is None or value is False else "lora" if value is True else str(value).strip().lower()
    if word in ("true", "false"):
        return word == "true"
    if word not in (*LORA, *WHOLE):
        raise ValueError("is neither LoRA nor training of all weights")
    return word in LORA


def _is_lora_by_default(draft: Draft) -> bool:
    """LLaMA-Factory and ms-swift train an adapter unless told otherwise."""
    notes = {"LLaMA-Factory": "adapter by default", "ms-swift": "adapter of swift"}
    if draft.program.name not in notes or draft.has("lora"):
        return False
    draft.note(notes[draft.program.name])
    return True


def _parts(draft: Draft, kind: Pick[bool] | None) -> None:
    rank = draft.first("adapter.rank", whole)
    if rank is not None:
        draft.put("adapter.rank", rank.value, rank, kind)
    else:
        draft.imply_default("adapter.rank")
        if "adapter.rank" not in draft.tree:
            draft.leave_open("adapter.rank", "the rank of the adapter, which no key says", kind, example="16")
        elif kind is not None:
            draft.put("adapter.rank", draft.tree["adapter.rank"], kind)
    alpha = draft.copy("adapter.alpha", number)
    if alpha is None and draft.program.name == "LLaMA-Factory" and "adapter.rank" in draft.tree:
        draft.imply_default("adapter.alpha", value=float(2 * draft.tree["adapter.rank"]))
    elif alpha is None and draft.default("adapter.alpha") is not None:
        draft.imply_default("adapter.alpha")
    elif alpha is None:
        draft.leave_open("adapter.alpha", "the alpha of the adapter, which no key says", example="32")
    if _is_without_dropout(draft):
        draft.drop_every("Dropout is switched off there where preferences are learned.", "adapter.dropout")
        draft.imply("adapter.dropout", 0.0, f"{draft.program.name} switches dropout off where it learns preferences")
    draft.copy("adapter.dropout", number)
    draft.imply_default("adapter.dropout")
    _targets(draft)
    _beside(draft)
    otherwise = "Next tokens are predicted, or scores (objective.kind reward)."
    draft.only("task_type", lambda value: text(value).upper(), "CAUSAL_LM", "The default.", otherwise)
    draft.copy("adapter.scaling", lambda value: "rank_stabilised" if flag(value) else "plain")
    _ranks(draft)
    dora(draft)


def dora(draft: Draft) -> None:
    """Directions and lengths of weights apart, where that is asked for."""
    pick = draft.first("dora", flag)
    if pick is not None and pick.value and draft.tree.get("adapter.dropout"):
        draft.refuse(pick, "DoRA has no dropout here: set that of the adapter to 0.")
    elif pick is not None and pick.value:
        draft.put("adapter.kind", "dora", pick)
    draft.drop(pick, "The default.")


def _ranks(draft: Draft) -> None:
    """Ranks and alphas of layers of their own: of both, peft takes the first expression that matches a layer."""
    picks = draft.every("rank_pattern", whole), draft.every("alpha_pattern", number)
    ranks, alphas = ({pick.settings[0].name.partition(".")[2]: pick for pick in those} for those in picks)
    both = [pick for those in picks for pick in those]
    if ranks and alphas and list(ranks) != list(alphas):
        for pick in both:
            draft.refuse(pick, "Ranks and alphas of layers have the same expressions here, in one order.")
        return
    patterns = []
    for expression in ranks or alphas:
        try:
            names = _names(expression)
        except ValueError as error:
            for pick in both:
                draft.refuse(pick, f"{expression} {error}.")
            return
        sizes = {
            name: those[expression].value for name, those in (("rank", ranks), ("alpha", alphas)) if expression in those
        }
        patterns += [{"match": name, **sizes} for name in names]
    if patterns:
        draft.put("adapter.patterns", patterns, *both)


def _begin(draft: Draft) -> None:
    """Where additions begin, if not at zero."""
    start, pissa = draft.first("start", _start), draft.first("pissa", flag)
    rounds, bits = draft.first("pissa_rounds", whole), draft.first("loftq_bits", whole)
    init, number_of = start.value if start is not None else ("zero", 0)
    if pissa is not None and pissa.value:
        init, number_of = "pissa", max(0, rounds.value) if rounds is not None else PISSA_ROUNDS
        draft.put("adapter.init", init, pissa)
    elif bits is not None and bits.value in QUANTISED_IN and (start is None or init == "loftq"):
        init, number_of = "loftq", 0
        draft.put("adapter.init", init, bits, start, note=LOFTQ_FACTOR)
        if "adapter.quantize" not in draft.tree:
            draft.put("adapter.quantize", QUANTISED_IN[bits.value], bits)
    elif init != "zero":
        draft.put("adapter.init", init, start, note=LOFTQ_FACTOR if init == "loftq" else "")
        if init == "loftq" and "adapter.quantize" not in draft.tree:
            draft.put("adapter.quantize", "nf4", start)
    if init != "zero" and number_of:
        draft.put("adapter.rounds", number_of, rounds, pissa if start is None else start)
    draft.drop((start, pissa), "The default: zero.")
    draft.drop((rounds, bits), "Belongs to another way to begin.")


def _start(value: Any) -> tuple[str, int]:
    """``init_lora_weights`` of peft as ``adapter.init`` and ``adapter.rounds``."""
    word = "true" if value is True else text(value).lower()
    if word == "true":
        return "zero", 0
    if fast := re.fullmatch(r"pissa_niter_(\d+)", word):
        return "pissa", int(fast[1])
    if word not in ("pissa", "loftq"):
        raise ValueError("is another way to begin than zero, pissa and loftq")
    return word, 0


def _is_without_dropout(draft: Draft) -> bool:
    """Whether the other program switches dropout off. LLaMA-Factory does not for a reward model, nor its version 1."""
    of_factory = draft.method == "reward" and draft.program is LLAMA_FACTORY_YAML
    if not draft.is_preference or of_factory or draft.program is LLAMA_FACTORY_1:
        return False
    return not any(asks_for_nothing(setting.value) for setting in draft.settings("dropout_off"))


def _beside(draft: Draft) -> None:
    """What is trained whole beside an adapter. The head of a reward model is anyway; it has none of words."""
    if draft.method != "reward":
        draft.copy("adapter.also", _parts_beside)
        return
    task, also = draft.first("task_type", lambda value: text(value).upper()), draft.settings("adapter.also")
    names = [name for setting in also if setting.value for name in words(setting.value)]
    if draft.program is TRL and "score" not in names and (task is None or task.value != "SEQ_CLS"):
        draft.note("head beside an adapter")
    draft.drop(task if task is not None and task.value == "SEQ_CLS" else None, "The head is trained beside it.")
    pick = draft.first(
        "adapter.also", lambda value: _parts_beside([part for part in words(value) if part not in HEADS])
    )
    if pick is not None and pick.value:
        draft.put("adapter.also", pick.value, pick)
    draft.drop(pick, "The head of scores is trained whole anyway, and there is no other.")


def _targets(draft: Draft) -> None:
    named, every = draft.first("adapter.targets", _names), draft.first("all_linear", flag)
    stacked = draft.first("stacked", _names)
    if named is not None:
        named = _of_model(draft, named)
    picks: list[Pick[Any]] = [pick for pick in (named, stacked) if pick is not None and pick.value]
    if every is not None and every.value:
        draft.put("adapter.targets", "all-linear", every, *picks)
    elif named is not None and named.value == ["all-linear"]:
        draft.put("adapter.targets", "all-linear", *picks)
    elif picks:
        draft.put("adapter.targets", [name for pick in picks for name in pick.value], *picks)
    else:
        targets = of_family("peft_targets", draft.model)
        if draft.program.name == "TRL" and targets is not None:
            draft.imply("adapter.targets", targets, "PEFT's choice for models of this name")
        draft.imply_default("adapter.targets")
        if "adapter.targets" not in draft.tree:
            draft.imply("adapter.targets", "all-linear", "nothing says what is adapted")
    empty = [pick for pick in (named, every, stacked) if pick is not None and not pick.value]
    draft.drop(empty, "Other keys say what is adapted.")
    if draft.tree.get("adapter.targets") == "all-linear":
        draft.note("all-linear and experts")


def _of_model(draft: Draft, named: Pick[list[str]]) -> Pick[list[str]] | None:
    """The layers that are adapted, of those that there are: of a tower where it sees images, and without dropout."""
    lacking = of_family("lacking", draft.model) or []
    has_crossing = re.search(CROSS_ATTENTION, draft.model.lower())
    towers = [name for name in named.value if names_tower(name)]
    if towers and may_have_images(draft) and draft.tree.get("adapter.dropout"):
        draft.refuse(named, f"{towers[0]} is a layer of the tower, whose additions have no dropout.")
        return None
    towers = [] if may_have_images(draft) else towers
    layers = [
        in_text_model(name)
        for name in named.value
        if name not in towers
        and (has_crossing or ".cross_attn." not in name)
        and (name.rpartition(".")[2] not in lacking or names_tower(name))
    ]
    if without := [name for name in lacking if any(part.rpartition(".")[2] == name for part in named.value)]:
        draft.note("layers that are lacking", names=", ".join(without))
    if may_have_images(draft) and any("." not in name for name in layers):
        draft.note("layers of towers")
    return Pick(layers, named.settings)


def _names(value: Any) -> list[str]:
    """Names of layers as patterns: a last part of a name by itself, a path with ``*`` before it."""
    if isinstance(value, list):
        names = [text(part) for part in value]
    elif any(letter in text(value) for letter in "\\()|[]+^$"):
        return [name for name in patterns_of(text(value), whole=True) if _may_be(name)]
    else:
        names = [name.strip() for name in text(value).split(",") if name.strip()]
    if any(name.lower() in EVERYTHING for name in names):
        return ["all-linear"]
    if misplaced := [name for name in names if BESIDE.get(name) == "head"]:
        raise ValueError(f"has {', '.join(misplaced)}, which has no adapter here")
    names = [in_text_model(name) for name in names]
    return [f"*.{name}" if "." in name else name for name in names]


def _may_be(name: str) -> bool:
    """Whether a model may have a layer of a name: expressions pair each part of a block with the layers of all."""
    layer = name.rpartition(".")[2]
    of_attention = layer in ("q_proj", "k_proj", "v_proj", "o_proj")
    of_mlp = layer in ("up_proj", "down_proj", "gate_proj")
    wrapped = "_checkpoint_wrapped_module" in name
    return not (wrapped or (of_attention and ".mlp." in name) or (of_mlp and "_attn." in name))


def _parts_beside(value: Any) -> list[str]:
    """Parts of the model that are trained whole beside an adapter, in our words."""
    names = value if isinstance(value, list) else [name.strip() for name in text(value).split(",")]
    unknown = [str(name) for name in names if str(name) not in BESIDE]
    if unknown:
        raise ValueError(f"has {', '.join(unknown)}: embeddings, the head or norms are trained whole beside an adapter")
    return list(dict.fromkeys(BESIDE[str(name)] for name in names))


def _quantise(draft: Draft, kind: Pick[Any] | None) -> None:
    bits, four, eight = draft.first("bits", whole), draft.first("bits4", flag), draft.first("bits8", flag)
    double, of_kind = draft.first("double", flag), draft.first("quant_type", text)
    method = draft.first("quant_method", text)
    says: list[Pick[Any]] = [pick for pick in (bits, four, eight) if pick is not None and pick.value]
    by_flag = next((size for size, pick in ((4, four), (8, eight)) if pick is not None and pick.value), 0)
    num_bits = bits.value if bits is not None else by_flag
    is_double = double.value if double is not None else draft.program.name != "TRL"
    if method is not None and method.value.lower() not in ("bnb", "bitsandbytes", "auto"):
        draft.refuse(method, f"Frozen weights rest in NF4 or int8 (adapter.quantize), not as {method.value} has them.")
    elif of_kind is not None and of_kind.value.lower() != "nf4" and num_bits == 4:
        draft.refuse(of_kind, f"4 bits are NF4, not {of_kind.value}.")
    elif num_bits == 4:
        draft.put("adapter.quantize", "nf4-double" if is_double else "nf4", *says, double, of_kind, method)
    elif num_bits == 8:
        note = "Columns that stand out are not kept apart, as LLM.int8() does."
        draft.put("adapter.quantize", "int8", *says, note=note)
    elif num_bits:
        assert bits is not None
        draft.refuse(bits, f"4 or 8 bits, not {num_bits}.")
    elif draft.is_quantised:
        draft.imply("adapter.quantize", "nf4-double", "its weights are of few bits there")
    draft.drop(
        (bits, four, eight, double, of_kind, method), "Nothing is quantised." if not num_bits else "Other keys say how."
    )
    if num_bits and kind is not None and "adapter.quantize" in draft.tree:
        draft.put("adapter.quantize", draft.tree["adapter.quantize"], kind)


def _patterns(draft: Draft) -> None:
    """Parameters that are trained where there is no adapter."""
    pick = draft.first("train", _parameters)
    if pick is None:
        return
    if any(key.startswith("adapter.") for key in draft.tree):
        if all(_names_all_text(setting.value) for setting in pick.settings):
            draft.drop(pick, "Towers are left as they are, and beside an adapter nothing else of the model is trained.")
            draft.note("towers frozen by name")
        else:
            draft.refuse(pick, "Beside an adapter, adapter.also says what is trained whole.")
    else:
        draft.put("train", pick.value, pick)


def _names_all_text(value: Any) -> bool:
    """Whether expressions name all of a model of text, and so say no more than that its towers are frozen."""
    expressions = [str(part).removeprefix("^").removesuffix(".*") for part in listed(value)]
    named = {re.sub(r"(\.weight)?\$?$", "", expression) for expression in expressions}
    return named <= ALL_TEXT and bool(named - {"lm_head", "language_model.lm_head"})


def _parameters(value: Any) -> list[str]:
    expressions = listed(value)
    if not expressions:
        raise ValueError("names nothing")
    if ranged := [part for part in expressions if str(part).rstrip().endswith("]") and "[:" in str(part)]:
        raise ValueError(f"has {ranged[0]}: rows of a parameter are not trained apart")
    return list(dict.fromkeys(pattern for part in expressions for pattern in patterns_of(text(part), whole=False)))
