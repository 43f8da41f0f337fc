"""How rows are shown to the model, and what of them is trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tonnage.files.paths import is_jinja
from tonnage.migration.draft import Draft, Pick
from tonnage.migration.programs import TRL, TUTORIAL
from tonnage.migration.prompts import PromptFormat
from tonnage.migration.prompts import jinja as prompt_template
from tonnage.migration.sources import ImportedSources
from tonnage.migration.templates import JINJA, Named, ours_for
from tonnage.migration.turns import TurnFormats
from tonnage.migration.turns import jinja as turns_template
from tonnage.migration.values import flag, optional, text

FALLBACK = "tokenizer_default_fallback_"
BUILT_IN = {"alpaca", "chatml", "llama3"}
"""Templates of ours of which types of rows have the same text."""


def template(draft: Draft, sources: ImportedSources, named: Mapping[str, Named]) -> None:
    """The template of rows that a program lists: one for all of them."""
    top, jinja = draft.first("chat_template", text), draft.first("jinja", text)
    picks = [*sources.templates, *([top] if top is not None else [])]
    if jinja is not None:
        if (jinja.value.endswith(JINJA) or is_jinja(jinja.value)) and "chat" in sources.shown:
            draft.put("data.template", jinja.value, jinja)
        else:
            draft.refuse(jinja, "A Jinja file, or a template's text, of rows that are conversations.")
    elif built_in := sorted(sources.shown & BUILT_IN):
        draft.imply("data.template", built_in[0], f"rows of type {built_in[0]} are shown so")
        if draft.method in ("pairs", "kto"):
            draft.note("ends of answers")
    elif sources.prompt is not None:
        _of_formats(draft, sources.prompt)
    elif picks and sources.shown != {"text"}:
        _named(draft, picks[0], named)
    elif "chat" in sources.shown:
        draft.imply("data.template", "auto", "the tokenizer's own by default")
    is_fixed = draft.is_preference and bool(sources.shown & BUILT_IN)
    for pick in picks:
        if sources.shown == {"text"}:
            draft.drop(pick, "Text is trained as it is.")
        elif is_fixed or ("data.template" in draft.tree and pick.value == picks[0].value):
            draft.drop(pick, "What the model is told later; rows are shown as their type says.")
        else:
            draft.refuse(pick, "One template shows all rows.")
    template_arguments(draft)


def _of_formats(draft: Draft, prompt: PromptFormat | TurnFormats) -> None:
    """A template that has what formats write around the columns of a row."""
    if isinstance(prompt, TurnFormats):
        draft.imply("data.template", turns_template(prompt), "the formats of the rows' type")
        draft.imply("data.control_tokens", "keep", "texts in these formats may hold special tokens")
        is_at_border = prompt.joins
    else:
        draft.imply("data.template", prompt_template(prompt), "the prompt of the rows' type")
        is_at_border = not (prompt.with_input.endswith("\n") and prompt.without_input.endswith("\n"))
    if is_at_border:
        draft.note("tokens at the border")


def _named(draft: Draft, pick: Pick[str], named: Mapping[str, Named]) -> None:
    name, model = pick.value, draft.model
    if name.startswith(FALLBACK):
        draft.put("data.template", "auto", pick, note="Where the tokenizer has none, the account says what is taken.")
        return
    known_template = named.get(name)
    if known_template is None:
        draft.refuse(
            pick,
            f"No template has the text of {name} here: write it into the config (data.template), or take the model's "
            "own (data.template: auto).",
        )
    elif ours := ours_for(known_template, model, has_images=draft.has_images):
        is_copy = ours == "auto" and name != "tokenizer_default" and not known_template.differs
        note = f"The model's own, of which {name} is a copy." if is_copy else known_template.differs
        draft.put("data.template", ours, pick, note=note)
    elif draft.has_images and (known_template.ours or known_template.text):
        reason = f"{name} has no place for images here: take the model's own (data.template: auto), or another text."
        draft.refuse(pick, reason)
    elif known_template.text:
        _written_out(draft, pick, known_template)
    else:
        draft.refuse(
            pick,
            f"{model or 'The model'} may have another text than {name}: write that into the config (data.template), or "
            "take the model's own (data.template: auto).",
        )


def _written_out(draft: Draft, pick: Pick[str], known_template: Named) -> None:
    """A template whose text stands in the config, for the model may have another one."""
    turns = known_template.turns
    if turns is not None and turns.thinks and any(history.value for history in draft.every("mask_history", flag)):
        draft.refuse(pick, "With mask_history earlier answers have no thought: write it into data.template.")
        return
    draft.put("data.template", known_template.text, pick, note="Written out, for the model's own may be another text.")
    if turns is not None and turns.tokens:
        draft.imply("data.added_tokens", list(turns.tokens), f"{pick.value} has them added")
    if turns is not None and turns.joins:
        draft.note("tokens at the border")


def template_arguments(draft: Draft) -> None:
    """What a template is told besides the messages."""
    arguments: dict[str, Any] = {}
    picks: list[Pick[Any]] = []
    for pick in draft.every("data.template_arguments", lambda value: value):
        name = pick.settings[0].name.partition(".")[2]
        if pick.value is None:
            draft.drop(pick, "Not set.")
        elif "." in name:
            draft.refuse(pick, "An argument of a template is one value, or a list.")
        else:
            arguments[name] = pick.value
            picks.append(pick)
    if arguments:
        draft.put("data.template_arguments", arguments, *picks)
    thinking = draft.first("thinking", flag)
    if thinking is not None and not thinking.value:
        draft.put("data.template_arguments", {**arguments, "enable_thinking": False}, thinking)
    draft.drop(thinking, "Templates that ask think by default.")


def template_of_arguments(draft: Draft) -> None:
    """The template that TRL's arguments name."""
    template = draft.first("data.template", text)
    if template is not None and (template.value.endswith(JINJA) or is_jinja(template.value)):
        draft.put("data.template", template.value, template)
    else:
        draft.refuse(template, "A Jinja file, not another tokenizer: save its chat template as one.")


def mask(draft: Draft, shown: Collection[str] = ()) -> None:
    """Which tokens are trained. ``shown`` says how rows are, where a program lists them."""
    if draft.is_preference:
        picks = ("train_on_inputs", "mask_history", "assistant_only", "completion_only")
        draft.drop_every("Answers are judged whole, and nothing before them.", *picks)
        return
    inputs, last = draft.first("train_on_inputs", flag), draft.first("mask_history", flag)
    assistant, completion = draft.first("assistant_only", flag), draft.first("completion_only", optional(flag))
    enabled = [pick for pick in (assistant, completion) if pick is not None and pick.value]
    disabled = [pick for pick in (assistant, completion) if pick is not None and pick.value is False]
    if inputs is not None and inputs.value:
        draft.put("data.train_on", "all", inputs)
    elif last is not None and last.value:
        draft.put("data.train_on", "last", last)
    elif inputs is not None:
        draft.put("data.train_on", "assistant", inputs)
    elif enabled:
        draft.put("data.train_on", "assistant", *enabled)
    elif disabled:
        note = "" if completion in disabled else "Of rows with prompt and completion, TRL trained the completion alone."
        draft.put("data.train_on", "all", *disabled, note=note)
    elif draft.program is TUTORIAL:
        draft.imply("data.train_on", "all", "the script trains every token")
    elif draft.program is TRL:
        draft.imply("data.train_on", "all", "TRL trains every token of conversations and of text by default")
        draft.note("completion alone")
    elif set(shown) - {"text"}:
        draft.imply("data.train_on", "assistant", "what the assistant says is trained by default")
    draft.drop((pick for pick in (inputs, last) if pick is not None and not pick.value), "Off.")
    draft.drop(completion if completion is not None and completion.value is None else None, "The default.")
    draft.drop((inputs, last, assistant, completion), "Other keys decide data.train_on.")


def special_tokens(draft: Draft) -> None:
    """Whether tokens are added to what a template writes. They never are here, and a text always gets its tokenizer's,
    so only where a template is named are all rows known to be conversations."""
    added = draft.first("special_tokens", flag)
    if added is None:
        return
    if added.value == ("data.template" not in draft.tree):
        draft.drop(added, "So it is here.")
    elif added.value:
        draft.refuse(added, "Nothing is added to what a template writes: write the tokens into it.")
    else:
        draft.refuse(added, "A text gets what its tokenizer adds; false is for conversations, with chat_template.")
