"""A file in, the keys it gives out, whatever program it was written for.

What a file is follows from what it holds, not from its name: whose a mapping is (JSON or YAML), ``telling`` says;
anything else is read as the text of a shell, in which the one command that trains is found (``command``). Files that
are named in what was read are read as well, where they are found.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from tonnage.errors import Problem, UserError
from tonnage.files.paths import LONGEST_PATH
from tonnage.files.reading import read_bytes
from tonnage.migration.command import read_command
from tonnage.migration.given import RANK_DEEPSPEED, WANTED, Given, flat
from tonnage.migration.keys import ACCELERATE, ARGUMENTS, AXOLOTL, DEEPSPEED, LLAMA_FACTORY, VERSION_1, Table
from tonnage.migration.programs import (
    ACCELERATE_YAML,
    AXOLOTL_YAML,
    DEEPSPEED_JSON,
    LLAMA_FACTORY_1,
    LLAMA_FACTORY_YAML,
    TRAINER,
    TRL,
    TUTORIAL,
    Program,
)
from tonnage.migration.telling import kind_of, kind_of_arguments

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
    workers: int | None = None
    """What was said beside the files of how many workers there are."""

    def has(self, table: Table) -> bool:
        """Whether any key belongs to a table."""
        return any(given.table is table for given in self.givens)

    @cached_property
    def trainer(self) -> Program:
        """Whose defaults hold where the arguments of a training say nothing; without any if there are none."""
        for table, program in _TRAINERS:
            if self.has(table):
                return program
        if any(_says_how_to_train(given) for given in self.givens):
            if self._names >= TUTORIAL.signs:
                return TUTORIAL
            return TRL if self._is_trl else TRAINER
        return Program("", "")

    @property
    def program(self) -> str:
        """Whose configuration it is, in words."""
        found = [self.trainer.name]
        found += [program.name for table, program in _BESIDE if self.has(table)]
        found += [name for name in self.launchers if name in ("torchrun", "deepspeed") and name not in found]
        return " and ".join(dict.fromkeys(filter(None, found))) or "a command of python"

    @property
    def _names(self) -> set[str]:
        return {ARGUMENTS.plain(given.name) for given in self.givens if given.table is ARGUMENTS}

    @property
    def _is_trl(self) -> bool:
        names = self._names
        scripts = [str(given.value) for given in self.givens if given.name == "script"]
        known_together = "dataset_name" in names and names & {"max_length", "max_seq_length", "max_seq_len"}
        is_sft = any(re.search(r"(^|[/.])sft(\.py)?$", name) for name in scripts)
        is_example = any(re.search(r"(^|[/.])run_clm(_no_trainer)?(\.py)?$", name) for name in scripts)
        return "trl" in names or is_sft or (not is_example and bool(known_together or names & TRL.signs))

    def find(self, name: str) -> Path | None:
        """A file that another one names: from here, or from the folder of one of those given, or from above it."""
        if not name or Path(name).is_absolute():
            return Path(name) if name and Path(name).is_file() else None
        folders = [Path()]
        for given in self.names:
            folders += list(Path(given).absolute().parents)[:LEVELS_UP]
        return next((folder / name for folder in folders if (folder / name).is_file()), None)

    def read(self, path: Path) -> dict[str, Any]:
        """The mapping that a file holds. Raises ``UserError``."""
        found = _mapping(_read(path), path)
        if found is None:
            raise UserError(Problem("neither JSON nor YAML", "a file of keys and values", where=str(path)))
        return found


TRAINERS = (AXOLOTL, VERSION_1, LLAMA_FACTORY, ARGUMENTS)
"""Tables of programs that train; a run is one program's."""
_TRAINERS = ((AXOLOTL, AXOLOTL_YAML), (VERSION_1, LLAMA_FACTORY_1), (LLAMA_FACTORY, LLAMA_FACTORY_YAML))
_BESIDE = ((ACCELERATE, ACCELERATE_YAML), (DEEPSPEED, DEEPSPEED_JSON))
FOLLOWED = ("deepspeed_file", "arguments_file", "accelerate_file", "accelerate_config")
"""Quantities that name another file of keys, which is read as well if it is there."""
MOST_FILES = 8
"""That are read for one import."""
LEVELS_UP = 6
"""Folders in which a file that another one names is looked for."""


def _says_how_to_train(given: Given) -> bool:
    return given.table is ARGUMENTS and not _is_beside(given)


def _is_beside(given: Given) -> bool:
    """Whether an argument says what is started, or how it is divided, and nothing of the training."""
    return given.name in ("script", "config", "CUDA_VISIBLE_DEVICES") or given.name.startswith("fsdp_config.")


def read_files(sources: Sequence[Path | str], workers: int | None = None) -> Files:
    """Read every file, and a command where a source is words and no file. Raises ``UserError`` for those of which
    nothing can be made, all together."""
    givens: list[Given] = []
    launchers: list[str] = []
    names: list[str] = []
    problems: list[Problem] = []
    for source in sources:
        try:
            givens += _givens_of(source, len(givens), launchers, names)
        except UserError as error:
            problems += error.problems
    if not problems:
        _follow(givens, launchers, names, problems)
    if len(givens) > MOST_KEYS:
        problems.append(Problem(f"more than {MOST_KEYS:,} keys", WANTED, where=" and ".join(names)))
    if problems:
        raise UserError(*problems)
    names_of_arguments = {given.name for given in givens if given.table is ARGUMENTS}
    if any(given.table is LLAMA_FACTORY for given in givens) or kind_of_arguments(names_of_arguments) is LLAMA_FACTORY:
        givens = [replace(given, table=LLAMA_FACTORY) if given.table is ARGUMENTS else given for given in givens]
    trainers = {given.table.title for given in givens if given.table in TRAINERS and not _is_beside(given)}
    if len(trainers) > 1:
        where = " and ".join(names)
        raise UserError(Problem(f"configurations of {' and '.join(sorted(trainers))}", "of one of them", where=where))
    return Files(tuple(givens), tuple(names), tuple(launchers), workers)


def _givens_of(source: Path | str, first: int, launchers: list[str], names: list[str]) -> list[Given]:
    """The keys of one source. Raises ``UserError``."""
    if isinstance(source, str) and _is_command(source):
        names.append(COMMAND)
        found = read_command(source, COMMAND, first)
        launchers.append(found.launcher)
        return found.givens
    path = Path(source)
    names.append(str(path))
    text = _read(path)
    mapping = _mapping(text, path)
    if mapping is not None:
        return givens_of_mapping(mapping, str(path), first)
    found = read_command(text, str(path), first)
    launchers.append(found.launcher)
    return found.givens


COMMAND = "the command"
"""Where keys are from that were given as words and not in a file."""


def _is_command(text: str) -> bool:
    """Whether a word of ours is a command of others, in quotes, and no file."""
    if len(text.split()) < 2:
        return False
    try:
        return not Path(text).exists()
    except OSError:
        return True


def _follow(givens: list[Given], launchers: list[str], names: list[str], problems: list[Problem]) -> None:
    """Read what the files name as well, where it is found."""
    for given in givens:  # which grows
        key = given.key
        is_file = key is not None and key.quantity in FOLLOWED and isinstance(given.value, str)
        known = {Path(name).name for name in names}
        if not is_file or len(given.value) > LONGEST_PATH or Path(given.value).name in known:
            continue
        if len(names) < MOST_FILES and (path := Files((), tuple(names), ()).find(given.value)) is not None:
            try:
                givens += _givens_of(path, len(givens), launchers, names)
            except UserError as error:
                problems += error.problems


def givens_of_mapping(mapping: Mapping[str, Any], where: str, first: int) -> list[Given]:
    """The keys of a mapping, which belongs to the program that ``telling`` says."""
    if "model" in mapping and "data" in mapping:
        raise UserError(Problem("a config of tonnage already", WANTED, where=where))
    leaves = list(islice(flat(mapping), MOST_KEYS + 1))
    if len(leaves) > MOST_KEYS:
        raise UserError(Problem(f"more than {MOST_KEYS:,} keys", WANTED, where=where))
    kind = kind_of(mapping, leaves, where)
    givens: list[Given] = []
    for name, value in leaves:
        if kind.table is not DEEPSPEED and name.startswith("deepspeed."):  # the whole of DeepSpeed's, written inside
            inner, leaf, whose = DEEPSPEED, name.removeprefix("deepspeed."), RANK_DEEPSPEED
        else:
            inner, leaf, whose = kind.table, kind.prefix + name, kind.rank
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
