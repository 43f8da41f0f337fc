"""What is known of models and of their modules by name (``tables/families.yaml``)."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from tonnage.migration.yaml_files import read_data

_KNOWN = read_data("families")
BESIDE = {name: ours for ours, names in _KNOWN["beside"].items() for name in names}
"""Modules that are trained whole beside an adapter, by their names in models, and what we call them."""
ALL_TEXT = frozenset(_KNOWN["all_text"])
"""Modules that are all of a model but its towers."""


def of_family(subject: str, model: str) -> Any:
    """What the table says of a model: ``router_loss`` or ``peft_targets``; None if it does not know the model."""
    return next((value for family, value in _KNOWN[subject].items() if re.search(family, model.lower())), None)


def origin_of(model: str) -> str:
    """The model whose weights another holds in 4 bits or fewer; empty if that is not known."""
    matches = ((re.fullmatch(name, model, re.IGNORECASE), origin) for name, origin in _KNOWN["origins"].items())
    return next((match.expand(origin) for match, origin in matches if match is not None), "")


def end_of_text(model: str) -> str:
    """The token that ends a text in a model's vocabulary; empty if the model is not known."""
    name = PurePath(model.lower()).name
    for token, families in _KNOWN["end_of_text"].items():
        if any(re.fullmatch(family, name) for family in families):
            return str(token)
    return ""
