"""What differs between two configs, and whether it makes another run of it.

A run that goes on from a checkpoint may have another layout: workers, ZeRO stage, micro-batch, kernels and the like
change no loss beyond rounding, and how often it is evaluated or saved changes none; what weight files may lack or hold
besides matters at the start alone. Everything else is part of what the run means, new keys included until they are
listed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tonnage.config.keys import as_written
from tonnage.config.schema import Config

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
    """One key that differs."""

    key: str
    """Dotted."""
    before: str
    after: str
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
    old, new = dict(_flat(before)), dict(_flat(as_json(after)))
    return [
        Change(key, as_written(old.get(key)), as_written(new.get(key)), _is_free(key))
        for key in dict.fromkeys([*new, *old])
        if old.get(key) != new.get(key)
    ]


def as_json(config: Config) -> dict[str, Any]:
    """The config as plain values, every default written out."""
    return config.model_dump(mode="json", by_alias=True, exclude_none=True)


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and key not in WHOLE:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
