"""What is known of models by their names (``tables/families.yaml``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from tonnage.migration.yaml_files import read_data

_KNOWN = read_data("families")


def router_loss(model: str) -> float | None:
    """The weight of the loss of a model's routers in its config.json; None if the model is not known."""
    loss: float | None = _of_family(_KNOWN["router_loss"], model)
    return loss


def peft_targets(model: str) -> list[str] | None:
    """What PEFT adapts of a model where nothing is said; None for what it adapts of most models."""
    targets: list[str] | None = _of_family(_KNOWN["peft_targets"], model)
    return targets


def end_of_text(model: str) -> str:
    """The token that ends a text in a model's vocabulary; empty if the model is not known."""
    name = PurePath(model.lower()).name
    for token, families in _KNOWN["end_of_text"].items():
        if any(re.fullmatch(family, name) for family in families):
            return str(token)
    return ""


def _of_family(known: Mapping[str, Any], model: str) -> Any:
    return next((value for family, value in known.items() if re.search(family, model.lower())), None)
