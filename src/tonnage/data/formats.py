"""From a row as it lies in a file to what it is: forms, and the fields by which they are told.

Some data sets have fields of the same meaning under other names, which no look at a row can tell: those have presets,
a form with its columns, chosen by name. ``detect`` looks at the rows and refuses to guess between two forms that both
fit. ``reader`` reads them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tonnage.data.conversation import RowError
from tonnage.data.turns import as_list

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """A form of rows."""

    must: tuple[str, ...]
    """Fields that a row has."""
    may: tuple[str, ...]
    """Fields that are read as well."""
    fits: Callable[[Row], bool]
    """Whether a row looks like it."""
    is_chat: bool = True
    """Whether a template makes the text."""


@dataclass(frozen=True)
class Form:
    """How the rows of one source are to be understood."""

    format: str
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our field -> the column that holds it."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Names of roles besides the usual ones -> ours."""
    optional: tuple[str, ...] = ()
    """Of ``columns``, those that a preset named, which rows need not have."""
    between: str = "\n\n"
    """What stands between ``instruction`` and ``input`` in the message of a user."""
    drops_system: bool = False
    """Whether a system message at the beginning of a conversation is left out."""


def is_turns(value: object, *keys: str) -> bool:
    value = quietly(value)
    return isinstance(value, list) and any(
        isinstance(turn, dict) and any(map(turn.__contains__, keys)) for turn in value
    )


def quietly(value: object) -> object:
    try:
        return as_list(value)
    except RowError:
        return value


def turns_of(row: Row, usual: str) -> str:
    """The field that holds a row's messages, the ``usual`` one if that does."""
    names = (usual, *LISTS)
    return next(
        (name for name in names if is_turns(row.get(name), "role", "from")),
        next((name for name in names if name in row), usual),
    )


def _has(*names: str) -> Callable[[Row], bool]:
    return lambda row: all(name in row for name in names)


LISTS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns")
"""Fields under which lists of messages are kept."""
_BESIDE = ("system", "tools", "functions")
PAIRS = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("question", "answer"))
"""Fields of a question and its answer in a list of both."""
MASKS = ("labels", "loss_mask", "assistant_masks", "completion_mask", "assistant_mask", "train_mask")

FORMATS: dict[str, Format] = {
    "alpaca": Format(
        ("instruction", "output"), ("input", "system", "history", *_BESIDE[1:]), _has("instruction", "output")
    ),
    "messages": Format(("messages",), _BESIDE, lambda row: any(is_turns(row.get(name), "role") for name in LISTS)),
    "sharegpt": Format(("conversations",), _BESIDE, lambda row: any(is_turns(row.get(name), "from") for name in LISTS)),
    "completion": Format(("prompt", "completion"), _BESIDE, _has("prompt", "completion")),
    "text": Format(
        ("text",), (), lambda row: isinstance(row.get("text"), str) and "message_id" not in row, is_chat=False
    ),
    "pairs": Format(
        ("conversation",), _BESIDE, lambda row: any(pair_names(row.get(name)) is not None for name in LISTS)
    ),
    "strings": Format(("data",), _BESIDE, lambda row: is_strings(row.get("data"))),
    "gemini": Format(
        ("contents",),
        ("systemInstruction", "system_instruction", "tools"),
        lambda row: is_turns(row.get("contents"), "parts"),
    ),
    "instances": Format(
        ("instruction", "instances"),
        ("system",),
        lambda row: "instruction" in row and is_turns(row.get("instances"), "output"),
    ),
    "tree": Format(("prompt",), (), lambda row: isinstance(row.get("prompt"), dict) and "replies" in row["prompt"]),
    "segments": Format(("segments",), (), lambda row: is_turns(row.get("segments"), "text"), is_chat=False),
    "tokens": Format(
        ("input_ids",), (*MASKS, "attention_mask"), lambda row: isinstance(row.get("input_ids"), list), is_chat=False
    ),
}
"""The forms by name. Every row may also have ``loss_weight``."""

PRESETS: dict[str, tuple[str, dict[str, str]]] = {
    "codefeedback": ("alpaca", {"instruction": "query", "output": "answer"}),
    "dolly": ("alpaca", {"input": "context", "output": "response"}),
    "firefly": ("alpaca", {"instruction": "input", "output": "target"}),
    "gpteacher": ("alpaca", {"output": "response"}),
    "gsm8k": ("alpaca", {"instruction": "question", "output": "answer"}),
    "metamath": ("alpaca", {"instruction": "query", "output": "response"}),
    "numina": ("alpaca", {"instruction": "problem", "output": "solution"}),
    "openorca": ("alpaca", {"system": "system_prompt", "instruction": "question", "output": "response"}),
    "ultrachat": ("strings", {}),
    "oasst": ("tree", {}),
    "seed_tasks": ("instances", {}),
    "xtuner": ("pairs", {}),
}
"""Data sets by name: the form of their rows, and the columns that hold its fields."""

NAMES: tuple[str, ...] = (*FORMATS, *PRESETS)


def form_of(format: str, columns: Mapping[str, str], roles: Mapping[str, str]) -> Form:
    """The form that a source asks for by name: a format, or a preset with ``columns`` on top."""
    if format not in PRESETS:
        return Form(format, dict(columns), dict(roles))
    name, preset = PRESETS[format]
    return Form(name, {**preset, **columns}, dict(roles), tuple(set(preset) - set(columns)))


def rename(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under our names: ``columns`` maps our field to the file's column."""
    renamed = {name: value for name, value in row.items() if name not in columns.values()}
    for ours, theirs in columns.items():
        if theirs in row:
            renamed[ours] = row[theirs]
    return renamed


def candidates(row: Row) -> tuple[str, ...]:
    """Formats whose fields the row has."""
    return tuple(name for name, format in FORMATS.items() if format.fits(row))


def detect(rows: Sequence[Row]) -> tuple[str, ...]:
    """Formats that fit the rows: one when all is well, several when it is ambiguous, none when nothing fits.

    A row that fits nothing is left to ``Reader``, which names it; rows that disagree make it ambiguous.
    """
    fitting = [found for row in rows if (found := candidates(row))]
    if not fitting:
        return ()
    shared = set(fitting[0]).intersection(*fitting)
    every = sorted(set().union(*fitting), key=list(FORMATS).index)
    if len(every) == 1 or not shared:
        return tuple(every)
    return tuple(name for name in every if name in shared)


def fields_of(format: str) -> tuple[str, ...]:
    """Every field that is read of rows in a format."""
    return (*FORMATS[format].must, *FORMATS[format].may, "loss_weight")


def nearest_field(name: str, format: str) -> str | None:
    """The field of a format that was probably meant."""
    near = difflib.get_close_matches(name, fields_of(format), n=1, cutoff=0.6)
    return near[0] if near else None


def as_turns(value: object) -> object:
    """A list of messages, also of one that stands alone or as JSON text; a string that is none stays one."""
    found = quietly(value)
    if isinstance(found, dict) and ("role" in found or "from" in found):
        return [found]
    return found if is_turns(found, "role", "from") else value


def pair_names(value: object) -> tuple[str, str] | None:
    """Which fields of a list hold questions and answers, if it is a list of those."""
    value = quietly(value)
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return None
    return next(
        (names for names in PAIRS if names[1] in value[0] and (names[0] in value[0] or "system" in value[0])), None
    )


def is_strings(value: object) -> bool:
    value = quietly(value)
    return isinstance(value, list) and len(value) > 1 and all(isinstance(words, str) for words in value)
