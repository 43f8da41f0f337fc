"""Values of keys: absurd numbers, texts, shapes and places for every key of a config."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import yaml

from hostile import mutations
from hostile.case import Case
from hostile.stock import Stock
from tonnage.config import keys

LAUNCHERS = {"local": {}, "slurm": {"with": "slurm"}, "ray": {"with": "ray", "address": "auto"}}
NOT_NUMBERS = (".nan", ".inf", "-.inf")


def make(chance: random.Random, folder: Path, stock: Stock) -> Case:
    """One to three keys with values of any kind, in the file or behind it."""
    work = folder / "work"
    os.mkfifo(work / "pipe")
    (work / "file").write_text("x")
    launcher = chance.choice((*["local"] * 4, "slurm", "ray"))
    given = stock.config(launch=dict(LAUNCHERS[launcher]), output=chance.choice(("run", "a/b/run", str(work / "r"))))
    names = [key.name for key in keys.all_keys()]
    broken, overrides = "", []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        name = chance.choice(names)
        found: Any = mutations.value(chance)
        if chance.randrange(5) == 0:
            found = chance.choice(("/dev/zero", "pipe", "file", "file/x", ".", "new", "/proc/self/mem", "/root/../etc"))
        if chance.randrange(20) == 0:
            name, broken = mutations.misspelt(chance, name), "a key is misspelt"
            if name in names or name.startswith("data.template_arguments."):
                broken = ""
        written = chance.choice(NOT_NUMBERS) if chance.randrange(12) == 0 else _as_yaml(found)
        if chance.randrange(2) and "\0" not in written and len(written) < 100_000:
            overrides.append(f"{name}={written}")
            if written in NOT_NUMBERS and names.count(name) == 1 and f"{name}=" not in " ".join(overrides[:-1]):
                broken = f"{name} is no number"
        else:
            try:
                value = yaml.safe_load(written)
            except (yaml.YAMLError, ValueError, RecursionError):
                value = "x"
            _put(given, name, value)
    path = work / "config.yaml"
    path.write_text(json.dumps(given), errors="surrogatepass")
    command = chance.choice((["plan"], ["plan"], ["train", "--dry-run"], ["inspect"], ["inspect", "--json"]))
    return Case([[command[0], str(path), *(word for word in overrides if word[0] != "-"), *command[1:]]], broken=broken)


def _as_yaml(found: Any) -> str:
    """A value as people would write it behind a key."""
    try:
        written = json.dumps(found)
    except ValueError:  # a whole number of more digits than Python prints
        return "9" * 5000
    return {"NaN": ".nan", "Infinity": ".inf", "-Infinity": "-.inf"}.get(written, written)


def _put(given: dict[str, Any], name: str, found: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        inner = given.get(section)
        if not isinstance(inner, dict):
            inner = given[section] = {}
        given = inner
    given[last] = found
