"""Data sets as LLaMA-Factory names them become sources; what its stage makes of rows, and how it differs.

What the rows of a name are is said in ``dataset_info.json``, in version 1 in a YAML of its own. Both are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from tonnage.errors import UserError
from tonnage.migration.draft import Draft, Pick
from tonnage.migration.programs import LLAMA_FACTORY_1
from tonnage.migration.sources import USUAL_ROLES, ImportedSources
from tonnage.migration.values import flag, number, text, whole, words

ONLINE = "ONLINE"
"""The ``dataset_dir`` with which names are data sets of the hub."""
STAGES = {"supervised": "sft", "pairs": "dpo or rm", "kto": "kto"}
"""What trains on rows, by what they are."""
ANSWERS = {"supervised": {"response": "output"}, "kto": {"response": "output", "kto_tag": "kto_tag"}}
ANSWERS["pairs"] = {name: name for name in ("chosen", "rejected")}
"""Columns of answers, by what rows are, and what we call them."""
LONGEST_NAME = 60
"""Of a data set, in a sentence."""


def put_sources(draft: Draft) -> ImportedSources:
    """Its data sets, of either version."""
    sources = ImportedSources()
    is_named = [_put_by_name(draft, sources), _put_by_file(draft)]
    sources.shown = {"chat"} if any(is_named) else set()
    return sources


def _put_by_name(draft: Draft, sources: ImportedSources) -> bool:
    """Its ``dataset`` by name. Returns whether it names any whose rows are known."""
    folder, media = draft.first("factory_folder", text), draft.first("media_folder", text)
    names, tests = draft.first("factory_rows", words), draft.first("factory_tests", words)
    first_rows = draft.first("max_samples", whole)
    directory = folder.value if folder is not None else "data"
    is_named = names is not None or tests is not None
    where, info = _info(draft, directory, (folder, names, tests, first_rows) if is_named else ())

    def described(entry: Any) -> dict[str, Any]:
        source = _described(entry, where, "pairs" if draft.method == "reward" else draft.method)
        if _names_in(entry, "columns").get("images"):
            sources.hold_images = True
            source |= _folder_of_images(source["path"], where, media.value if media is not None else "")
        if first_rows is not None:
            source["first"] = min(first_rows.value, source.get("first", first_rows.value))
        return source

    for pick, key in ((names, "data.train"), (tests, "data.validation")):
        if pick is not None and info is not None:
            entries = [(name, {"hf_hub_url": name} if not where else info.get(name)) for name in pick.value]
            described_sources = _all_described(draft, pick, entries, described)
            _put(draft, key, described_sources, pick, folder, first_rows, media if sources.hold_images else None)
    draft.drop(media, "No row holds images.")
    draft.drop((folder, first_rows), "No data set is named.")
    return is_named and info is not None


def _put_by_file(draft: Draft) -> bool:
    """Version 1: a YAML of data sets. Returns whether there is one, or a data set of the hub."""
    is_known = False
    for quantity, key in (("factory_file", "data.train"), ("factory_test_file", "data.validation")):
        pick = draft.first(quantity, text)
        if pick is None:
            continue
        path = draft.files.find(pick.value)
        is_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", pick.value) and not pick.value.endswith((".yaml", ".yml"))
        if path is not None:
            entries = draft.files.read(path).items()
            described = partial(_described_1, of_pairs=draft.method == "pairs")
            _put(draft, key, _all_described(draft, pick, entries, described), pick)
        elif is_on_hub:
            draft.put(key, [{"path": pick.value, "format": "messages"}], pick)
        else:
            sentence = f"the rows: there is no {pick.value} here or above the file"
            draft.leave_open(key, sentence, pick, example="ROWS")
            continue
        is_known = True
    return is_known


def _all_described(
    draft: Draft, pick: Pick[Any], entries: Iterable[tuple[str, Any]], described: Callable[[Any], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Sources for entries; the key that names them is refused for those of which there is none."""
    sources = []
    for name, entry in entries:
        try:
            sources.append(described(entry))
        except ValueError as error:
            draft.refuse(pick, f"{name[:LONGEST_NAME]}: {error}.")
    return sources


def _put(draft: Draft, key: str, sources: list[dict[str, Any]], pick: Pick[Any], *others: Pick[Any] | None) -> None:
    if sources:
        is_whole = pick.settings[0].number not in draft.entries
        draft.put(key, sources, pick if is_whole else None, *others)


def _info(draft: Draft, directory: str, picks: Sequence[Pick[Any] | None]) -> tuple[str, dict[str, Any] | None]:
    """Where rows are, and what ``dataset_info.json`` says of them; none where it cannot be read."""
    if not picks:
        return directory, None
    if directory == ONLINE:
        return "", {}
    if directory.startswith("REMOTE:"):
        sentence = f"the rows of {directory}: its dataset_info.json is on a hub, bring it here and set dataset_dir"
    elif (path := draft.files.find(f"{directory}/dataset_info.json")) is None:
        sentence = f"the rows: there is no {directory}/dataset_info.json here or above the file"
    else:
        try:
            return str(path.parent), draft.files.read(path)
        except UserError as error:
            sentence = f"the rows: {error.problems[0].found} in {path}"
    draft.leave_open("data.train", sentence, *picks, example="ROWS")
    return directory, None


def _described(entry: Any, where: str, rows: str) -> dict[str, Any]:
    """A source for an entry of ``dataset_info.json``, whose rows must be of those of ``STAGES``. Raises ``ValueError``
    that says why there is none."""
    if not isinstance(entry, Mapping):
        raise ValueError("dataset_info.json does not have it")
    columns = _names_in(entry, "columns")
    has = "kto" if "kto_tag" in columns else "pairs" if entry.get("ranking") else "supervised"
    if has != rows:
        kinds = {"kto": "answers with a kto_tag", "pairs": "pairs (ranking)", "supervised": "neither pairs nor tagged"}
        raise ValueError(f"its rows are {kinds[has]}, which stage {STAGES[has]} trains on")
    if media := [name for name in ("videos", "audios") if columns.get(name)]:
        raise ValueError(f"rows with {' and '.join(media)} are not trained on")
    if columns.get("images") and rows != "supervised":
        raise ValueError("preferences between answers to images are not trained on")
    if entry.get("folder"):
        raise ValueError("it is a folder of a data set: name its files")
    source: dict[str, Any] = {}
    if "hf_hub_url" in entry:
        source["path"] = text(entry["hf_hub_url"])
    elif "file_name" in entry:
        source["path"] = f"{where}/{text(entry['file_name'])}" if where else text(entry["file_name"])
    else:
        raise ValueError("its rows are neither a file nor a data set of Hugging Face's hub")
    source |= _form(entry, columns, rows)
    if entry.get("subset"):
        source["name"] = text(entry["subset"])
    if entry.get("num_samples"):
        source["first"] = whole(entry["num_samples"])
    if entry.get("split", "train") != "train":
        source["split"] = text(entry["split"])
    return source


def _folder_of_images(path: str, where: str, media: str) -> dict[str, str]:
    """The folder in which paths of images start, where that is not the one of the rows' file."""
    is_elsewhere = where and path.startswith(f"{where}/") and str(PurePath(path).parent) != where
    return {"images": media or where} if media or is_elsewhere else {}


def _form(entry: Mapping[str, Any], columns: Mapping[str, str], rows: str) -> dict[str, Any]:
    """The form of the rows of an entry, and the columns that have other names than ours. Raises ``ValueError``."""
    source: dict[str, Any] = {}
    usual = {name: name for name in ("system", "tools")}
    if entry.get("formatting", "alpaca") == "alpaca":
        source |= {"format": "alpaca", "between": "\n"}
        usual |= {"prompt": "instruction", "query": "input", "history": "history"} | ANSWERS[rows]
        renamed = {}
    else:
        source["format"] = "messages"
        renamed = {"messages": columns.get("messages", "conversations")}
        if renamed["messages"] == "messages" or (rows != "supervised" and renamed["messages"] == "conversations"):
            del renamed["messages"]
        usual |= {name: ours for name, ours in ANSWERS[rows].items() if name != "response"}
        if roles := _tagged(_names_in(entry, "tags")):
            source["roles"] = roles
    if rows != "supervised":
        source["format"] = "auto"
    if columns.get("images", "images") not in ("images", "image"):
        renamed["images"] = columns["images"]
    renamed |= {ours: columns[theirs] for theirs, ours in usual.items() if columns.get(theirs, ours) != ours}
    if renamed.get("kto_tag") == "label":
        del renamed["kto_tag"]  # which is read as well
    if renamed:
        source["columns"] = renamed
    return source


def _names_in(entry: Mapping[str, Any], name: str) -> dict[str, str]:
    """A mapping of names to names, nulls left out."""
    names = entry.get(name) or {}
    if not isinstance(names, Mapping) or not all(isinstance(value, str | None) for value in names.values()):
        raise ValueError(f"its {name} are no names")
    return {str(key): value for key, value in names.items() if value is not None}


def _tagged(tags: Mapping[str, str]) -> dict[str, str]:
    """Names of roles that are not the usual ones. Raises ``ValueError`` for messages with other fields."""
    fields = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    if fields[0] not in ("role", "from") or fields[1] not in ("content", "value"):
        raise ValueError("a message has role and content, or from and value: rename its fields")
    kinds = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system", "observation_tag": "tool"}
    return {
        tags[tag]: ours for tag, ours in kinds.items() if tag in tags and tags[tag].lower() not in USUAL_ROLES[ours]
    }


def holds_pairs(draft: Draft) -> bool:
    """Whether a YAML of data sets of version 1 names pairs of answers."""
    for setting in draft.settings("factory_file"):
        path = draft.files.find(str(setting.value))
        entries = draft.files.read(path).values() if path is not None else ()
        if any(isinstance(entry, Mapping) and entry.get("converter") == "pair" for entry in entries):
            return True
    return False


def _described_1(entry: Any, *, of_pairs: bool) -> dict[str, Any]:
    """A source for an entry of version 1. Raises ``ValueError`` that says why there is none."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise ValueError("it has no path")
    converter = entry.get("converter")
    if of_pairs and converter not in (None, "pair"):
        raise ValueError("its rows are no pairs, and those of others are")
    if converter not in (None, "alpaca", "sharegpt", "pair") or entry.get("streaming"):
        raise ValueError(f"rows of {str(converter)[:LONGEST_NAME] if converter else 'a stream'} are not trained on")
    source: dict[str, Any] = {"path": entry["path"], "format": "auto" if of_pairs else "messages"}
    if converter == "alpaca":
        source |= {"format": "alpaca", "between": ""}
    if converter == "sharegpt":
        source["columns"] = {"messages": "conversations"}
    if entry.get("split", "train") != "train":
        source["split"] = text(entry["split"])
    if entry.get("size"):
        source["first"] = whole(entry["size"])
    if entry.get("weight"):
        source["weight"] = number(entry["weight"])
    return source


def stage(draft: Draft, sources: ImportedSources) -> None:
    """With stage ``pt`` rows are text, under the name of a prompt, and packed unless told otherwise."""
    pick = draft.first("stage", text)
    entries = draft.tree.get("data.train")
    if pick is None:
        return
    if pick.value != "pt":
        draft.apply("stage", pick)
    elif isinstance(entries, list):
        draft.put("data.train", [_as_text(entry) for entry in entries], pick)
        sources.shown = {"text"}
        if all(packing.value for packing in draft.every("data.pack", flag)):
            draft.imply("data.over_length", "split", "packed rows of stage pt are cut in pieces")
        if not draft.has("data.pack"):
            draft.imply("data.pack", True, "rows of stage pt are packed by default")
    elif entries is not None:
        draft.put("data.train", [], pick)
    else:
        draft.drop(pick, "No data set is named.")


def _as_text(source: Mapping[str, Any]) -> dict[str, Any]:
    """A source whose prompts are rows of text."""
    column = source.get("columns", {}).get("instruction", "instruction")
    plain = {key: value for key, value in source.items() if key not in ("between", "columns")}
    return {**plain, "format": "text"} | ({"columns": {"text": column}} if column != "text" else {})


def note_differences(draft: Draft) -> None:
    """What LLaMA-Factory does with conversations otherwise than a run here."""
    if draft.is_preference:
        if draft.method != "reward":
            draft.note("line breaks after turns")
        return
    if draft.tree.get("data.train_on") != "all":
        draft.note("line breaks after turns")
    if draft.program is LLAMA_FACTORY_1:
        draft.note("openers of answers")
        if not any(key.startswith("adapter.") for key in draft.tree):
            draft.note("decay of norms")
    elif draft.tree.get("data.over_length", "truncate") == "truncate":
        draft.note("turns too long")
