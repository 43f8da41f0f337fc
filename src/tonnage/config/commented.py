"""A config as YAML for people: what was set and no more, each line under a comment that says why it is so."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from tonnage.config.schema import Config
from tonnage.config.yaml_tree import write_yaml
from tonnage.files.visible import visible

WIDTH = 100
"""Characters of a line of comments."""


def commented_text(config: Config, comments: Mapping[str, str], heading: str) -> str:
    """The keys of ``config`` that were set, in the order of the schema; it reads back as the same config.

    ``comments`` are by dotted key; each stands above its line, ``heading`` above them all.
    """
    tree = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for side in ("train", "validation"):
        sources = tree["data"].get(side)
        if isinstance(sources, list) and len(sources) == 1:  # as people write it
            (source,) = sources
            tree["data"][side] = source["path"] if set(source) == {"path"} else source
    return "\n".join([*_comment(heading, ""), *_section(tree, comments, "")]) + "\n"


def _section(tree: Mapping[str, Any], comments: Mapping[str, str], prefix: str) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        key = prefix + name
        if key in comments:
            yield from _comment(comments[key], indent)
        if isinstance(value, Mapping) and any(other.startswith(f"{key}.") for other in comments):
            yield f"{indent}{name}:"
            yield from _section(value, comments, f"{key}.")
        else:
            yield from (indent + line for line in lines_of(name, value))


_PROSE = re.compile(r"(?=[^\n]*\n)[!-~\xa1-\u024f\uff5c][ -~\xa1-\u024f\uff5c\n]*[!-~]")
"""A text of several lines that YAML holds as it is: it begins and ends with no white space, and all of it is seen."""


def lines_of(name: str, value: Any) -> list[str]:
    if isinstance(value, list) or (isinstance(value, Mapping) and value):
        return write_yaml({name: value}).rstrip("\n").split("\n")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str) and _PROSE.fullmatch(value):
        return [f"{name}: |-", *(f"  {line}" if line else "" for line in value.split("\n"))]
    # By itself: in a mapping of nothing else it would be written in braces.
    first, *rest = write_yaml(value).removesuffix("...\n").rstrip("\n").split("\n")
    return [f"{name}: {first}", *(f"  {line}" for line in rest)]


def on_a_line(comment: str) -> str:
    """A comment as YAML can hold it, whatever names it repeats."""
    return visible(" ".join(comment.split()))


def _comment(text: str, indent: str) -> list[str]:
    start = f"{indent}# "
    width = WIDTH - len(start)
    return [
        start + line for line in textwrap.wrap(on_a_line(text), width, break_long_words=False, break_on_hyphens=False)
    ]
