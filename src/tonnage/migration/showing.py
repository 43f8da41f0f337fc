"""How rows of Axolotl and LLaMA-Factory are shown to the model, and what of them is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.files.paths import is_jinja
from tonnage.migration import axolotl_rows, factory_rows
from tonnage.migration.keys import AXOLOTL, LLAMA_FACTORY, VERSION_1
from tonnage.migration.models import end_of_text
from tonnage.migration.programs import LLAMA_FACTORY_1
from tonnage.migration.prompts import jinja as prompt_template
from tonnage.migration.rows import Listed
from tonnage.migration.sheet import Pick, Sheet, flag, number, text, texts, words
from tonnage.migration.templates import (
    AXOLOTL_TEMPLATES,
    JINJA,
    LLAMA_FACTORY_TEMPLATES,
    Named,
    ours_for,
)

BORDER = (
    "The other program makes tokens of a prompt and of its answer apart, here they are made of both in one: tokens at "
    "the border may be others where a prompt does not end in a line break."
)
FALLBACK = "tokenizer_default_fallback_"


def lists_data_sets(sheet: Sheet) -> bool:
    """Whether rows are told as one of these programs tells them."""
    return any(sheet.files.has(table) for table in (AXOLOTL, LLAMA_FACTORY, VERSION_1))


def rows_and_template(sheet: Sheet) -> None:
    """Sources, validation, template and mask. The model must be known before."""
    is_axolotl = sheet.files.has(AXOLOTL)
    if is_axolotl:
        found = axolotl_rows.listed(sheet, "axolotl_rows")
        axolotl_rows.put_listed(sheet, "data.train", found)
        axolotl_rows.put_listed(sheet, "data.validation", axolotl_rows.listed(sheet, "axolotl_tests"))
        axolotl_rows.stream(sheet)
    else:
        found = factory_rows.factory(sheet) or factory_rows.factory_1(sheet) or Listed()
    _fraction(sheet)
    sheet.copy("data.duplicates", lambda value: "drop" if flag(value) else "keep")
    _order(sheet)
    _stage(sheet, found)
    named = AXOLOTL_TEMPLATES if is_axolotl else LLAMA_FACTORY_TEMPLATES
    _template(sheet, found, named)
    tokens(sheet)
    _length(sheet, found)
    _mask(sheet, found)
    if not is_axolotl and "chat" in found.shown:
        _of_llama_factory(sheet)


def _of_llama_factory(sheet: Sheet) -> None:
    """What LLaMA-Factory does with conversations otherwise than a run here."""
    if sheet.tree.get("data.train_on") != "all":
        sheet.notes.append(
            "LLaMA-Factory also trains the line break that templates such as ChatML write after a turn; here it is "
            "context."
        )
    if sheet.program is LLAMA_FACTORY_1:
        sheet.notes.append(
            "LLaMA-Factory 1 of 0.9.5 also trains the words that open an answer, such as <|im_start|>assistant, and "
            "later ones make a sample of each answer with what comes before it, which its batch counts; here a "
            "conversation is one sample, and all of its answers are trained in it."
        )
        if not any(key.startswith("adapter.") for key in sheet.tree):
            sheet.notes.append("LLaMA-Factory 1 decays norms and biases too; here optimizer.weight_decay leaves them.")
    elif sheet.tree.get("data.over_length", "truncate") == "truncate":
        sheet.notes.append(
            "Of a turn that is too long LLaMA-Factory cuts prompt and answer each in proportion to its length; here "
            "the end of the conversation is cut off."
        )


def _fraction(sheet: Sheet) -> None:
    pick = sheet.first("validation_fraction", number)
    if pick is None:
        return
    if pick.value == 0:
        sheet.drop(pick, "No validation rows.")
    elif "data.validation" in sheet.tree:
        sheet.drop(pick, "Other rows are evaluated.")
    elif pick.value < 1:
        sheet.put("data.validation", pick.value, pick)
    else:
        sheet.refuse(pick, "A fraction of the rows, below 1.")


def _order(sheet: Sheet) -> None:
    """Rows one after the other. Axolotl shuffles several data sets as it merges them, unless it is told otherwise."""
    asked, unshuffled = sheet.first("curriculum", flag), sheet.first("unshuffled", flag)
    merged, before = sheet.first("merged", flag), sheet.first("before_merging", flag)
    if unshuffled is not None and unshuffled.value:
        sheet.put("data.order", "given", unshuffled)
    sheet.drop(unshuffled, "Off.")
    sources = sheet.tree.get("data.train")
    is_merged = isinstance(sources, list) and len(sources) > 1
    is_shuffled = is_merged and (merged is None or merged.value or (before is not None and before.value))
    if asked is not None and asked.value and is_shuffled:
        sheet.drop(asked, "Several data sets are shuffled when they are merged: packs are, anew in each epoch.")
    elif asked is not None and asked.value:
        sheet.put("data.order", "given", asked, merged)
    for pick in (asked, merged, before):
        if pick is not None:
            sheet.drop(pick, "Packs are shuffled, by the seed." if not pick.value else "Rows have been merged then.")


def _stage(sheet: Sheet, found: Listed) -> None:
    """LLaMA-Factory's stage: with ``pt`` rows are text, under the name of a prompt, packed unless told otherwise."""
    pick = sheet.first("stage", text)
    if pick is None:
        return
    if pick.value == "sft":
        sheet.drop(pick, "Supervised fine-tuning.")
    elif pick.value != "pt":
        sheet.refuse(pick, "Supervised fine-tuning, or pt: no preferences, no rewards.")
    elif isinstance(sheet.tree.get("data.train"), list):
        sources = []
        for source in sheet.tree["data.train"]:
            column = source.get("columns", {}).get("instruction", "instruction")
            plain = {key: value for key, value in source.items() if key not in ("between", "columns")}
            sources.append({**plain, "format": "text"} | ({"columns": {"text": column}} if column != "text" else {}))
        sheet.tree["data.train"] = []
        sheet.put("data.train", sources, pick)
        found.shown = {"text"}
        if all(packing.value for packing in sheet.every("data.pack", flag)):
            sheet.imply("data.over_length", "split", "packed rows of stage pt are cut in pieces")
        if not sheet.has("data.pack"):
            sheet.imply("data.pack", True, "rows of stage pt are packed by default")
    else:
        sheet.put("data.train", [], pick) if "data.train" in sheet.tree else sheet.drop(pick, "No data set is named.")


def _template(sheet: Sheet, found: Listed, named: Mapping[str, Named]) -> None:
    top, jinja = sheet.first("chat_template", text), sheet.first("jinja", text)
    asked = [*found.templates, *([top] if top is not None else [])]
    if jinja is not None:
        if (jinja.value.endswith(JINJA) or is_jinja(jinja.value)) and "chat" in found.shown:
            sheet.put("data.template", jinja.value, jinja)
        else:
            sheet.refuse(jinja, "A Jinja file, or a template's text, of rows that are conversations.")
    elif "alpaca" in found.shown:
        sheet.imply("data.template", "alpaca", "rows of type alpaca are shown so")
    elif found.prompt is not None:
        sheet.imply("data.template", prompt_template(found.prompt), "the prompt of the rows' type")
        if not (found.prompt.with_input.endswith("\n") and found.prompt.without_input.endswith("\n")):
            sheet.notes.append(BORDER)
    elif asked and found.shown != {"text"}:
        _named(sheet, asked[0], named)
    elif "chat" in found.shown:
        sheet.imply("data.template", "auto", "the tokenizer's own by default")
    for pick in asked:
        if found.shown == {"text"}:
            sheet.drop(pick, "Text is trained as it is.")
        elif "data.template" in sheet.tree and pick.value == asked[0].value:
            sheet.drop(pick, "What the model is told later; rows are shown as their type says.")
        else:
            sheet.refuse(pick, "One template shows all rows.")
    _arguments(sheet)


def _named(sheet: Sheet, pick: Pick[str], named: Mapping[str, Named]) -> None:
    name, model = pick.value, str(sheet.tree.get("model", ""))
    if name.startswith(FALLBACK):
        sheet.put("data.template", "auto", pick, note="Where the tokenizer has none, the account says what is taken.")
        return
    known = named.get(name)
    ours = ours_for(known, model) if known is not None else ""
    if known is not None and known.text and not ours:
        _written_out(sheet, pick, known)
    elif known is not None and ours:
        is_copy = ours == "auto" and name != "tokenizer_default" and not known.differs
        note = f"The model's own, of which {name} is a copy." if is_copy else known.differs
        sheet.put("data.template", ours, pick, note=note)
    elif known is not None:
        sheet.refuse(
            pick,
            f"{model or 'The model'} may have another text than {name}: write that into the config (data.template), or "
            "take the model's own (data.template: auto).",
        )
    else:
        sheet.refuse(
            pick,
            f"No template has the text of {name} here: write it into the config (data.template), or take the model's "
            "own (data.template: auto).",
        )


def _written_out(sheet: Sheet, pick: Pick[str], known: Named) -> None:
    """A template whose text stands in the config, for the model may have another one."""
    turns = known.turns
    if turns is not None and turns.thinks and any(asked.value for asked in sheet.every("mask_history", flag)):
        sheet.refuse(pick, "With mask_history earlier answers have no thought: write it into data.template.")
        return
    sheet.put("data.template", known.text, pick, note="Written out, for the model's own may be another text.")
    if turns is not None and turns.tokens:
        sheet.imply("data.added_tokens", list(turns.tokens), f"{pick.value} has them added")
    if turns is not None and turns.joins:
        sheet.notes.append(BORDER)


def _arguments(sheet: Sheet) -> None:
    given: dict[str, Any] = {}
    picks: list[Pick[Any]] = []
    for pick in sheet.every("data.template_arguments", lambda value: value):
        name = pick.givens[0].name.partition(".")[2]
        if pick.value is None:
            sheet.drop(pick, "Not set.")
        elif "." in name:
            sheet.refuse(pick, "An argument of a template is one value, or a list.")
        else:
            given[name] = pick.value
            picks.append(pick)
    if given:
        sheet.put("data.template_arguments", given, *picks)
    thinking = sheet.first("thinking", flag)
    if thinking is not None and not thinking.value:
        sheet.put("data.template_arguments", {**given, "enable_thinking": False}, thinking)
    elif thinking is not None:
        sheet.drop(thinking, "Templates that ask think by default.")


def tokens(sheet: Sheet) -> None:
    """Tokens that a vocabulary is given or that get another meaning, and what becomes of them in rows."""
    sheet.copy("data.control_tokens", lambda value: "text" if flag(value) else "keep")
    eos = sheet.first("data.eos_token", text)
    if eos is not None and eos.value == end_of_text(str(sheet.tree.get("model", ""))):
        sheet.drop(eos, "The model's own.")
    elif eos is not None:
        sheet.put("data.eos_token", eos.value, eos)
    added = sheet.first("data.added_tokens", _listed_tokens)
    brought = {"<|im_start|>", "<|im_end|>"} if sheet.tree.get("data.template") == "chatml" else set()
    if added is not None and set(added.value) <= brought:
        sheet.drop(added, "The template brings them along.")
    elif added is not None:
        sheet.put("data.added_tokens", added.value, added)
    if "data.added_tokens" in sheet.tree or "data.eos_token" in sheet.tree:
        sheet.notes.append(
            "Rows of tokens that are new to the vocabulary begin as the mean of the others; embedding and head must be "
            "trained then, with an adapter by adapter.also."
        )


def _listed_tokens(value: Any) -> list[str]:
    """Axolotl lists them, LLaMA-Factory writes commas between them."""
    return texts(value) if isinstance(value, list) else words(value)


OVER_LENGTH = {"drop": "drop", "truncate": "truncate", "raise": "error"}


def _length(sheet: Sheet, found: Listed) -> None:
    """What becomes of rows too long: Axolotl cuts text in pieces, and leaves other rows out."""
    excess = sheet.first("data.over_length", text)
    if found.shown == {"text"} and sheet.files.has(AXOLOTL):
        sheet.imply("data.over_length", "split", "rows of type completion are cut in pieces")
        sheet.drop(excess, "Text is cut in pieces before.")
        return
    if excess is not None and excess.value.lower() in OVER_LENGTH:
        sheet.put("data.over_length", OVER_LENGTH[excess.value.lower()], excess)
    elif excess is not None:
        sheet.refuse(excess, f"{', '.join(OVER_LENGTH)}, not {excess.value}.")
    else:
        sheet.imply_default("data.over_length")
    if sheet.tree.get("data.over_length") in ("drop", "truncate"):
        sheet.notes.append("More than data.max_loss (1%) of the supervised tokens lost to the length stops the run.")


def _mask(sheet: Sheet, found: Listed) -> None:
    inputs, last = sheet.first("train_on_inputs", flag), sheet.first("mask_history", flag)
    if inputs is not None and inputs.value:
        sheet.put("data.train_on", "all", inputs)
    elif last is not None and last.value:
        sheet.put("data.train_on", "last", last)
    elif inputs is not None:
        sheet.put("data.train_on", "assistant", inputs)
    elif found.shown and found.shown != {"text"}:
        sheet.imply("data.train_on", "assistant", "what the assistant says is trained by default")
    for pick in (inputs, last):
        if pick is not None:
            sheet.drop(pick, "Off." if not pick.value else "Other keys decide data.train_on.")


HARMLESS = (
    "CutCrossEntropyPlugin",
    "LigerPlugin",
    "KernelsPlugin",
    "ExpertParallelPlugin",
    "LMEvalPlugin",
    "SwanLabPlugin",
)
"""Axolotl's plug-ins that compute the same, or look on."""


def plugins(sheet: Sheet) -> None:
    """Axolotl's plug-ins."""
    pick = sheet.first("plugins", _plugin_names)
    if pick is None:
        return
    others = [name for name in pick.value if name.rpartition(".")[2] not in HARMLESS]
    if others:
        sheet.refuse(pick, f"{', '.join(name.rpartition('.')[2] for name in others)}: not there.")
    else:
        sheet.drop(pick, "They compute the same faster, or look on.")


def _plugin_names(value: Any) -> list[str]:
    return [
        str(next(iter(one), "")) if isinstance(one, dict) else text(one)
        for one in (value if isinstance(value, list) else [value])
    ]
