"""Data sets as Axolotl and LLaMA-Factory list them become sources.

Both say of each data set what its rows are: Axolotl in the list itself, LLaMA-Factory in a ``dataset_info.json`` (a
YAML of its own in version 1), which is read. One template shows the rows of all sources here, so those that want
different ones are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tonnage.errors import UserError
from tonnage.migration.sheet import Need, Pick, Sheet, number, text, texts, whole

Leaves = dict[str, Pick[Any]]
"""What is said of one data set, by name."""

LOADERS = ("json", "csv", "parquet", "arrow", "text")
"""Words in the place of a path that say how ``data_files`` are read."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
FLAGS = ("train", "loss", "weight", "loss_weight")
"""Fields of a message that our reader takes for what was thought, and for whether it is trained."""
USUAL_ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "ai", "function_call"),
    "tool": ("tool", "observation", "ipython", "function", "tool_response"),
}
"""Names of roles that our reader knows."""


@dataclass(frozen=True)
class Shape:
    """What the rows of a data set are."""

    format: str
    shown: str
    """``alpaca``: as the template of that name shows them; ``chat``: as a chat template does; ``text``: as they are."""
    columns: Mapping[str, str] = field(default_factory=dict)


TYPES = {
    "alpaca": Shape("alpaca", "alpaca"),
    "alpaca_instruct": Shape("alpaca", "alpaca"),
    "gpteacher": Shape("alpaca", "alpaca", {"output": "response"}),
    "chat_template": Shape("messages", "chat"),
    "chat_template.default": Shape("messages", "chat"),
    "sharegpt": Shape("messages", "chat", {"messages": "conversations"}),
    "completion": Shape("text", "text"),
    "input_output": Shape("segments", "text"),
}
"""Axolotl's ``type`` of a data set."""


@dataclass
class Listed:
    """Sources, and what they want to be shown by."""

    sources: list[dict[str, Any]] = field(default_factory=list)
    picks: list[Pick[Any]] = field(default_factory=list)
    shown: set[str] = field(default_factory=set)
    templates: list[Pick[str]] = field(default_factory=list)
    """Names of chat templates that sources ask for."""


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
        _one(sheet, leaves, found)
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
    if shape is None:
        return
    source["format"] = shape.format
    columns = dict(shape.columns)
    _split(sheet, leaves, source, picks)
    _columns(sheet, leaves, columns, picks)
    _roles(sheet, leaves, source, picks)
    _masks(sheet, leaves)
    for name in ("name", "revision"):
        if name in leaves:
            source[name] = text(leaves[name].value)
            picks.append(leaves.pop(name))
    if columns:
        source["columns"] = columns
    for name, pick in leaves.items():
        if pick.givens[0].number not in sheet.entries and pick not in picks:
            _rest(sheet, name, pick)
    found.sources.append(source)
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
    if name in LOADERS and len(named) == 1:
        source["path"] = named[0]
        picks.append(files)
        return True
    source["path"] = name
    sheet.refuse(files, "Some files of a data set: give each as a source of its own, a hub's after a download.")
    return True


def _shape(sheet: Sheet, leaves: Leaves, picks: list[Pick[Any]], found: Listed) -> Shape | None:
    own = [leaves.pop(name) for name in list(leaves) if name.startswith("type.")]
    for pick in own:
        sheet.refuse(pick, "A prompt of its own: write it as a Jinja file (data.template) and map its columns.")
    said = leaves.pop("type", None)
    if own:
        return Shape("alpaca", "alpaca")
    if said is None:
        sheet.notes.append("A data set without a type: its form is found out from the rows.")
        return Shape("auto", "chat")
    shape = TYPES.get(str(said.value))
    if shape is None:
        sheet.refuse(said, f"Known are {', '.join(TYPES)}: write rows of another type as one of them.")
        return Shape("auto", "chat")
    if {"alpaca", "chat"} <= {shape.shown, *found.shown}:
        sheet.refuse(said, "One template shows all rows: train on one kind first, then on the other.")
        return shape
    found.shown.add(shape.shown)
    picks.append(said)
    if (template := leaves.pop("chat_template", None)) is not None:
        found.templates.append(Pick(str(template.value), template.givens))
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
        source["weight"] = 1 / whole(shards.value)
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


_NEEDLESS = {
    "ds_type": "What a file is follows from its name.",
    "preprocess_shards": "Preparing uses the cores there are.",
    "split_thinking": "Thoughts at the beginning of an answer are the template's to write.",
}


def _rest(sheet: Sheet, name: str, pick: Pick[Any]) -> None:
    """What a data set says besides."""
    if name in _NEEDLESS or pick.value is False:
        sheet.drop(pick, _NEEDLESS.get(name, "Off."))
    elif name in ("conversation", "chat_template_jinja", "drop_system_message", "input_format", "input_transform"):
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
    streaming = sheet.first("streaming", lambda value: value)
    if streaming is not None:
        sheet.drop(streaming, "Rows are read whole before the run.")


# LLaMA-Factory


def factory(sheet: Sheet) -> Listed | None:
    """Its ``dataset`` by name; None if it names none."""
    folder = sheet.first("factory_folder", text)
    names, tests = sheet.first("factory_rows", _several), sheet.first("factory_tests", _several)
    most = sheet.first("max_samples", whole)
    directory = folder.value if folder is not None else "data"
    where, info = _info(sheet, directory, [pick for pick in (folder, names, tests) if pick is not None])
    found = None
    for pick, key in ((names, "data.train"), (tests, "data.validation")):
        if pick is None:
            continue
        if info is None:
            continue
        side = _by_name(sheet, pick, info, where, most.value if most is not None else None, between="\n")
        found = found or side
        whole_ones = [pick] if pick.givens[0].number not in sheet.entries else []
        if side.sources:
            sheet.put(key, side.sources, *whole_ones, *(one for one in (folder, most) if one is not None))
    for other in (folder, most):
        if other is not None:
            sheet.drop(other, "No data set is named.")
    return found


def _several(value: Any) -> list[str]:
    return [name.strip() for one in texts(value) for name in one.split(",") if name.strip()]


def _info(sheet: Sheet, directory: str, picks: list[Pick[Any]]) -> tuple[str, dict[str, Any] | None]:
    """Where rows are, and what ``dataset_info.json`` says of them; none where it cannot be read."""
    if not picks:
        return directory, None
    if directory == "ONLINE":
        return "", {}
    if directory.startswith("REMOTE:"):
        sentence = f"the rows of {directory}: its dataset_info.json is on a hub, bring it here and set dataset_dir"
    elif (path := sheet.files.find(f"{directory}/dataset_info.json")) is None:
        sentence = f"the rows: there is no {directory}/dataset_info.json here or above the file"
    else:
        try:
            return str(path.parent), sheet.files.read(path)
        except UserError as error:
            sentence = f"the rows: {error.problems[0].found} in {path}"
    sheet.leave_open(Need("data.train", sentence, "ROWS"), *picks)
    return directory, None


def _by_name(
    sheet: Sheet, pick: Pick[list[str]], info: Mapping[str, Any], where: str, most: int | None, *, between: str
) -> Listed:
    """Sources for names of data sets."""
    found = Listed()
    for name in pick.value:
        said = info.get(name, {"hf_hub_url": name} if not info else None)
        if not isinstance(said, Mapping):
            sheet.refuse(pick, f"dataset_info.json has no {name}.")
            continue
        source, refusal = _described(said, where, between)
        if refusal:
            sheet.refuse(pick, f"{name}: {refusal}")
            continue
        if most is not None:
            source["first"] = min(most, source.get("first", most))
        found.sources.append(source)
    found.shown.add("chat")
    return found


def _described(said: Mapping[str, Any], where: str, between: str) -> tuple[dict[str, Any], str]:
    """A source for an entry of ``dataset_info.json``, or why there is none."""
    columns = said.get("columns") or {}
    tags = said.get("tags") or {}
    if said.get("ranking") or "kto_tag" in columns:
        return {}, "preferences are not trained on."
    if media := [name for name in ("images", "videos", "audios") if columns.get(name)]:
        return {}, f"rows with {' and '.join(media)} are not trained on."
    source: dict[str, Any] = {}
    if "hf_hub_url" in said:
        source["path"] = str(said["hf_hub_url"])
    elif "file_name" in said:
        source["path"] = f"{where}/{said['file_name']}" if where else str(said["file_name"])
    else:
        return {}, "its rows are neither a file nor a data set of Hugging Face's hub."
    if said.get("folder"):
        return {}, "a folder of a data set: name its files."
    if said.get("formatting", "alpaca") == "alpaca":
        usual = {"prompt": "instruction", "query": "input", "response": "output"}
        usual |= {name: name for name in ("history", "system", "tools")}
        source |= {"format": "alpaca", "between": between}
        renamed = {ours: columns[theirs] for theirs, ours in usual.items() if columns.get(theirs, ours) != ours}
    else:
        source["format"] = "messages"
        renamed = {"messages": columns.get("messages", "conversations")}
        renamed |= {name: columns[name] for name in ("system", "tools") if columns.get(name, name) != name}
        if tags.get("role_tag", "from") not in ("role", "from") or tags.get("content_tag", "value") not in (
            "content",
            "value",
        ):
            return {}, "a message has role and content, or from and value: rename its fields."
        roles = {
            tags[f"{theirs}_tag"]: ours
            for theirs, ours in (
                ("user", "user"),
                ("assistant", "assistant"),
                ("system", "system"),
                ("observation", "tool"),
            )
            if f"{theirs}_tag" in tags and str(tags[f"{theirs}_tag"]).lower() not in USUAL_ROLES[ours]
        }
        if roles:
            source["roles"] = roles
        if renamed["messages"] == "messages":
            del renamed["messages"]
    if renamed:
        source["columns"] = renamed
    for theirs, ours in (("subset", "name"), ("num_samples", "first")):
        if said.get(theirs):
            source[ours] = said[theirs]
    if said.get("split", "train") != "train":
        source["split"] = said["split"]
    return source, ""


def factory_1(sheet: Sheet) -> Listed | None:
    """Version 1: a YAML of data sets."""
    found = None
    for quantity, key in (("factory_file", "data.train"), ("factory_test_file", "data.validation")):
        pick = sheet.first(quantity, text)
        if pick is None:
            continue
        path = sheet.files.find(pick.value)
        if path is None:
            if re.fullmatch(r"[\w.-]+/[\w.-]+", pick.value) and not pick.value.endswith((".yaml", ".yml")):
                sheet.put(key, [{"path": pick.value, "format": "messages"}], pick)
                found = found or Listed(shown={"chat"})
            else:
                sheet.leave_open(Need(key, f"the rows: there is no {pick.value} here or above the file", "ROWS"), pick)
            continue
        side = _listed_1(sheet, pick, sheet.files.read(path))
        found = found or side
        if side.sources:
            sheet.put(key, side.sources, *([pick] if pick.givens[0].number not in sheet.entries else []))
    return found


def _listed_1(sheet: Sheet, pick: Pick[str], info: Mapping[str, Any]) -> Listed:
    found = Listed(shown={"chat"})
    for name, said in info.items():
        if not isinstance(said, Mapping) or "path" not in said:
            sheet.refuse(pick, f"{name} has no path.")
            continue
        converter = said.get("converter")
        if converter not in (None, "alpaca", "sharegpt") or said.get("streaming"):
            sheet.refuse(pick, f"{name}: rows of {converter or 'a stream'} are not trained on.")
            continue
        source: dict[str, Any] = {
            "path": str(said["path"]),
            "format": "alpaca" if converter == "alpaca" else "messages",
        }
        if converter == "alpaca":
            source["between"] = ""
        if converter == "sharegpt":
            source["columns"] = {"messages": "conversations"}
        if said.get("split", "train") != "train":
            source["split"] = said["split"]
        if said.get("size"):
            source["first"] = said["size"]
        if said.get("weight"):
            source["weight"] = number(said["weight"])
        found.sources.append(source)
    return found
