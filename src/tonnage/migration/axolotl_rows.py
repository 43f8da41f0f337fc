"""Data sets as Axolotl lists them become sources.

Each says what its rows are, where they are in them, and what of them is trained. One template shows the rows of all
sources here, so those that want different ones are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tonnage.migration.prompts import NAMED, Prompt, written_out
from tonnage.migration.rows import USUAL_ROLES, Listed
from tonnage.migration.sheet import Pick, Sheet, flag, text, texts, whole

Leaves = dict[str, Pick[Any]]
"""What is said of one data set, by name."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
FLAGS = ("train", "loss", "weight", "loss_weight")
"""Fields of a message that our reader takes for what was thought, and for whether it is trained."""


@dataclass(frozen=True)
class Shape:
    """What the rows of a data set are."""

    format: str
    shown: str
    """``alpaca``: as the template of that name shows them; ``prompt``: by a text around them; ``chat``: as a chat
    template does; ``text``: as they are."""
    columns: Mapping[str, str] = field(default_factory=dict)
    prompt: Prompt | None = None


TYPES = {
    "alpaca": Shape("alpaca", "alpaca"),
    "alpaca:instruct": Shape("alpaca", "alpaca"),
    "alpaca_instruct": Shape("alpaca", "alpaca"),
    "alpaca_instruct.load": Shape("alpaca", "alpaca"),
    "gpteacher": Shape("alpaca", "alpaca", {"output": "response"}),
    "gpteacher:instruct": Shape("alpaca", "alpaca", {"output": "response"}),
    "chat_template": Shape("messages", "chat"),
    "chat_template.default": Shape("messages", "chat"),
    "sharegpt": Shape("messages", "chat", {"messages": "conversations"}),
    "completion": Shape("text", "text"),
    "input_output": Shape("segments", "text"),
    **{name: Shape("alpaca", "prompt", prompt.columns, prompt) for name, prompt in NAMED.items()},
}
"""Axolotl's ``type`` of a data set."""


SHOWN_TYPES = [name for name in TYPES if ":" not in name and ".load" not in name] + ["alpaca:chat and the like"]
ONE_TEMPLATE = "One template shows all rows: train on one kind first, then on the other."


def groups(sheet: Sheet, quantity: str) -> list[Leaves]:
    """What is said of each data set of a list."""
    found: dict[str, Leaves] = {}
    for pick in sheet.every(quantity, lambda value: value):
        parts = pick.givens[0].name.split(".")[1:]
        place, leaf = (parts[0], parts[1:]) if parts and parts[0].isdecimal() else ("0", parts)
        if pick.value is None or pick.value in ("", {}, []):
            sheet.drop(pick, "Not set.")
        else:
            found.setdefault(place, {})[".".join(leaf)] = pick
    return list(found.values())


def listed(sheet: Sheet, quantity: str) -> Listed:
    """Axolotl's ``datasets`` or ``test_datasets``."""
    found = Listed()
    for leaves in groups(sheet, quantity):
        given = list(leaves.values())
        try:
            _one(sheet, leaves, found)
        except ValueError as error:
            for pick in given:
                sheet.refuse(pick, f"Of this data set a value {error}.")
    return found


def _one(sheet: Sheet, leaves: Leaves, found: Listed) -> None:
    """One data set of Axolotl."""
    picks: list[Pick[Any]] = []
    source: dict[str, Any] = {}
    if not _path(sheet, leaves, source, picks):
        for pick in leaves.values():
            sheet.refuse(pick, "Its rows cannot be named here.")
        return
    shape = _shape(sheet, leaves, picks, found)
    source["format"] = shape.format
    columns = dict(shape.columns)
    _split(sheet, leaves, source, picks)
    _columns(sheet, leaves, columns, picks)
    _roles(sheet, leaves, source, picks)
    _masks(sheet, leaves)
    if (system := leaves.pop("drop_system_message", None)) is not None:
        if flag(system.value):
            source["system"] = "drop"
            picks.append(system)
        else:
            sheet.drop(system, "Off.")
    for name in ("name", "revision"):
        if name in leaves:
            source[name] = text(leaves[name].value)
            picks.append(leaves.pop(name))
    if columns:
        source["columns"] = columns
    for name, pick in leaves.items():
        if pick.givens[0].number not in sheet.entries and pick not in picks:
            _rest(sheet, name, pick)
    path = source["path"]
    found.sources += [source | {"path": one} for one in (path if isinstance(path, list) else [path])]
    found.picks += picks


def _path(sheet: Sheet, leaves: Leaves, source: dict[str, Any], picks: list[Pick[Any]]) -> bool:
    path, files = leaves.pop("path", None), leaves.pop("data_files", None)
    if path is None or isinstance(path.value, list | dict):
        leaves |= {name: pick for name, pick in (("path", path), ("data_files", files)) if pick is not None}
        return False
    name = str(path.value)
    if re.match(r"(s3|gs|gcs|abfs|az|oci|https?)://", name) or name == "synthetic":
        leaves["path"] = path
        if files is not None:
            leaves["data_files"] = files
        return False
    picks.append(path)
    if files is None:
        source["path"] = name
        return True
    named = texts(files.value)
    picks.append(files)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) and not Path(name).is_dir():
        source["path"], source["files"] = name, named  # of a data set of the hub
    else:
        source["path"] = named  # which Axolotl looks for from where it is started
    return True


def _shape(sheet: Sheet, leaves: Leaves, picks: list[Pick[Any]], found: Listed) -> Shape:
    own = {name.partition(".")[2]: leaves.pop(name) for name in list(leaves) if name.startswith("type.")}
    if own:
        return _own(sheet, own, picks, found)
    said = leaves.pop("type", None)
    if said is None:
        sheet.notes.append("A data set without a type: its form is found out from the rows.")
        return Shape("auto", "chat")
    shape = TYPES.get(str(said.value))
    if shape is None:
        sheet.refuse(said, f"Known are {', '.join(SHOWN_TYPES)}: write rows of another type as one of them.")
        return Shape("auto", "chat")
    if not _fits(shape, found):
        sheet.refuse(said, ONE_TEMPLATE)
        return shape
    picks.append(said)
    if (template := leaves.pop("chat_template", None)) is not None:
        found.templates.append(Pick(str(template.value), template.givens))
    return shape


def _fits(shape: Shape, found: Listed) -> bool:
    """Whether one template can show the rows of a data set and those before; notes how they are shown."""
    if len({shape.shown, *found.shown} - {"text"}) > 1 or (found.prompt is not None and shape.prompt != found.prompt):
        return False
    found.shown.add(shape.shown)
    found.prompt = shape.prompt or found.prompt
    return True


_OWN = ("system_prompt", "system_format", "format", "no_input_format")
_OWN_FIELDS = ("field_system", "field_instruction", "field_input", "field_output")


def _own(sheet: Sheet, own: Leaves, picks: list[Pick[Any]], found: Listed) -> Shape:
    """A ``type`` that the configuration writes out."""
    unknown = [name for name in own if name not in (*_OWN, *_OWN_FIELDS)]
    for name in unknown:
        sheet.unknown(own[name], "Not a key of a prompt in Axolotl.")
    said = {name: str(pick.value) for name, pick in own.items() if name not in unknown}
    try:
        prompt = written_out(said)
    except ValueError as error:
        for pick in own.values():
            sheet.refuse(pick, f"A part of this prompt {error}.")
        return Shape("auto", "chat")
    shape = Shape("alpaca", "prompt", prompt.columns, prompt)
    if not _fits(shape, found):
        for pick in own.values():
            sheet.refuse(pick, ONE_TEMPLATE)
        return shape
    picks += [pick for name, pick in own.items() if name not in unknown]
    return shape


def _split(sheet: Sheet, leaves: Leaves, source: dict[str, Any], picks: list[Pick[Any]]) -> None:
    """``train[:1%]`` is a split and its first rows; ``shards`` are a part of the rows, by chance."""
    if (split := leaves.pop("split", None)) is not None:
        found = re.fullmatch(r"([\w.-]+)(?:\[:(\d+)(%?)\])?", str(split.value).strip())
        if found is None:
            sheet.refuse(split, "A split, or its first rows (train[:1%]), and no other part of it.")
        else:
            if found[1] != "train":
                source["split"] = found[1]
            if found[2]:
                share = int(found[2])
                source["first"] = share if not found[3] else share / 100
                if found[3] and share >= 100:
                    del source["first"]
            picks.append(split)
    shards = leaves.pop("shards", None)
    if shards is not None:
        if (num_parts := whole(shards.value)) < 1:
            raise ValueError("is no number of parts")
        source["weight"] = 1 / num_parts
        picks.append(shards)
        if (which := leaves.pop("shards_idx", None)) is not None:
            sheet.drop(which, "A part of the rows is drawn by the seed.")


def _columns(sheet: Sheet, leaves: Leaves, columns: dict[str, str], picks: list[Pick[Any]]) -> None:
    for theirs, ours in (("field_messages", "messages"), ("field_tools", "tools"), ("field", "text")):
        if (pick := leaves.pop(theirs, None)) is not None:
            if pick.value == ours:
                sheet.drop(pick, "The usual name.")
            else:
                columns[ours] = text(pick.value)
                picks.append(pick)
    for name in [name for name in leaves if name.startswith("message_property_mappings.") or name in _OLD_FIELDS]:
        pick = leaves.pop(name)
        ours = _OLD_FIELDS.get(name, name.rpartition(".")[2])
        known = {"role": ("role", "from"), "content": ("content", "value"), "reasoning_content": THOUGHTS}.get(
            ours, (ours,)
        )
        if str(pick.value) in known:
            sheet.drop(pick, "Such fields of a message are read as they are.")
        else:
            sheet.refuse(pick, f"Of a message, {' or '.join(known)} is read: rename the field.")
    for name in ("field_thinking", "template_thinking_key"):
        if (pick := leaves.pop(name, None)) is not None:
            if str(pick.value) in THOUGHTS:
                sheet.drop(pick, "What was thought is read, and given to the template by the name that it asks for.")
            else:
                sheet.refuse(pick, f"What was thought is read from {', '.join(THOUGHTS)}: rename the field.")


_OLD_FIELDS = {"message_field_role": "role", "message_field_content": "content"}


def _roles(sheet: Sheet, leaves: Leaves, source: dict[str, Any], picks: list[Pick[Any]]) -> None:
    """``{target: [sources]}``: only names that are not the usual ones have to be said."""
    mapped: dict[str, str] = {}
    for name in [name for name in leaves if name.startswith("roles.")]:
        pick, role = leaves.pop(name), name.rpartition(".")[2]
        theirs = texts(pick.value)
        if role not in USUAL_ROLES:
            sheet.refuse(pick, f"Roles are {', '.join(USUAL_ROLES)}.")
        elif unusual := [one for one in theirs if one.lower() not in USUAL_ROLES[role]]:
            mapped |= dict.fromkeys(unusual, role)
            picks.append(pick)
        else:
            sheet.drop(pick, "The usual names.")
    if mapped:
        source["roles"] = mapped


def _masks(sheet: Sheet, leaves: Leaves) -> None:
    """What of a conversation is trained."""
    if (pick := leaves.pop("roles_to_train", None)) is not None:
        asked = {str(one).lower() for one in (pick.value if isinstance(pick.value, list) else [pick.value])}
        if asked and asked <= set(USUAL_ROLES["assistant"]):
            sheet.drop(pick, "What the assistant says is trained.")
        else:
            sheet.refuse(pick, "What the assistant says is trained, or everything (data.train_on: all).")
    for name in ("train_on_eos", "train_on_eot"):
        if (pick := leaves.pop(name, None)) is not None:
            if str(pick.value) == "turn":
                sheet.drop(pick, "What closes a turn that is trained is trained.")
            else:
                sheet.refuse(pick, f"What closes each turn that is trained is trained, not {pick.value}.")
    if (pick := leaves.pop("message_field_training", None)) is not None:
        if str(pick.value) in FLAGS:
            sheet.drop(pick, "A message says so in this field here too.")
        else:
            sheet.refuse(pick, f"A message says so in {', '.join(FLAGS)}: rename the field.")
    if (pick := leaves.pop("message_field_training_detail", None)) is not None:
        sheet.refuse(pick, "Parts of a message are trained where its content is parts, each with its flag.")


PREFERENCES = ("field_chosen", "field_rejected", "step_separator", "max_completion_length", "train_on_last_step_only")
_NEEDLESS = {
    "ds_type": "What a file is follows from its name.",
    "preprocess_shards": "Preparing uses the cores there are.",
    "split_thinking": "Thoughts at the beginning of an answer are the template's to write.",
}


def _rest(sheet: Sheet, name: str, pick: Pick[Any]) -> None:
    """What a data set says besides."""
    if name in _NEEDLESS or pick.value is False:
        sheet.drop(pick, _NEEDLESS.get(name, "Off."))
    elif name in PREFERENCES:
        sheet.refuse(pick, "Rows of preferences and rewards are not trained on.")
    elif name in ("conversation", "chat_template_jinja", "input_format", "input_transform"):
        sheet.refuse(pick, "Rows are shown by one template, as they are: write them so, or another template.")
    elif name in ("trust_remote_code", "field_human", "field_model", "logprobs_field", "temperature", "shards_idx"):
        sheet.refuse(pick, "Rows are files that say what is trained.")
    else:
        sheet.unknown(pick, "Not a key of a data set in Axolotl.")


def put_listed(sheet: Sheet, key: str, found: Listed) -> None:
    """Set the sources of a side."""
    if found.sources:
        sheet.put(key, found.sources, *found.picks)


def stream(sheet: Sheet) -> None:
    """Rows that are read while training: not here."""
    for leaves in groups(sheet, "axolotl_stream"):
        for pick in leaves.values():
            sheet.refuse(pick, "Rows are read whole before the run: name a file or a part of the data set.")
    sheet.drop(sheet.first("streaming", lambda value: value), "Rows are read whole before the run.")
