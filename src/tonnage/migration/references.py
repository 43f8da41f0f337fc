"""torchtune's values that refer to other keys (``${output_dir}/logs``), and keys that a command takes away."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import yaml

from tonnage.migration.keys import TORCHTUNE
from tonnage.migration.settings import ForeignSetting

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
COMPONENT = "._component_"
MOST_ROUNDS = 4
"""Of references to what refers itself."""
LONGEST_VALUE = 4096
"""Letters, of a value with references."""


def filled_in(settings: Sequence[ForeignSetting]) -> list[ForeignSetting]:
    """Settings of torchtune with what they refer to, without those that are taken away; others as they are.

    A word for a component (``optimizer=torchao.optim.AdamW8bit``) stands for its name.
    """
    own = [setting for setting in settings if setting.table is TORCHTUNE]
    removed = tuple(f"{setting.value}." for setting in own if setting.name == "~")
    left = [
        setting for setting in settings if setting.table is not TORCHTUNE or not f"{setting.name}.".startswith(removed)
    ]
    names = {setting.name for setting in left if setting.table is TORCHTUNE}
    components = {name.removesuffix(COMPONENT) for name in names if name.endswith(COMPONENT)}
    left = [
        replace(setting, name=setting.name + COMPONENT) if setting.name in components else setting for setting in left
    ]
    ranked = sorted((setting for setting in left if setting.table is TORCHTUNE), key=lambda setting: -setting.rank)
    values = {setting.name: setting.value for setting in ranked}
    return [
        replace(setting, value=_filled_in(setting.value, values)) if setting.table is TORCHTUNE else setting
        for setting in left
    ]


def _filled_in(value: Any, values: dict[str, Any]) -> Any:
    for _ in range(MOST_ROUNDS):
        if not isinstance(value, str) or len(value) > LONGEST_VALUE:
            return value
        if (reference := _REFERENCE.fullmatch(value)) is not None and reference[1] in values:
            value = values[reference[1]]
        else:
            value = _REFERENCE.sub(lambda match: str(values.get(match[1], match[0])), value)
    return value


def plain_value(word: str) -> Any:
    """A value as OmegaConf takes it on a command line: a list, a mapping, nothing, or a word."""
    if word.startswith(("[", "{")) or word in ("null", "None", "~"):
        with suppress(yaml.YAMLError, RecursionError):
            return None if word == "None" else yaml.safe_load(word)
    return word
