"""How rows become documents: the tokenizer, the templates and their shapes, and what is trained on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from tonnage.data.shape import TurnShape


@dataclass(frozen=True)
class Script:
    """A template that conversations are written with, and its shape."""

    template: str
    special: dict[str, str]
    arguments: dict[str, Any]
    date: str
    shape: TurnShape

    @staticmethod
    def from_json(value: dict[str, Any]) -> Script:
        """A script back from plain values."""
        shape: dict[str, Any] = {
            name: tuple(one) if isinstance(one, list) else one for name, one in value.pop("shape").items()
        }
        return Script(shape=TurnShape(**shape), **value)


@dataclass(frozen=True)
class Recipe:
    """All that is needed to turn rows into documents: plain values, so that it can be handed to another process."""

    tokenizer_json: str
    scripts: tuple[Script, ...]
    """One, or another one besides for conversations with tools."""
    train_on: str
    fold_system: bool
    """Whether a system message goes into the first user's, where the template takes none."""
    text_start: str
    """What goes before a plain text: the beginning-of-text token where the tokenizer puts one."""
    text_end: str
    """What goes after a plain text: the end-of-text token."""
    carry: tuple[str, ...] = ()
    """Columns of the rows, numbers, that go with each document."""
    control_tokens: str = "text"
    """What becomes of control tokens in the words of rows: text | keep | error."""
    controls: tuple[str, ...] = ()
    """Which those are."""

    def to_json(self) -> str:
        """The recipe as JSON."""
        return json.dumps(asdict(self), ensure_ascii=True)

    def key(self) -> dict[str, Any]:
        """Plain values that differ where recipes do; the tokenizer, a few megabytes, as a digest."""
        tokenizer = hashlib.blake2b(self.tokenizer_json.encode(), digest_size=16).hexdigest()
        found = asdict(replace(self, tokenizer_json=tokenizer))
        if not self.carry:  # so that what was prepared without is found
            del found["carry"]
        return found

    @staticmethod
    def from_json(text: str) -> Recipe:
        """The recipe back from ``to_json``."""
        value = json.loads(text)
        for name, read in (("scripts", Script.from_json), ("carry", str), ("controls", str)):
            value[name] = tuple(map(read, value[name]))
        return Recipe(**value)
