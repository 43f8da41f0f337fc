"""A file in, the keys it gives out, whatever program it was written for.

What a file is follows from what it holds, not from its name: a mapping (JSON or YAML) belongs to the program that
knows most of its keys; anything else is read as the text of a shell, in which the one command that trains is found
(``command``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from tonnage.errors import Problem, UserError
from tonnage.files.reading import read_bytes
from tonnage.migration.accelerate import ACCELERATE
from tonnage.migration.arguments import ARGUMENTS
from tonnage.migration.command import read_command
from tonnage.migration.deepspeed import DEEPSPEED
from tonnage.migration.given import RANK_ACCELERATE, RANK_ARGUMENTS, RANK_DEEPSPEED, WANTED, Given, flat
from tonnage.migration.keys import Table

LARGEST_BYTES = 256 << 10
"""Of a file: a hundred times the longest that people write, and read in a second."""
MOST_KEYS = 1000
"""Of all files: no program has more."""
MOST_NODES, DEEPEST = 20_000, 50
LARGEST_INTEGER = 2**63


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
    if len(givens) > MOST_KEYS:
        problems.append(Problem(f"more than {MOST_KEYS:,} keys", WANTED, where=" and ".join(map(str, paths))))
    if problems:
        raise UserError(*problems)
    return Files(tuple(givens), tuple(map(str, paths)), tuple(launchers))


def givens_of_mapping(mapping: Mapping[str, Any], where: str, first: int) -> list[Given]:
    """The keys of a mapping, which belongs to the program that knows most of them."""
    if "model" in mapping and "data" in mapping:
        raise UserError(Problem("a config of tonnage already", WANTED, where=where))
    leaves = list(islice(flat(mapping), MOST_KEYS + 1))
    if len(leaves) > MOST_KEYS:
        raise UserError(Problem(f"more than {MOST_KEYS:,} keys", WANTED, where=where))
    candidates = [
        (DEEPSPEED, "", RANK_DEEPSPEED),
        (ARGUMENTS, "", RANK_ARGUMENTS),
        (ACCELERATE, "", RANK_ACCELERATE),
        (ARGUMENTS, "fsdp_config.", RANK_ARGUMENTS),
    ]
    known = [sum(table.find(prefix + name) is not None for name, _ in leaves) for table, prefix, _ in candidates]
    if not max(known):
        shown = ", ".join(name[:60] for name in list(mapping)[:5]) or "nothing"
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
        return read_bytes(path, LARGEST_BYTES, "a configuration").decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(Problem("no such file", WANTED, where=str(path))) from None
    except NotADirectoryError:
        raise UserError(Problem("no such file: a part of the path is a file", WANTED, where=str(path))) from None
    except IsADirectoryError:
        raise UserError(Problem("a directory", WANTED, where=str(path))) from None
    except UnicodeDecodeError:
        found = "not UTF-8 text" + (" (pickled arguments are not read)" if path.suffix == ".bin" else "")
        raise UserError(Problem(found, WANTED, where=str(path))) from None


def _mapping(text: str, path: Path) -> dict[str, Any] | None:
    """What a JSON or YAML file holds; None if the text is neither."""
    try:
        if text.lstrip().startswith(("{", "[")):
            value = _json(text, path)
        elif path.suffix.lower() in (".yaml", ".yml"):
            value = _yaml(text)
        else:
            return None
        _check(value)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        detail = getattr(error, "problem", None)
        raise UserError(Problem("not YAML" + (f" ({detail})" if detail else ""), WANTED, where=where)) from None
    except RecursionError:
        raise UserError(Problem(f"more than {DEEPEST} levels", WANTED, where=str(path))) from None
    except ValueError as error:
        found = "a number of thousands of digits" if "int_max_str_digits" in str(error) else str(error)
        raise UserError(Problem(found, WANTED, where=str(path))) from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(Problem("no keys with values", WANTED, where=str(path)))
    return value


class _Loader(yaml.SafeLoader):
    """YAML as the other programs read it, but dates stay text, and sets and bytes are refused."""

    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node; there may be only so many."""
        self.num_nodes += 1
        if self.num_nodes > MOST_NODES:
            raise ValueError(f"more than {MOST_NODES:,} keys and values")
        return super().compose_node(parent, index)


_NOT_PLAIN = tuple(f"tag:yaml.org,2002:{name}" for name in ("timestamp", "set", "omap", "pairs", "binary"))
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, form) for tag, form in resolvers if tag not in _NOT_PLAIN]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag not in _NOT_PLAIN
}


def _yaml(text: str) -> Any:
    """The value of a YAML text. Raises ``yaml.YAMLError``, ``ValueError`` and ``RecursionError``."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_values(node, {}) > MOST_NODES:
            raise ValueError(f"aliases that stand for more than {MOST_NODES:,} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Values that a node stands for once its aliases are written out. Raises ``ValueError`` for one within itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in known:
        if known[id(node)] == 0:
            raise ValueError("an alias within what it stands for")
        return known[id(node)]
    known[id(node)] = 0
    inner = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
    known[id(node)] = 1 + sum(_num_values(one, known) for one in inner)
    return known[id(node)]


def _check(value: Any, level: int = 0) -> None:
    """Refuse what is too deep and numbers that nobody can count to. Raises ``RecursionError``, ``ValueError``."""
    if level > DEEPEST:
        raise RecursionError
    if isinstance(value, dict):
        for item in value.values():
            _check(item, level + 1)
    elif isinstance(value, list):
        for item in value:
            _check(item, level + 1)
    elif isinstance(value, int) and abs(value) >= LARGEST_INTEGER:
        raise ValueError(f"a number of {value.bit_length():,} bits")


def _json(text: str, path: Path) -> Any:
    twice: set[str] = set()

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice.update(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return found

    try:
        value = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise UserError(Problem(f"not JSON ({error})", WANTED, where=f"{path}:{error.lineno}")) from None
    if twice:
        names = ", ".join(name[:60] for name in sorted(twice)[:10])
        raise UserError(Problem(f"{names} written twice", "each key once", "remove one", str(path)))
    return value
