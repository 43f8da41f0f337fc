"""A file in, the keys it gives out, whatever program it was written for.

What a file is follows from what it holds, not from its name: a mapping (JSON or YAML) belongs to the program that
knows most of its keys; anything else is read as the text of a shell, in which the one command that trains is found
(``command``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tonnage.errors import Problem, UserError
from tonnage.migration.accelerate import ACCELERATE
from tonnage.migration.arguments import ARGUMENTS
from tonnage.migration.command import read_command
from tonnage.migration.deepspeed import DEEPSPEED
from tonnage.migration.given import RANK_ACCELERATE, RANK_ARGUMENTS, RANK_DEEPSPEED, WANTED, Given, flat
from tonnage.migration.keys import Table

LARGEST_BYTES = 1_000_000


@dataclass(frozen=True)
class Files:
    """Everything that was given, and by what."""

    givens: tuple[Given, ...]
    names: tuple[str, ...]
    launchers: tuple[str, ...]
    """Programs that start the script: ``torchrun`` and the like; empty if no command was given."""

    def has(self, table: Table) -> bool:
        """Whether any key belongs to a table."""
        return any(given.table is table for given in self.givens)


def read_files(paths: list[Path]) -> Files:
    """Read every file. Raises ``UserError`` for those of which nothing can be made, all together."""
    givens: list[Given] = []
    launchers: list[str] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            text = _read(path)
            mapping = _mapping(text, path)
            if mapping is not None:
                givens += givens_of_mapping(mapping, str(path), len(givens))
            else:
                found = read_command(text, str(path), len(givens))
                givens += found.givens
                launchers.append(found.launcher)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return Files(tuple(givens), tuple(map(str, paths)), tuple(launchers))


def givens_of_mapping(mapping: Mapping[str, Any], where: str, first: int) -> list[Given]:
    """The keys of a mapping, which belongs to the program that knows most of them."""
    if "model" in mapping and "data" in mapping:
        raise UserError(Problem("a config of tonnage already", WANTED, where=where))
    leaves = list(flat(mapping))
    candidates = [
        (DEEPSPEED, "", RANK_DEEPSPEED),
        (ARGUMENTS, "", RANK_ARGUMENTS),
        (ACCELERATE, "", RANK_ACCELERATE),
        (ARGUMENTS, "fsdp_config.", RANK_ARGUMENTS),
    ]
    known = [sum(table.find(prefix + name) is not None for name, _ in leaves) for table, prefix, _ in candidates]
    if not max(known):
        shown = ", ".join(list(mapping)[:5]) or "nothing"
        raise UserError(Problem(f"no key that is known ({shown})", WANTED, where=where))
    table, prefix, rank = candidates[known.index(max(known))]
    givens: list[Given] = []
    for name, value in leaves:
        if table is ARGUMENTS and name.startswith(
            "deepspeed."
        ):  # the whole of DeepSpeed's configuration, written inside
            inner, leaf, whose = DEEPSPEED, name.removeprefix("deepspeed."), RANK_DEEPSPEED
        else:
            inner, leaf, whose = table, prefix + name, rank
        givens.append(Given(first + len(givens), inner, leaf, value, where, whose, name))
    return givens


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UserError(Problem(f"{path.stat().st_size:,} bytes", f"at most {LARGEST_BYTES:,}", where=str(path)))
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(Problem("no such file", WANTED, where=str(path))) from None
    except IsADirectoryError:
        raise UserError(Problem("a directory", WANTED, where=str(path))) from None
    except UnicodeDecodeError:
        found = "not UTF-8 text" + (" (pickled arguments are not read)" if path.suffix == ".bin" else "")
        raise UserError(Problem(found, WANTED, where=str(path))) from None
    except OSError as error:
        raise UserError(Problem(f"cannot be read: {error.strerror}", WANTED, where=str(path))) from None


def _mapping(text: str, path: Path) -> dict[str, Any] | None:
    """What a JSON or YAML file holds; None if the text is neither."""
    if text.lstrip().startswith(("{", "[")):
        value = _json(text, path)
    elif path.suffix.lower() in (".yaml", ".yml"):
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
            raise UserError(Problem("not YAML", WANTED, where=where)) from None
    else:
        return None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(Problem("no keys with values", WANTED, where=str(path)))
    return value


def _json(text: str, path: Path) -> Any:
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=once)
    except (json.JSONDecodeError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise UserError(Problem(f"not JSON ({error})", WANTED, where=f"{path}:{line}")) from None
    if twice:
        raise UserError(Problem(f"{', '.join(twice)} written twice", "each key once", "remove one", str(path)))
    return value
