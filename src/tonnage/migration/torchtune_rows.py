"""Rows of torchtune's data sets, by the names of what builds them, and how its tokenizers show them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tonnage.migration import lengths, rendering
from tonnage.migration.draft import Draft, Pick
from tonnage.migration.sources import PART, ImportedSources, Leaves, data_sets, part_of
from tonnage.migration.torchtune_chats import CHAT_FORMATS, NAMED, PROMPTS, PromptTemplate, jinja
from tonnage.migration.values import flag, optional, text, texts, whole
from tonnage.migration.yaml_files import read_data

DATA_SETS: Mapping[str, Mapping[str, Any]] = read_data("torchtune_rows")["datasets"]
BUILDERS = "torchtune.datasets."
FILE_KINDS = ("json", "csv", "parquet", "text", "arrow")
"""``source`` of rows in files, which ``data_files`` names."""
STYLES = {"sharegpt": "sharegpt", "openai": "messages"}
SYSTEM = "One system message for all rows: give each data set the same, or write it into the rows."


def rows(draft: Draft) -> None:
    """Sources, how long their rows may be, how they are shown, and what of them is trained."""
    sources = ImportedSources()
    systems: list[Pick[str] | None] = []
    held_out = _held_out(draft)
    for leaves in data_sets(draft, "tune_rows"):
        if held_out and "split" in leaves:
            sources.picks.append(leaves.pop("split"))
        systems.append(_add(draft, leaves, sources))
    if sources.entries:
        draft.put("data.train", sources.entries, *sources.picks)
    _validation(draft, held_out)
    _lengths(draft, sources)
    _template(draft, sources, systems)
    if not draft.is_preference and not draft.has("train_on_inputs") and _trains_inputs(draft):
        draft.imply("data.train_on", "all", "train_on_input true by default")
    rendering.mask(draft, sources.shown)
    if draft.tree.get("data.train_on") == "assistant" and not draft.is_preference:
        draft.note("openers of torchtune")
    order = draft.first("tune_shuffle", flag)
    if order is not None and not order.value:
        draft.put("data.order", "given", order)
    draft.drop(order, "Packs are shuffled, by the seed.")


def _trains_inputs(draft: Draft) -> bool:
    """Whether any of what builds the rows trains what is asked unless told otherwise."""
    components = [setting for setting in draft.settings("tune_rows") if setting.name.endswith("_component_")]
    return any(DATA_SETS.get(str(named.value).rpartition(".")[2], {}).get("inputs") for named in components)


def _add(draft: Draft, leaves: Leaves, sources: ImportedSources) -> Pick[str] | None:
    """Add a data set to the sources. Returns the system message that its rows get."""
    every = list(leaves.values())
    component = leaves.pop("_component_", None)
    if component is None:
        draft.refuse(every, "Nothing names what builds this data set (_component_).")
        return None
    name = str(component.value)
    builder = DATA_SETS.get(name.removeprefix(BUILDERS))
    if builder is None:
        names = ", ".join(DATA_SETS)
        draft.refuse(component, f"Known are {names}: rows of another kind have to be written into files.")
        draft.drop(leaves.values(), "Belongs to a data set that is not carried over.")
        return None
    if builder.get("method", "supervised") != draft.method:
        draft.refuse(every, f"Rows for {builder.get('method', 'supervised')} training, and the run is another one.")
        return None
    try:
        entry, picks = _entry(builder, leaves)
    except ValueError as error:
        draft.refuse(every, f"Of this data set a value {error}.")
        return None
    system = leaves.pop("new_system_prompt", None)
    if system is not None:
        entry["system"] = "drop"
        picks.append(system)
    for name, pick in leaves.items():
        draft.apply("tune_rows", Pick(f"{name}={str(pick.value).lower()}", pick.settings))
    sources.entries.append(entry)
    sources.picks += [component, *picks]
    sources.shown.add(builder.get("shown", "chat"))
    return None if system is None else Pick(str(system.value), system.settings)


def _entry(builder: Mapping[str, Any], leaves: Leaves) -> tuple[dict[str, Any], list[Pick[Any]]]:
    """A source, and what decides it; what that is, is taken out of the leaves. Raises ``ValueError``."""
    picks: list[Pick[Any]] = []

    def take(name: str) -> Any:
        pick = leaves.pop(name, None)
        if pick is None:
            return None
        picks.append(pick)
        return pick.value

    source, files = take("source"), take("data_files")
    path = text(source or builder.get("source", ""))
    entry: dict[str, Any] = {"path": path}
    if path in FILE_KINDS:
        if files is None:
            raise ValueError(f"is {path}, and data_files names no file")
        named = texts(files)
        entry["path"] = named[0] if len(named) == 1 else named
    elif files is not None:
        entry["files"] = texts(files)
    is_other = source is not None and source != builder.get("source")
    entry |= {key: value for key, value in builder["entry"].items() if key == "format" or not is_other}
    if (folder := take("data_dir")) is not None:
        entry["files"] = [f"{text(folder).rstrip('/')}/*"]
    for theirs, ours in (("name", "name"), ("subset", "name"), ("revision", "revision")):
        if (value := take(theirs)) is not None:
            entry[ours] = text(value)
    if (style := take("conversation_style")) is not None:
        if style not in STYLES:
            raise ValueError(f"is {style}, not {' or '.join(STYLES)}")
        entry["format"] = STYLES[style]
    columns = dict(builder.get("columns", {}))
    for theirs, ours in (("conversation_column", "messages"), ("column", "text")):
        if (value := take(theirs)) is not None:
            columns[ours] = text(value)
    mapped = {name: take(f"column_map.{name}") for name in builder.get("map", {}) if f"column_map.{name}" in leaves}
    columns |= {builder["map"][name]: text(value) for name, value in mapped.items()}
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if columns.get("messages") in ("messages", "conversations"):
        del columns["messages"]  # which are looked for
    if columns:
        entry["columns"] = columns
    if (split := take("split")) is not None:
        entry |= part_of(split)
    return entry, picks


def _held_out(draft: Draft) -> float | None:
    """The share of the rows that are evaluated, where training and validation are two parts of one split."""
    if all(setting.value in (None, "", "null", "None") for setting in draft.settings("evaluate.every")):
        return None
    trained, evaluated = (
        {
            setting.name.partition(".")[2]: setting.value
            for setting in sorted(draft.settings(quantity), key=lambda setting: -setting.rank)
        }
        for quantity in ("tune_rows", "tune_tests")
    )
    first, last = (PART.fullmatch(str(side.get("split", ""))) for side in (trained, evaluated))
    is_one = all(trained.get(key) == evaluated.get(key) for key in ("_component_", "source", "data_files", "name"))
    if not is_one or first is None or last is None or first[1] != last[1]:
        return None
    is_divided = first[4] == last[2] and first[5] == last[3] == "%" and not first[2] and not last[4]
    return round(1 - int(first[4]) / 100, 6) if is_divided else None


def _validation(draft: Draft, held_out: float | None) -> None:
    """Rows to evaluate on, where the file asks for evaluations."""
    every = draft.first("evaluate.every", whole)
    if every is None:
        draft.drop_every("Nothing is evaluated: run_val_every_n_steps is not set.", "tune_tests")
        return
    if not draft.has("tune_tests"):
        draft.drop(every, "There are no rows to evaluate on (dataset_val).")
        return
    draft.put("evaluate.every", every.value, every)
    draft.imply("evaluate.before", False, "nothing is evaluated before the first step")
    if held_out is not None:
        picks = draft.every("tune_tests", lambda value: value)
        draft.put("data.validation", held_out, *picks, note="The same share; other rows.")
        return
    sources = ImportedSources()
    for leaves in data_sets(draft, "tune_tests"):
        for name in ("packed", "train_on_input"):
            draft.drop(leaves.pop(name, None), "Rows are evaluated as they are trained.")
        _add(draft, leaves, sources)
    if sources.entries:
        draft.put("data.validation", sources.entries, *sources.picks)


def _lengths(draft: Draft, sources: ImportedSources) -> None:
    """The longest conversation; torchtune cuts what is longer, and nothing where no length is given."""
    longest = draft.first("data.max_length", optional(whole))
    if longest is not None and longest.value is None:
        draft.drop(longest, "Not set.")
    lengths.lengths(draft)
    if draft.is_preference or "data.max_length" not in draft.tree:
        draft.drop_every("Nothing is cut.", "tune_truncation")
        return
    draft.only("tune_truncation", text, "right", "Ends are cut off.", "Only ends are cut off.")
    if sources.shown == {"text"} and draft.tree.get("data.pack"):
        draft.imply("data.over_length", "split", "text is cut at the borders of packs")
    else:
        draft.imply("data.over_length", "truncate", "rows are cut at max_seq_len")
        draft.note("much too long")


def _template(draft: Draft, sources: ImportedSources, systems: list[Pick[str] | None]) -> None:
    """The template that a tokenizer is, as Jinja."""
    tokenizer = draft.first("tune_tokenizer", text)
    prompts = draft.every("tune_prompt", lambda value: value)
    chat = None if tokenizer is None else _format_of(tokenizer.value)
    if tokenizer is None or chat is None:
        draft.refuse(tokenizer, f"Tokenizers whose conversations are known: {', '.join(CHAT_FORMATS)}.")
        draft.refuse(prompts, "Belongs to a tokenizer whose conversations are not known.")
        return
    messages = {pick.value: pick for pick in systems if pick is not None}
    if len(messages) > 1 or (messages and None in systems):
        draft.refuse(messages.values(), SYSTEM)
        return
    if sources.shown == {"text"}:
        draft.drop(tokenizer, "Text is trained as it is.")
        draft.drop(prompts, "Text is trained as it is.")
        if chat.ends_text:
            draft.imply("data.eos_token", chat.ends_text, f"what ends a text in {tokenizer.value.rpartition('.')[2]}")
        return
    if len(sources.shown) > 1 or not sources.shown:
        draft.refuse(tokenizer if sources.shown else None, "One template shows all rows: train on one kind first.")
        draft.drop((tokenizer, *prompts), "There are no rows to show.")
        return
    try:
        prompt = _prompt(prompts, PROMPTS.get(chat.prompt, PromptTemplate()), draft)
    except ValueError as error:
        draft.refuse(prompts, f"This prompt template {error}.")
        draft.drop(tokenizer, "Its prompt template is not known.")
        return
    is_alpaca, system = sources.shown == {"alpaca"}, next(iter(messages), "")
    draft.put("data.template", jinja(chat, prompt, is_alpaca=is_alpaca, system=system), tokenizer, *prompts)
    if chat.note:
        draft.note(chat.note)
    if chat.strips == "blanks":
        draft.note("tokens at the border")


def _format_of(component: str) -> Any:
    """What a tokenizer writes, by the name of its builder."""
    name = re.fullmatch(r"torchtune\.models\.\w+\.(\w+)_tokenizer", component)
    return CHAT_FORMATS.get(name[1]) if name is not None else None


def _prompt(picks: list[Pick[Any]], usual: PromptTemplate, draft: Draft) -> PromptTemplate:
    """The prompt template that is named or written out. Raises ``ValueError`` for one that is not known."""
    written: dict[str, Any] = {}
    settings = draft.settings("tune_prompt")
    for pick in picks:
        role = pick.settings[0].name.removeprefix("tokenizer.prompt_template").removeprefix(".")
        if not role and pick.value is not None:
            if pick.value not in NAMED:
                raise ValueError(f"is none of {', '.join(name.rpartition('.')[2] for name in NAMED)}")
            return NAMED[pick.value]
        if role:
            around = pick.value if isinstance(pick.value, list) else None
            if role not in ("system", "user", "assistant") or around is None or len(around) != 2:
                raise ValueError("has two texts for each role: before its words and behind")
            before, behind = (str(part or "") for part in around)
            if "{" in before + behind:
                raise ValueError("has braces, which stand for places here")
            written[role] = (before, behind)
    if written:
        return PromptTemplate(**written)
    return PromptTemplate() if settings else usual  # which null takes away
