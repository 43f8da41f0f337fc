"""Chat templates by the names that other programs have for them (``tables/chat_templates.yaml``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tonnage.migration.turns import TurnFormats, jinja
from tonnage.migration.yaml_files import read_data

JINJA = (".jinja", ".jinja2", ".j2")
"""How files with a template end."""


@dataclass(frozen=True)
class Named:
    """A template under a name of another program."""

    family: str = ""
    """Models, by a pattern of their names in small letters, whose tokenizers bring it along."""
    ours: str = ""
    """A built-in template with the same text; empty if there is none."""
    differs: str = ""
    """How the text that is taken differs all the same."""
    images: str = ""
    """Models, by a pattern too, whose tokenizers bring it along with places for images, which ours has not."""
    text: str = ""
    """The same text as Jinja, for models of other families."""
    turns: TurnFormats | None = None
    """What the text is made of."""


def _read_templates(content: Mapping[str, Any], program: str) -> dict[str, Named]:
    templates = {}
    for name, entry in content[program].items():
        if "turns" in entry:
            parts = dict(entry["turns"])
            parts = content["shared"].get(parts.pop("like", ""), {}) | parts
            turns = TurnFormats(**parts | {"tokens": tuple(parts.get("tokens", ()))})
            entry = entry | {"turns": turns, "text": jinja(turns)}
        templates[name] = Named(**entry)
    return templates


_CONTENT = read_data("chat_templates")
AXOLOTL_TEMPLATES = _read_templates(_CONTENT, "axolotl")
LLAMA_FACTORY_TEMPLATES = _read_templates(_CONTENT, "llama_factory")


def ours_for(named: Named, model: str, *, has_images: bool = False) -> str:
    """``auto`` or the name of a template of ours, if rows hold no images; empty if neither is right for a model."""
    families = [named.family, named.images] if has_images else [named.family]
    if any(family and re.search(family, model.lower()) for family in families):
        return "auto"
    return "" if has_images else named.ours
