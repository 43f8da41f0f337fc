"""A config line by line, with what was set told from what is a default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tonnage.config import Config
from tonnage.config.keys import PRIVATE_KEYS, Key, all_keys, as_written


@dataclass(frozen=True)
class ConfigKey:
    name: str
    """Dotted, items of a list by their number."""
    value: str
    """As it would be written."""
    is_default: bool
    sentence: str
    """What the key is for."""


def settings(config: Config) -> list[ConfigKey]:
    """Every key of a config, in the order of the schema."""
    described = {key.name: key for key in all_keys()}
    return list(_settings(config.model_dump(mode="json", by_alias=True), described, "", ""))


def differences(configs: Sequence[Sequence[ConfigKey]]) -> list[tuple[str, list[str]]]:
    """Keys that are not the same in all configs, and their values; empty where a config has no such key. What is at its
    default wherever it is, and elsewhere cannot be, is no difference."""
    values = [{key.name: key for key in config} for config in configs]
    rows = []
    for name in dict.fromkeys(name for mine in values for name in mine):
        keys = [mine.get(name) for mine in values]
        row = [key.value if key is not None else "" for key in keys]
        if len(set(row)) > 1 and not (None in keys and all(key is None or key.is_default for key in keys)):
            rows.append((name, row))
    return rows


def _settings(tree: Mapping[str, Any], described: Mapping[str, Key], prefix: str, kind: str) -> Iterator[ConfigKey]:
    """Of a section at ``prefix``, as it is called, whose keys are described under ``kind``."""
    for name, value in tree.items():
        shown, key = prefix + name, kind + name
        description = described.get(key)
        if isinstance(value, Mapping) and any(other.startswith(f"{key}.") for other in described):
            yield from _settings(value, described, f"{shown}.", f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                place = f"{shown}." if len(value) == 1 else f"{shown}.{number}."
                yield from _settings(item, described, place, "data.train.")
        else:
            written = "(not shown)" if key in PRIVATE_KEYS and value else as_written(value)
            default = description.default if description is not None else ""
            if value is None and default == "":
                continue
            is_default = written == default or (value in ([], {}) and default in ("", "[]", "{}"))
            yield ConfigKey(shown, written, is_default, description.sentence if description is not None else "")
