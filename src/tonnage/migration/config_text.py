"""A config of ours as YAML that says where each line comes from, with what is still needed as comments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from tonnage.config.commented import lines_of, on_a_line
from tonnage.config.keys import all_keys

if TYPE_CHECKING:
    from tonnage.migration.draft import MissingAnswer

COMMENT_COLUMN = 44


def nested(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections, in the order of our schema."""
    sections: dict[str, Any] = {}
    for key in sorted(tree, key=_places().__getitem__):
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else sections)[name] = tree[key]
    return sections


def config_text(
    tree: Mapping[str, Any],
    origins: Mapping[str, Sequence[str]],
    needs: Sequence[MissingAnswer],
    files: Sequence[str],
    version: str,
) -> str:
    """The config as YAML text; what is needed and not set stands at its place, commented out. ``version`` is that of
    the program whose defaults are written, if it has any."""
    open_ones = {need.key: need for need in needs if need.key and need.key not in tree and need.key in _places()}
    imported = f"# Imported from {on_a_line(' and '.join(PurePath(name).name for name in files))}"
    lines = [
        f"{imported}, with the defaults of {version}." if version else f"{imported}.",
        "# What is not here has tonnage's default (docs/config.md).",
    ]
    section = ""
    for key in sorted({*tree, *open_ones}, key=_places().__getitem__):
        parent, _, name = key.rpartition(".")
        if parent != section and parent:
            lines.append(f"{parent}:")
        section = parent
        indent = "  " if parent else ""
        if key in tree:
            lines += _lines(name, tree[key], indent, ", ".join(origins.get(key, ())))
        else:
            need = open_ones[key]
            lines.append(_beside(f"{indent}# {name}: {need.example}", f"NEEDED: {need.sentence}"))
    return "\n".join(lines) + "\n"


@cache
def _places() -> dict[str, int]:
    """Keys of ours and their places in the schema."""
    return {key.name: place for place, key in enumerate(all_keys())}


def _lines(name: str, value: Any, indent: str, origin: str) -> list[str]:
    lines = [indent + line for line in lines_of(name, value)]
    if not origin:
        return lines
    if len(lines) == 1:
        return [_beside(lines[0], origin)]
    return [f"{indent}# {on_a_line(origin)}", *lines]  # beside its first line it might be inside of a text


def _beside(line: str, comment: str) -> str:
    return f"{line:<{COMMENT_COLUMN - 2}}  # {on_a_line(comment)}"
