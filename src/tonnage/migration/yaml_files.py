"""The data of this package, in ``tables``: YAML files, and templates that write chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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
    """The mapping that a file holds."""
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    content: dict[str, Any] = yaml.load(_read(f"{name}.yaml"), Loader=loader)
    return content
