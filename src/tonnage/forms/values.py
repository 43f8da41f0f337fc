"""Values of rows: what kind they are, whether they hold anything, and what they say as a number or a text."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tonnage.forms.conversation import RowError

Row = Mapping[str, Any]

FLAGS = ("train", "loss", "weight", "loss_weight")
"""What says whether a message, or a part of one, is trained: true or false, or a number from 0 up."""
LARGEST_WEIGHT = 1e6
MOST_UNREAD = 200
"""Names of fields that are counted one by one."""


def kind_of(value: object) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return {
        str: "a string",
        int: "a number",
        float: "a number",
        bool: "true/false",
        list: "a list",
        dict: "an object",
    }.get(type(value), f"a {type(value).__name__}")


def names_of(row: Mapping[Any, Any]) -> str:
    names = [str(name)[:40] for name in list(row)[:12]]
    return ", ".join(names) if names else "no fields at all"


def is_empty(value: object) -> bool:
    """Whether a field holds nothing: null, NaN, nothing in it, or only such in it."""
    if isinstance(value, dict):
        return all(map(is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def as_list(value: object) -> object:
    """A list or an object that stands as JSON text, as CSV and Parquet files hold them; other values as they are.

    Raises ``RowError`` for what begins as one and is none.
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    return parse_json(value, "a list as text")


def parse_json(text: str, what: str) -> Any:
    """The value of JSON text. Raises ``RowError``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        python = re.match(r"\s*[\[{]+\s*'", text) is not None
        hint = "; it is written as Python writes it: use json.dumps" if python else ""
        raise RowError("wrong_type", f"{what} is not JSON ({error}){hint}") from None


def number_weight(value: object, where: str) -> float | None:
    """What a flag says as a weight; ``None`` where it says nothing. Raises ``RowError``."""
    if value is None:
        return None
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float):
        raise RowError("wrong_type", f"{where} is {kind_of(value)}, not true/false or a number from 0 up")
    weight = as_float(value)
    if not (math.isfinite(weight) and 0 <= weight <= LARGEST_WEIGHT):
        shown = str(value)[:20] if isinstance(value, float) else "a number that is negative or too large"
        raise RowError("wrong_type", f"{where} is {shown}, not a number from 0 to {LARGEST_WEIGHT:,.0f}")
    return weight


def as_float(number: float) -> float:
    """A number as a float: infinity for an integer that no float holds."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def weights_of(item: Row, names: Iterable[str], where: str) -> list[float]:
    """What the flags of an item say, those that say anything. Raises ``RowError``."""
    weights = (number_weight(item.get(name), f"{where}.{name}") for name in names)
    return [weight for weight in weights if weight is not None]


def count_unread(unread: Counter[str], name: str) -> None:
    """Count a field that nobody reads, under its name while there are few of them."""
    name = name[:80]
    unread[name if name in unread or len(unread) < MOST_UNREAD else "fields of other names"] += 1


def quietly(value: object) -> object:
    try:
        return as_list(value)
    except RowError:
        return value


def is_turns(value: object, *keys: str) -> bool:
    """Whether a value is a list in which an object has one of ``keys``."""
    value = quietly(value)
    return isinstance(value, list) and any(
        isinstance(turn, dict) and any(map(turn.__contains__, keys)) for turn in value
    )


def as_turns(value: object) -> object:
    """A list of messages, also from a single one or from JSON text; any other value stays as it is."""
    read = quietly(value)
    if isinstance(read, dict) and ("role" in read or "from" in read):
        return [read]
    return read if is_turns(read, "role", "from") else value


def is_strings(value: object) -> bool:
    value = quietly(value)
    return isinstance(value, list) and len(value) > 1 and all(isinstance(words, str) for words in value)


def without_nulls(value: Any) -> Any:
    """A value without the fields that are null: Arrow gives every object of a column the fields of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [without_nulls(entry) for entry in value]
    return value


def string_of(row: Row, name: str) -> str:
    if name not in row:
        raise RowError("missing_field", f"no field {name!r} (it has {names_of(row)})")
    value = row[name]
    if not isinstance(value, str):
        raise RowError("wrong_type", f"{name!r} is {kind_of(value)}, not a string")
    return value


def optional_string(row: Row, name: str) -> str:
    value = row.get(name)
    if is_empty(value):
        return ""
    if not isinstance(value, str):
        raise RowError("wrong_type", f"{name!r} is {kind_of(value)}, not a string")
    return value


def answer_of(text: str, name: str) -> str:
    if not text or text.isspace():
        raise RowError("empty_answer", f"{name!r} is empty: there is nothing to learn")
    return text


_NO_TEXT = ("true", "false", "yes", "no", "on", "off", "y", "n", "null", "~", ".inf", ".nan")
"""Words that are something else in YAML, of one version or another."""


def written(value: object) -> str:
    """A plain value as a config takes it, in a file and on a command line."""
    match value:
        case Mapping():
            return "{" + ", ".join(f"{written(key)}: {written(item)}" for key, item in value.items()) + "}"
        case str() if re.fullmatch(r"[A-Za-z_./~][\w./~-]*", value) and value.lower() not in _NO_TEXT:
            return value
        case _:
            return json.dumps(value, ensure_ascii=False)
