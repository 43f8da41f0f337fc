"""Data sets as Axolotl lists them become sources; the order of their rows, and plug-ins.

Each data set says what its rows are, where they are in them, and what of them is trained. One template shows the rows
of all sources here, so those that want different ones are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tonnage.migration.draft import Draft, Pick
from tonnage.migration.meanings import meaning_of
from tonnage.migration.prompts import NAMED, PromptFormat, written_out
from tonnage.migration.sources import USUAL_ROLES, ImportedSources, Leaves, data_sets, part_of
from tonnage.migration.turns import TurnFormats
from tonnage.migration.values import flag, listed, text, texts, whole
from tonnage.migration.yaml_files import read_data

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
FLAGS = ("train", "loss", "weight", "loss_weight")
"""Fields of a message that our reader takes for what was thought, and for whether it is trained."""


@dataclass(frozen=True)
class RowShape:
    """What the rows of a data set are."""

    format: str
    shown: str
    """``alpaca``: as the template of that name shows them; ``prompt``: by a text around them; ``chat``: as a chat
    template does; ``text``: as they are."""
    columns: Mapping[str, str] = field(default_factory=dict)
    prompt: PromptFormat | TurnFormats | None = None
    are_texts: bool = False
    """Whether rows may be plain texts, of which no conversation is made there."""


_TABLE = read_data("axolotl_rows")
TYPES = {
    **{name: RowShape(**row) for names, row in _TABLE["types"].items() for name in names.split()},
    **{name: RowShape("alpaca", "prompt", prompt.columns, prompt) for name, prompt in NAMED.items()},
}
"""Axolotl's ``type`` of a data set."""
PREFERENCES = {
    method: {name: RowShape(**row) for names, row in rows.items() for name in names.split()}
    for method, rows in _TABLE["preferences"].items()
}
"""Its ``type`` where preferences are learned from, by how."""
SHOWN_TYPES = [name for name in TYPES if ":" not in name and ".load" not in name] + ["alpaca:chat and the like"]
ONE_TEMPLATE = "One template shows all rows: train on one kind first, then on the other."
OWN = (
    *("system_prompt", "system_format", "format", "no_input_format"),
    *("field_system", "field_instruction", "field_input", "field_output"),
)
"""Parts of a ``type`` that the configuration writes out."""
COLUMNS = {
    "supervised": {"field_messages": "messages", "field_tools": "tools", "field": "text"},
    "pairs": {"field_messages": "messages", "field_chosen": "chosen", "field_rejected": "rejected"},
}
"""Names of columns beside a ``type``, where that reads them."""
ANSWERS = {"pairs": ("chosen", "rejected"), "kto": ("completion",)}
FIELDS = {method: ("prompt", "system", *answers) for method, answers in ANSWERS.items()}
FIELDS["kto"] += ("label",)
"""Columns of a ``type`` for preferences that the configuration writes out: ``field_prompt`` and so on."""
USER_DEFINED = ("user_defined", "user_defined.default")
MESSAGE_FIELDS = {"message_field_role": "role", "message_field_content": "content"}
READ_FIELDS = {"role": ("role", "from"), "content": ("content", "value"), "reasoning_content": THOUGHTS}
"""Fields of a message, and the names by which our reader finds them."""


@dataclass
class _DataSet:
    """One data set of a list: what of it no rule has taken yet, and the source that it becomes."""

    draft: Draft
    leaves: Leaves
    source: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    picks: list[Pick[Any]] = field(default_factory=list)
    """What decides the source."""

    def take(self, name: str) -> Pick[Any] | None:
        """What it says under a name."""
        return self.leaves.pop(name, None)

    def only(self, name: str, known: Collection[str], usual: str, otherwise: str) -> None:
        """Take a name that says what is so here anyway (``usual``), or what is not possible (``otherwise``)."""
        pick = self.take(name)
        if pick is not None and str(pick.value) in known:
            self.draft.drop(pick, usual)
        else:
            self.draft.refuse(pick, otherwise)


def put_sources(draft: Draft) -> ImportedSources:
    """Axolotl's ``datasets`` and ``test_datasets``. Returns what it trains on."""
    sides = {"data.train": "axolotl_rows", "data.validation": "axolotl_tests"}
    sources = {key: _listed(draft, key, quantity) for key, quantity in sides.items()}
    for leaves in data_sets(draft, "axolotl_stream"):
        _stream(draft, leaves, sources["data.train"])
    draft.drop(draft.first("streaming", lambda value: value), "Rows are read whole before the run.")
    return sources["data.train"]


STREAMED = ("pretrain", "completion")
"""Types of rows that are streamed: text."""
OF_A_STREAM = {"path": "path", "name": "name", "split": "split", "data_files": "files", "text_column": "column"}


def _stream(draft: Draft, leaves: Leaves, sources: ImportedSources) -> None:
    """Text that is read while training, without end. Here rows are read before: which of them, the user must say."""
    kind = str(leaves["type"].value) if "type" in leaves else STREAMED[0]
    path = leaves.get("path", leaves.get(""))
    if kind not in STREAMED or path is None or "skip" in leaves:
        draft.refuse(leaves.values(), "Rows are read whole before the run: name a file or a part of the data set.")
        return
    parts = {ours: str(leaves[theirs].value) for theirs, ours in OF_A_STREAM.items() if theirs in leaves}
    source = {"path": str(path.value)} | {name: parts[name] for name in ("name", "split", "files") if name in parts}
    source["format"] = "text"
    if parts.get("column", "text") != "text":
        source["columns"] = "{text: " + parts["column"] + "}"
    shown = ", ".join(f"{name}: {value}" for name, value in source.items() if (name, value) != ("split", "train"))
    sources.shown.add("text")
    draft.note("pieces of a stream")
    if files := _first_files(draft, source):
        columns = {"columns": {"text": parts["column"]}} if "columns" in source else {}
        named = {"path": source["path"], "files": files, "format": "text"}
        draft.put("data.train", [named | columns], *leaves.values())
        draft.note("files of a stream", path=path.value, number=len(files))
        return
    sentence = (
        f"the rows: {path.value} is streamed there, and read here before the first step; files can name less of it"
    )
    draft.leave_open("data.train", sentence, *leaves.values(), example=f"{{{shown}}}")


def _first_files(draft: Draft, source: Mapping[str, str]) -> list[str]:
    """Files of a data set that is known, with as many tokens as all steps see; none of another one, nor where
    nothing says how many that are, or it has not so many."""
    known = _TABLE["streams"].get(f"{source['path']} {source.get('name', '')}")
    lengths = draft.every("data.max_length", whole)
    is_counted = {"steps", "batch.sequences"} <= draft.tree.keys() and lengths
    if known is None or not is_counted or "files" in source or source.get("split", "train") != "train":
        return []
    tokens = draft.tree["steps"] * draft.tree["batch.sequences"] * lengths[0].value
    number_of = math.ceil(tokens / known["tokens"])
    return [known["files"].format(number=number) for number in range(number_of) if number_of <= known["number_of"]]


def _listed(draft: Draft, key: str, quantity: str) -> ImportedSources:
    sources = ImportedSources()
    for leaves in data_sets(draft, quantity):
        every = list(leaves.values())
        try:
            _add(_DataSet(draft, leaves), sources)
        except ValueError as error:
            draft.refuse(every, f"Of this data set a value {error}.")
    if sources.entries:
        draft.put(key, sources.entries, *sources.picks)
    return sources


def _add(data_set: _DataSet, sources: ImportedSources) -> None:
    draft, source = data_set.draft, data_set.source
    if not _path(data_set):
        draft.refuse(data_set.leaves.values(), "Its rows cannot be named here.")
        return
    shape = _shape(data_set, sources)
    source["format"] = shape.format
    data_set.columns |= shape.columns
    _split(data_set)
    _columns(data_set)
    _roles(data_set)
    _masks(data_set)
    if (system := data_set.take("drop_system_message")) is not None and flag(system.value):
        source["system"] = "drop"
        data_set.picks.append(system)
    else:
        draft.drop(system, "Off.")
    for name in ("name", "revision"):
        if (pick := data_set.take(name)) is not None:
            source[name] = text(pick.value)
            data_set.picks.append(pick)
    if data_set.columns:
        source["columns"] = data_set.columns
    for name, pick in data_set.leaves.items():
        if pick.settings[0].number not in draft.entries and pick not in data_set.picks:
            _rest(draft, name, pick)
    sources.entries += [source | {"path": path} for path in listed(source["path"])]
    sources.picks += data_set.picks


def _path(data_set: _DataSet) -> bool:
    """Where its rows are; False, and nothing is taken, if that cannot be said here."""
    path, files = data_set.leaves.get("path"), data_set.leaves.get("data_files")
    if path is None or isinstance(path.value, list | dict):
        return False
    name = str(path.value)
    if re.match(r"(s3|gs|gcs|abfs|az|oci|https?)://", name) or name == "synthetic":
        return False
    named = texts(files.value) if files is not None else []
    data_set.picks += [pick for pick in (data_set.take("path"), data_set.take("data_files")) if pick is not None]
    if not named:
        data_set.source["path"] = name
    elif re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) and not Path(name).is_dir():
        data_set.source |= {"path": name, "files": named}  # of a data set of the hub
    else:
        data_set.source["path"] = named  # which Axolotl looks for from where it is started
    return True


def _shape(data_set: _DataSet, sources: ImportedSources) -> RowShape:
    draft, leaves = data_set.draft, data_set.leaves
    own = {name.partition(".")[2]: leaves.pop(name) for name in list(leaves) if name.startswith("type.")}
    if draft.method in ANSWERS and str(leaves["type"].value if "type" in leaves else "") in USER_DEFINED:
        data_set.picks.append(leaves.pop("type"))  # with its parts beside it, as earlier versions had them
        own = {name: leaves.pop(name) for name in _parts_of(draft.method) if name in leaves}
        return _own_preferences(data_set, own, sources)
    if own and draft.method == "reward":
        draft.refuse(own.values(), f"A type is not written out: {', '.join(PREFERENCES['reward'])}.")
        return RowShape("auto", "chat")
    if own:
        return (_own_preferences if draft.is_preference else _own)(data_set, own, sources)
    kind = data_set.take("type")
    if kind is None:
        return _without_type(data_set, sources)
    types = PREFERENCES.get(draft.method, TYPES)
    if str(kind.value) not in types:
        names = list(types) if draft.is_preference else SHOWN_TYPES
        draft.refuse(kind, f"Known are {', '.join(names)}: write rows of another type as one of them.")
        return RowShape("auto", "chat")
    shape = types[str(kind.value)]
    if not _fits(shape, sources):
        draft.refuse(kind, ONE_TEMPLATE)
        return shape
    data_set.picks.append(kind)
    if shape.are_texts:
        draft.note("texts of preferences")
    if (template := data_set.take("chat_template")) is not None:
        sources.templates.append(Pick(str(template.value), template.settings))
    return shape


def _without_type(data_set: _DataSet, sources: ImportedSources) -> RowShape:
    """Rows of which nothing says what they are."""
    draft, shape = data_set.draft, RowShape("auto", "chat")
    if draft.method == "reward":
        draft.refuse(data_set.picks, f"Rows without a type are tokens already: {', '.join(PREFERENCES['reward'])}.")
        data_set.picks.clear()
        return shape
    draft.note("texts of preferences" if draft.is_preference else "a data set without a type")
    if draft.is_preference and not _fits(shape, sources):
        draft.refuse(data_set.picks, ONE_TEMPLATE)
        data_set.picks.clear()
    return shape


def _fits(shape: RowShape, sources: ImportedSources) -> bool:
    """Whether one template can show the rows of a data set and those before; notes how they are shown."""
    is_one = sources.prompt is None or shape.prompt == sources.prompt
    if len({shape.shown, *sources.shown} - {"text"}) > 1 or not is_one:
        return False
    sources.shown.add(shape.shown)
    sources.prompt = shape.prompt or sources.prompt
    return True


def _own(data_set: _DataSet, own: Leaves, sources: ImportedSources) -> RowShape:
    """A ``type`` that the configuration writes out."""
    parts = {name: pick for name, pick in own.items() if name in OWN}
    for name in own.keys() - parts.keys():
        data_set.draft.unknown(own[name], "Not a key of a prompt in Axolotl.")
    try:
        prompt = written_out({name: str(pick.value) for name, pick in parts.items()})
    except ValueError as error:
        data_set.draft.refuse(own.values(), f"A part of this prompt {error}.")
        return RowShape("auto", "chat")
    shape = RowShape("alpaca", "prompt", prompt.columns, prompt)
    if _fits(shape, sources):
        data_set.picks += parts.values()
    else:
        data_set.draft.refuse(own.values(), ONE_TEMPLATE)
    return shape


def _parts_of(method: str) -> tuple[str, ...]:
    """Names of what a ``type`` for preferences says that is written out: columns and formats."""
    formats = (f"{name}_format" for name in ("prompt", *ANSWERS[method]))
    return (*(f"field_{name}" for name in FIELDS[method]), *formats)


def _own_preferences(data_set: _DataSet, own: Leaves, sources: ImportedSources) -> RowShape:
    """A ``type`` for preferences that the configuration writes out: columns, and formats around them."""
    draft = data_set.draft
    parts = {name: pick for name, pick in own.items() if name in _parts_of(draft.method)}
    for name in own.keys() - parts.keys():
        draft.unknown(own[name], "Not a key of such rows in Axolotl.")
    fields = {name: parts[f"field_{name}"] for name in FIELDS[draft.method] if f"field_{name}" in parts}
    columns = {name: text(pick.value) for name, pick in fields.items()}
    formats = {
        name: str(parts[f"{name}_format"].value)
        for name in ("prompt", *ANSWERS[draft.method])
        if f"{name}_format" in parts
    }
    try:
        turns = _turns_of(formats, ANSWERS[draft.method])
    except ValueError as error:
        draft.refuse(own.values(), f"Of these formats {error}.")
        return RowShape("auto", "chat")
    renamed = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    shape = RowShape("auto", "prompt", renamed, turns)
    if not _fits(shape, sources):
        draft.refuse(own.values(), ONE_TEMPLATE)
        return shape
    if not turns.always:
        data_set.source["system"] = "drop"  # there is no place for it
    data_set.picks += parts.values()
    return shape


def _turns_of(formats: Mapping[str, str], answers: Collection[str]) -> TurnFormats:
    """The formats of a prompt and of its answers, by which a row is shown. Raises ``ValueError``."""
    around = re.fullmatch(r"(?:([^{}]*)\{system\})?([^{}]*)\{prompt\}([^{}]*)", formats.get("prompt") or "{prompt}")
    ends = {
        ending[1] if (ending := re.fullmatch(rf"\{{{name}\}}([^{{}}]*)", formats.get(name) or f"{{{name}}}")) else None
        for name in answers
    }
    if around is None:
        raise ValueError("that of the prompt is not {prompt} with perhaps {system} before it")
    if None in ends or len(ends) > 1:
        raise ValueError("those of the answers do not begin with them and end alike")
    has_system = around[1] is not None
    return TurnFormats(
        user="{content}" if has_system else around[2] + "{content}",
        opener=around[3],
        assistant="{content}" + (ends.pop() or "{eos}"),
        system=f"{around[1]}{{content}}{around[2]}" if has_system else "{content}",
        always=has_system,
    )


def _split(data_set: _DataSet) -> None:
    """``train[:1%]`` is a split and its first rows; ``shards`` are a part of the rows, by chance."""
    source = data_set.source
    if (split := data_set.take("split")) is not None:
        try:
            source |= part_of(split.value)
            data_set.picks.append(split)
        except ValueError:
            data_set.draft.refuse(split, "A split, or its first rows (train[:1%]), and no other part of it.")
    if (shards := data_set.take("shards")) is not None:
        if (num_parts := whole(shards.value)) < 1:
            raise ValueError("is no number of parts")
        source["weight"] = 1 / num_parts
        data_set.picks.append(shards)
        data_set.draft.drop(data_set.take("shards_idx"), "A part of the rows is drawn by the seed.")


def _columns(data_set: _DataSet) -> None:
    for theirs, ours in COLUMNS.get(data_set.draft.method, {}).items():
        if (pick := data_set.take(theirs)) is None:
            continue
        if pick.value == ours:
            data_set.draft.drop(pick, "The usual name.")
        else:
            data_set.columns[ours] = text(pick.value)
            data_set.picks.append(pick)
    for name in list(data_set.leaves):
        if name.startswith("message_property_mappings.") or name in MESSAGE_FIELDS:
            ours = MESSAGE_FIELDS.get(name, name.rpartition(".")[2])
            accepted = READ_FIELDS.get(ours, (ours,))
            otherwise = f"Of a message, {' or '.join(accepted)} is read: rename the field."
            data_set.only(name, accepted, "Such fields of a message are read as they are.", otherwise)
    usual = "What was thought is read, and given to the template by the name that it asks for."
    otherwise = f"What was thought is read from {', '.join(THOUGHTS)}: rename the field."
    data_set.only("field_thinking", THOUGHTS, usual, otherwise)
    data_set.only("template_thinking_key", THOUGHTS, usual, otherwise)


def _roles(data_set: _DataSet) -> None:
    """``{target: [sources]}``: only names that are not the usual ones have to be said."""
    mapped: dict[str, str] = {}
    for name in [name for name in data_set.leaves if name.startswith("roles.")]:
        pick, role = data_set.leaves.pop(name), name.rpartition(".")[2]
        theirs = texts(pick.value)
        if role not in USUAL_ROLES:
            data_set.draft.refuse(pick, f"Roles are {', '.join(USUAL_ROLES)}.")
        elif unusual := [word for word in theirs if word.lower() not in USUAL_ROLES[role]]:
            mapped |= dict.fromkeys(unusual, role)
            data_set.picks.append(pick)
        else:
            data_set.draft.drop(pick, "The usual names.")
    if mapped:
        data_set.source["roles"] = mapped


def _masks(data_set: _DataSet) -> None:
    """What of a conversation is trained."""
    if (pick := data_set.take("roles_to_train")) is not None:
        roles = {str(role).lower() for role in listed(pick.value)}
        if roles and roles <= set(USUAL_ROLES["assistant"]):
            data_set.draft.drop(pick, "What the assistant says is trained.")
        else:
            data_set.draft.refuse(pick, "What the assistant says is trained, or everything (data.train_on: all).")
    for name in ("train_on_eos", "train_on_eot"):
        closes = "What closes each turn that is trained is trained, not"
        value = data_set.leaves[name].value if name in data_set.leaves else ""
        data_set.only(name, ("turn",), "What closes a turn that is trained is trained.", f"{closes} {value}.")
    otherwise = f"A message says so in {', '.join(FLAGS)}: rename the field."
    data_set.only("message_field_training", FLAGS, "A message says so in this field here too.", otherwise)
    detail = data_set.take("message_field_training_detail")
    data_set.draft.refuse(detail, "Parts of a message are trained where its content is parts, each with its flag.")


def _rest(draft: Draft, name: str, pick: Pick[Any]) -> None:
    """What a data set says besides."""
    meaning = meaning_of("data_set", name)
    if pick.value is False and meaning.outcome != "needless":
        draft.drop(pick, "Off.")
    else:
        draft.carry_out(meaning, pick)


def order(draft: Draft) -> None:
    """Rows one after the other. Axolotl shuffles several data sets as it merges them, unless it is told otherwise."""
    curriculum, merged = draft.first("curriculum", flag), draft.first("merged", flag)
    before = draft.first("before_merging", flag)
    sources = draft.tree.get("data.train")
    is_merged = isinstance(sources, list) and len(sources) > 1
    is_shuffled = is_merged and (merged is None or merged.value or (before is not None and before.value))
    if curriculum is not None and curriculum.value and is_shuffled:
        draft.drop(curriculum, "Several data sets are shuffled when they are merged: packs are, anew in each epoch.")
    elif curriculum is not None and curriculum.value:
        draft.put("data.order", "given", curriculum, merged)
    for pick in (curriculum, merged, before):
        if pick is not None:
            draft.drop(pick, "Packs are shuffled, by the seed." if not pick.value else "Rows have been merged then.")


def plugins(draft: Draft) -> None:
    """Axolotl's plug-ins."""
    pick = draft.first("plugins", _plugin_names)
    if pick is None:
        return
    others = [name for name in pick.value if name.rpartition(".")[2] not in _TABLE["harmless"]]
    if others:
        draft.refuse(pick, f"{', '.join(name.rpartition('.')[2] for name in others)}: not there.")
    draft.drop(pick, "They compute the same faster, or look on.")


def _plugin_names(value: Any) -> list[str]:
    return [str(next(iter(part), "")) if isinstance(part, dict) else text(part) for part in listed(value)]
