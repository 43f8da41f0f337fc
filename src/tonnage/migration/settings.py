"""A setting: one key with its value, as a file or a command has it; and what all that read those agree on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.errors import UserError, user_error
from tonnage.files.visible import shortened
from tonnage.migration.keys import LONGEST_NAME, DocumentedKey, Table

WANTED = (
    "a YAML of Axolotl, LLaMA-Factory, torchtune or ms-swift, a DeepSpeed JSON, an Accelerate YAML, arguments of "
    "transformers or TRL as YAML or JSON, or a saved command line that starts with accelerate, torchrun, deepspeed, "
    "python, trl, axolotl, llamafactory-cli, tune or swift"
)


def unreadable(observed: str, where: str | Path) -> UserError:
    """The refusal of a file or a command of which nothing can be made."""
    return user_error(observed, WANTED, where=str(where))


SECRET = ("token", "secret", "password", "api_key", "access_key")
"""Parts of names whose values are not repeated."""


@dataclass(frozen=True)
class ForeignSetting:
    """One key with its value."""

    table: Table
    name: str
    """Dotted, as the table has it but for numbers of list items."""
    value: Any
    where: str
    """The file."""
    rank: int
    """What counts where two say different things: the lower."""
    written: str = ""
    """As it was written, ``--learning_rate`` for instance; the name if that is it."""
    number: int = 0
    """Its place among all that are read."""

    @property
    def key(self) -> DocumentedKey | None:
        """What the table says of it."""
        return self.table.find(self.name)

    @property
    def is_auto(self) -> bool:
        """Whether the Trainer fills the value in from its arguments, as it does in configurations of DeepSpeed."""
        return self.value == "auto" and self.rank in (RANK_DEEPSPEED, RANK_ACCELERATE)

    @property
    def shown(self) -> str:
        """The key as it was written, or its beginning."""
        return shortened(self.written or self.name, LONGEST_NAME)

    @property
    def shown_value(self) -> str:
        """The value as it would be written in JSON, secrets left out."""
        is_secret = any(part in self.name.lower() for part in SECRET)
        if self.value not in (None, "") and is_secret and (self.key is None or self.key.verdict != "mapped"):
            return "..."
        if isinstance(self.value, float) and self.value.is_integer() and self.value >= 1e6:
            return f"{self.value:g}"
        return shortened(self.value if isinstance(self.value, str) else json.dumps(self.value, default=str))


RANK_DEEPSPEED, RANK_WORDS, RANK_ARGUMENTS, RANK_LAUNCHER, RANK_ACCELERATE = range(5)
"""Whose word counts: DeepSpeed's own file decides what DeepSpeed does, words of a command take the place of a file's,
and those of the launcher the place of Accelerate's file."""


def flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and what they hold; lists of mappings by number, other lists whole."""
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, key + ".")
        elif isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
            for index, part in enumerate(value):
                yield from flat(part, f"{key}.{index}.")
        else:
            yield key, value
