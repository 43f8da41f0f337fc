"""What sources of other programs have in common: how lists of them are read, names of roles that we know, and what rows
want to be shown by."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tonnage.migration.draft import Draft, Pick
from tonnage.migration.prompts import PromptFormat
from tonnage.migration.turns import TurnFormats
from tonnage.migration.values import text

Leaves = dict[str, Pick[Any]]
"""What is said of one data set, by name."""
PART = re.compile(r"([\w.-]+)(?:\[(\d*)(%?):(\d*)(%?)\])?")
"""``train[:95%]``."""

USUAL_ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "ai", "function_call"),
    "tool": ("tool", "observation", "ipython", "function", "tool_response"),
}
"""Names of roles that our reader knows."""


@dataclass
class ImportedSources:
    """Sources, and what they want to be shown by."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    picks: list[Pick[Any]] = field(default_factory=list)
    shown: set[str] = field(default_factory=set)
    prompt: PromptFormat | TurnFormats | None = None
    """A text around the columns of the rows, which no built-in template has."""
    hold_images: bool = False
    """Whether a program says that rows of theirs have images."""
    templates: list[Pick[str]] = field(default_factory=list)
    """Names of chat templates that sources ask for."""


def data_sets(draft: Draft, quantity: str) -> list[Leaves]:
    """What is said of each data set of a list, or of the only one; of what is said twice, what counts."""
    by_place: dict[str, Leaves] = {}
    for pick in sorted(draft.every(quantity, lambda value: value), key=lambda pick: -pick.settings[0].rank):
        parts = pick.settings[0].name.split(".")[1:]
        place, leaf = (parts[0], parts[1:]) if parts and parts[0].isdecimal() else ("0", parts)
        if pick.value in (None, "", {}, []):
            draft.drop(pick, "Not set.")
            continue
        leaves, name = by_place.setdefault(place, {}), ".".join(leaf)
        before = leaves.get(name)
        if before is not None and before.value == pick.value:
            pick = Pick(pick.value, (*pick.settings, *before.settings))
        elif before is not None:
            draft.prefer(pick, before)
        leaves[name] = pick
    return list(by_place.values())


def part_of(split: Any) -> dict[str, Any]:
    """``train[:95%]`` is a split and its first rows. Raises ``ValueError`` for another part."""
    parts = PART.fullmatch(text(split))
    if parts is None or parts[2] or (parts[4] == "" and parts[3]):
        raise ValueError(f"is {split}: a split, or its first rows (train[:1%]), and no other part of it")
    part: dict[str, Any] = {} if parts[1] == "train" else {"split": parts[1]}
    if parts[4] and not parts[5]:
        part["first"] = int(parts[4])
    elif parts[4] and int(parts[4]) < 100:
        part["first"] = int(parts[4]) / 100
    return part
