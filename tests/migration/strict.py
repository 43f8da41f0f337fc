"""The data of ``tonnage.migration``, read strictly: a field that nobody reads, or a key that stands twice, is a mistake
in a table. The package itself takes its own tables as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from tonnage.migration.keys import read_table
from tonnage.migration.methods import PREFERENCES
from tonnage.migration.programs import DECIDED

OF_A_KEY = {
    "include": ("include", "without"),
    "tells": ("tells", "becomes", "why", "flag"),
    "not applicable": ("not applicable", "flag"),
    "not supported": ("not supported", "idle", "of", "flag", "decides"),
}
"""What an entry of a key says -> its fields."""
OF_A_PROGRAM = ("versions", "defaults", *(f"of_{method}" for method in PREFERENCES), "like", "counts_workers", "signs")


def check(path: Path) -> None:
    """Raise ``ValueError`` for a mistake in a file of tables."""
    text = path.read_text()
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert node is not None, path
    check_once(path.name, node)
    content = yaml.safe_load(text)
    match path.stem:
        case "quantities":
            for name, entry in content.items():
                fields = {"why": entry} if isinstance(entry, str) else entry
                check_fields(f"quantity {name}", fields, ("becomes", "why"))
        case "prompts":
            for name, entry in content["types"].items():
                check_fields(f"prompt {name}", entry, ("like", "style", "usual", "answer", "columns"))
        case "programs":
            for name, entry in content.items():
                check_fields(f"program {name}", entry, OF_A_PROGRAM)
                for defaults in (entry.get("defaults", {}), *(entry.get(f"of_{method}", {}) for method in PREFERENCES)):
                    check_fields(f"defaults of {name}", {"precision": None, **defaults}, DECIDED)
        case _ if "title" in content or "keys" in content:
            check_keys(path.stem, content)


def check_keys(table: str, content: Mapping[str, Any]) -> None:
    check_fields(table, content, ("title", "signs", "sections", "hints", "keys"))
    names = [name for several in content["keys"] for name in several.split()]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{table} has {', '.join(sorted(twice))} twice")
    for several, entry in content["keys"].items():
        place, fields = f"{table}, {several}", {"tells": entry} if isinstance(entry, str) else entry
        kind = next((kind for kind in OF_A_KEY if kind in fields), "not supported")
        check_fields(place, fields, OF_A_KEY[kind])
        if kind not in fields:
            raise ValueError(f"{place} says neither what it tells nor that it is not applicable or not supported")
        if kind == "include":
            included = {key.name for key in read_table(fields["include"]).keys}
            if unknown := set(fields.get("without", "").split()) - included:
                raise ValueError(f"{place}: {', '.join(sorted(unknown))}, left out, is no key of the included table")


def check_fields(place: str, fields: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ``ValueError`` if an entry has fields that nobody reads, or none at all."""
    if not fields:
        raise ValueError(f"{place} says nothing")
    if unknown := set(fields) - set(known):
        raise ValueError(f"{place} has {', '.join(sorted(unknown))}; known: {', '.join(known)}")


def check_once(name: str, node: yaml.Node) -> None:
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        if twice := {key for key in names if names.count(key) > 1}:
            raise ValueError(f"{name} has {', '.join(sorted(twice))} twice")
    for inner in node.value if not isinstance(node, yaml.ScalarNode) else ():
        for part in inner if isinstance(inner, tuple) else (inner,):
            check_once(name, part)
