"""The data of this package, in ``tables``: YAML files, read strictly, and templates that write chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, Template


def _read(name: str) -> str:
    return files("tonnage.migration").joinpath("tables", name).read_text("utf-8")


def read_template(name: str) -> Template:
    """What writes a chat template. Its own marks are those of Jinja with angle brackets in the place of braces."""
    environment = Environment(
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.from_string(_read(f"{name}.jinja"))


def as_literal(text: str) -> str:
    """A text as Jinja writes one."""
    quoted = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("'", "\\'")
    return f"'{quoted}'"


def as_expression(form: str, places: Mapping[str, str]) -> str:
    """A format as an expression of Jinja; ``places`` are what stands in it in braces, each as an expression."""
    parts = re.split(r"\{(\w+)\}", form)  # texts and places in turn
    return " + ".join(places[part] if at % 2 else as_literal(part) for at, part in enumerate(parts) if part)


def read_data(name: str) -> dict[str, Any]:
    """The mapping that a file holds. Raises ``ValueError`` for a key that stands twice in a mapping."""
    text = _read(f"{name}.yaml")
    loader = yaml.CSafeLoader(text) if yaml.__with_libyaml__ else yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        assert node is not None, name
        _check_once(name, node)
        content: dict[str, Any] = loader.construct_document(node)
    finally:
        loader.dispose()
    return content


def check_fields(place: str, fields: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ``ValueError`` if an entry has fields that nobody reads, or none at all."""
    if not fields:
        raise ValueError(f"{place} says nothing")
    if unknown := set(fields) - set(known):
        raise ValueError(f"{place} has {', '.join(sorted(unknown))}; known: {', '.join(known)}")


def _check_once(name: str, node: yaml.Node) -> None:
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        if twice := {key for key in names if names.count(key) > 1}:
            raise ValueError(f"{name}.yaml has {', '.join(sorted(twice))} twice")
    for inner in node.value if not isinstance(node, yaml.ScalarNode) else ():
        for part in inner if isinstance(inner, tuple) else (inner,):
            _check_once(name, part)
