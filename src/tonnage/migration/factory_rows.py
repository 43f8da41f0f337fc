"""Data sets as LLaMA-Factory names them become sources.

What the rows of a name are is said in ``dataset_info.json``, in version 1 in a YAML of its own. Both are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tonnage.errors import UserError
from tonnage.migration.rows import USUAL_ROLES, Listed
from tonnage.migration.sheet import Need, Pick, Sheet, number, text, whole, words

ONLINE = "ONLINE"
"""The ``dataset_dir`` with which names are data sets of the hub."""
LONGEST_NAME = 60
"""Of a data set, in a sentence."""


def factory(sheet: Sheet) -> Listed | None:
    """Its ``dataset`` by name; None if it names none."""
    folder = sheet.first("factory_folder", text)
    names, tests = sheet.first("factory_rows", words), sheet.first("factory_tests", words)
    most = sheet.first("max_samples", whole)
    directory = folder.value if folder is not None else "data"
    is_named = names is not None or tests is not None
    where, info = _info(sheet, directory, (folder, names, tests, most) if is_named else ())
    found = None
    for pick, key in ((names, "data.train"), (tests, "data.validation")):
        if pick is None or info is None:
            continue
        side = _by_name(sheet, pick, info, where, most.value if most is not None else None, between="\n")
        found = found or side
        whole_ones = [pick] if pick.givens[0].number not in sheet.entries else []
        if side.sources:
            sheet.put(key, side.sources, *whole_ones, folder, most)
    for other in (folder, most):
        sheet.drop(other, "No data set is named.")
    return found


def _info(sheet: Sheet, directory: str, picks: Sequence[Pick[Any] | None]) -> tuple[str, dict[str, Any] | None]:
    """Where rows are, and what ``dataset_info.json`` says of them; none where it cannot be read."""
    if not picks:
        return directory, None
    if directory == ONLINE:
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
        said = {"hf_hub_url": name} if not where else info.get(name)
        try:
            source = _described(said, where, between)
        except ValueError as error:
            sheet.refuse(pick, f"{name[:LONGEST_NAME]}: {error}.")
            continue
        if most is not None:
            source["first"] = min(most, source.get("first", most))
        found.sources.append(source)
    found.shown.add("chat")
    return found


def _described(said: Any, where: str, between: str) -> dict[str, Any]:
    """A source for an entry of ``dataset_info.json``. Raises ``ValueError`` that says why there is none."""
    if not isinstance(said, Mapping):
        raise ValueError("dataset_info.json does not have it")
    columns, tags = _names_in(said, "columns"), _names_in(said, "tags")
    if said.get("ranking") or "kto_tag" in columns:
        raise ValueError("preferences are not trained on")
    if media := [name for name in ("images", "videos", "audios") if columns.get(name)]:
        raise ValueError(f"rows with {' and '.join(media)} are not trained on")
    if said.get("folder"):
        raise ValueError("it is a folder of a data set: name its files")
    source: dict[str, Any] = {}
    if "hf_hub_url" in said:
        source["path"] = text(said["hf_hub_url"])
    elif "file_name" in said:
        source["path"] = f"{where}/{text(said['file_name'])}" if where else text(said["file_name"])
    else:
        raise ValueError("its rows are neither a file nor a data set of Hugging Face's hub")
    if said.get("formatting", "alpaca") == "alpaca":
        usual = {"prompt": "instruction", "query": "input", "response": "output"}
        usual |= {name: name for name in ("history", "system", "tools")}
        source |= {"format": "alpaca", "between": between}
        renamed = {ours: columns[theirs] for theirs, ours in usual.items() if columns.get(theirs, ours) != ours}
    else:
        source["format"] = "messages"
        renamed = {"messages": columns.get("messages", "conversations")}
        renamed |= {name: columns[name] for name in ("system", "tools") if columns.get(name, name) != name}
        if renamed["messages"] == "messages":
            del renamed["messages"]
        if roles := _tagged(tags):
            source["roles"] = roles
    if renamed:
        source["columns"] = renamed
    if said.get("subset"):
        source["name"] = text(said["subset"])
    if said.get("num_samples"):
        source["first"] = whole(said["num_samples"])
    if said.get("split", "train") != "train":
        source["split"] = text(said["split"])
    return source


def _names_in(said: Mapping[str, Any], name: str) -> dict[str, str]:
    """A mapping of names to names, nulls left out."""
    found = said.get(name) or {}
    if not isinstance(found, Mapping) or not all(isinstance(one, str | None) for one in found.values()):
        raise ValueError(f"its {name} are no names")
    return {str(key): value for key, value in found.items() if value is not None}


def _tagged(tags: Mapping[str, str]) -> dict[str, str]:
    """Names of roles that are not the usual ones. Raises ``ValueError`` for messages with other fields."""
    fields = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    if fields[0] not in ("role", "from") or fields[1] not in ("content", "value"):
        raise ValueError("a message has role and content, or from and value: rename its fields")
    kinds = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool"}
    return {
        tags[tag]: ours for tag, ours in kinds.items() if tag in tags and tags[tag].lower() not in USUAL_ROLES[ours]
    }


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
        try:
            found.sources.append(_described_1(said))
        except ValueError as error:
            sheet.refuse(pick, f"{name[:LONGEST_NAME]}: {error}.")
    return found


def _described_1(said: Any) -> dict[str, Any]:
    """A source for an entry of version 1. Raises ``ValueError`` that says why there is none."""
    if not isinstance(said, Mapping) or not isinstance(said.get("path"), str):
        raise ValueError("it has no path")
    converter = said.get("converter")
    if converter not in (None, "alpaca", "sharegpt") or said.get("streaming"):
        raise ValueError(f"rows of {str(converter)[:LONGEST_NAME] if converter else 'a stream'} are not trained on")
    source: dict[str, Any] = {"path": said["path"], "format": "messages"}
    if converter == "alpaca":
        source |= {"format": "alpaca", "between": ""}
    if converter == "sharegpt":
        source["columns"] = {"messages": "conversations"}
    if said.get("split", "train") != "train":
        source["split"] = text(said["split"])
    if said.get("size"):
        source["first"] = whole(said["size"])
    if said.get("weight"):
        source["weight"] = number(said["weight"])
    return source
