"""What differs between two configs, and whether it makes another run of it.

A run that goes on from a checkpoint may have another layout: workers, ZeRO stage, micro-batch, kernels and the like
change no loss beyond rounding, and how often it is evaluated or saved changes none; what weight files may lack or hold
besides matters at the start alone. Everything else is part of what the run means, new keys included until they are
listed here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tonnage.config.keys import as_written
from tonnage.config.schema import Config
from tonnage.config.values import as_overrides

FREE = (
    "launch",
    "memory",
    "parallel",
    "kernels",
    "compile",
    "checkpoint",
    "evaluate",
    "track",
    "track_samples",
    "output",
    "data.cache",
    "trust_remote_code",
    "allow_missing",
    "allow_unexpected",
)
"""Sections and keys that do not change what a run means."""
WHOLE = ("adapter", "kernels")
"""Keys that are a word or a section: told whole, as they are written."""


@dataclass(frozen=True)
class Change:
    key: str
    """Dotted."""
    before: str
    after: str
    undone: str
    """The overrides that bring back what was, as a shell takes them."""
    is_free: bool
    """Whether the run means the same as before."""

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def compare(before: Mapping[str, Any], after: Config) -> list[Change]:
    """Keys that differ between a config as it was stored in JSON and another, in the order of the schema.

    A key that is younger than the stored config was at its default then.
    """
    with suppress(ValidationError):  # of a version that had other keys: compared as it is
        before = as_json(Config.model_validate(before))
    free = tuple(f"{section}." for section in FREE)
    old, new = dict(flat(before, whole=WHOLE)), dict(flat(as_json(after), whole=WHOLE))
    return [
        Change(key, as_written(old.get(key)), as_written(new.get(key)), _settings(old, key), f"{key}.".startswith(free))
        for key in dict.fromkeys([*new, *old])
        if old.get(key) != new.get(key)
    ]


def _settings(values: Mapping[str, Any], key: str) -> str:
    """Overrides that give a key what it has in flat ``values``; those of its section where it is one there."""
    parts = {name: value for name, value in values.items() if name.startswith(f"{key}.")}
    return shlex.join(as_overrides(parts or {key: values.get(key)}))


def as_json(config: Config) -> dict[str, Any]:
    """The config as plain values, every default written out."""
    return config.model_dump(mode="json", by_alias=True, exclude_none=True)


def flat(tree: Mapping[str, Any], prefix: str = "", whole: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted keys of a tree and what they hold; keys that are ``whole`` hold mappings as they are."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and key not in whole:
            yield from flat(value, f"{prefix}{key}.", whole)
        else:
            yield f"{prefix}{key}", value
