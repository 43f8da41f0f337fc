"""Whose a configuration is, and what that program does where the configuration is silent (``tables/programs.yaml``).

Defaults of a program are part of what a file of it means: they are written into the config with the words ``by
default``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tonnage.migration.methods import PREFERENCES, Method
from tonnage.migration.yaml_files import read_data

DECIDED: Mapping[str, str] = read_data("decided")
"""What defaults are about, in the order in which the page shows them."""


@dataclass(frozen=True)
class Program:
    name: str
    versions: str
    defaults: Mapping[str, tuple[str, Any]] = field(default_factory=dict, repr=False)
    """By what it decides (see ``DECIDED``): the program's own name for it, and its value."""
    counts_workers: bool = True
    """Whether how many workers there are is said in its files or beside them, and not found out when it starts."""
    of_methods: Mapping[Method, Mapping[str, tuple[str, Any]]] = field(default_factory=dict, repr=False)
    """Defaults that are others where preferences are learned from, by how (``methods.Method``)."""
    signs: frozenset[str] = frozenset()
    """Arguments by which those of its script are told from those of others."""

    @property
    def with_version(self) -> str:
        """``TRL 1.16``: whose defaults an import goes by."""
        return f"{self.name} {self.versions.partition(' (')[0]}"


def _read_programs() -> dict[str, Program]:
    entries = read_data("programs")
    programs = {}
    for name, entry in entries.items():
        inherited = entries[entry["like"]]["defaults"] if "like" in entry else {}
        defaults = _defaults(inherited | entry.get("defaults", {}))
        of_methods = {method: _defaults(entry.get(f"of_{method}", {})) for method in PREFERENCES}
        signs = frozenset(entry.get("signs", ()))
        programs[name] = Program(
            name, entry["versions"], defaults, entry.get("counts_workers", True), of_methods, signs
        )
    return programs


def _defaults(entries: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    return {decided: (entry[0], entry[1]) for decided, entry in entries.items()}


_BY_NAME = _read_programs()
PROGRAMS = tuple(_BY_NAME.values())
AXOLOTL_YAML = _BY_NAME["Axolotl"]
LLAMA_FACTORY_YAML = _BY_NAME["LLaMA-Factory"]
LLAMA_FACTORY_1 = _BY_NAME["LLaMA-Factory 1"]
SWIFT_COMMAND = _BY_NAME["ms-swift"]
TORCHTUNE_YAML = _BY_NAME["torchtune"]
TRL = _BY_NAME["TRL"]
TRAINER = _BY_NAME["transformers' Trainer"]
TUTORIAL = _BY_NAME["the FSDP tutorial's script"]
ACCELERATE_YAML = _BY_NAME["Accelerate"]
DEEPSPEED_JSON = _BY_NAME["DeepSpeed"]


def in_words(default: tuple[str, Any]) -> str:
    """``weight_decay 0 by default``, of a default."""
    name, value = default
    words = value if isinstance(value, str) else in_numbers(value)
    is_told = value is None or isinstance(value, bool) or name.endswith((f" {words}", "true", "false")) or " " in name
    return f"{name} by default" if is_told and name != "betas" else f"{name} {words} by default"


def in_numbers(value: Any) -> str:
    """A value as a page shows it: ``0.9 and 0.999``."""
    if isinstance(value, list):
        return " and ".join(map(in_numbers, value))
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
