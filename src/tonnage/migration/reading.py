"""A file in, the keys it gives out, whatever program it was written for.

What a file is follows from what it holds, not from its name: whose a mapping is (JSON or YAML), ``recognition`` says;
anything else is read as the text of a shell, in which the one command that trains is found (``command``). Files that
are named in what was read are read as well, where they are found.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from tonnage.errors import Problem, UserError, user_error
from tonnage.files.paths import is_there
from tonnage.files.reading import read_bytes
from tonnage.migration.command import read_command
from tonnage.migration.keys import (
    ACCELERATE,
    ARGUMENTS,
    AXOLOTL,
    DEEPSPEED,
    LLAMA_FACTORY,
    SWIFT,
    TORCHTUNE,
    VERSION_1,
    Table,
)
from tonnage.migration.methods import PREFERENCES, method_of
from tonnage.migration.programs import (
    ACCELERATE_YAML,
    AXOLOTL_YAML,
    DEEPSPEED_JSON,
    LLAMA_FACTORY_1,
    LLAMA_FACTORY_YAML,
    SWIFT_COMMAND,
    TORCHTUNE_YAML,
    TRAINER,
    TRL,
    TUTORIAL,
    Program,
)
from tonnage.migration.recognition import kind_of
from tonnage.migration.references import filled_in
from tonnage.migration.settings import RANK_DEEPSPEED, WANTED, ForeignSetting, flat, unreadable

LARGEST_BYTES = 256 << 10
"""Of a file: a hundred times the longest that people write, and read in a second."""
MOST_KEYS = 1000
"""Of all files: no program has more."""
MOST_NODES, DEEPEST = 20_000, 50
LARGEST_INTEGER = 2**63


@dataclass(frozen=True)
class Files:
    """Everything that was given, and by what."""

    settings: tuple[ForeignSetting, ...]
    names: tuple[str, ...]
    launchers: tuple[str, ...]
    """Programs that start the script: ``torchrun`` and the like; empty if no command was given."""
    workers: int | None = None
    """What was said beside the files of how many workers there are."""

    def has(self, table: Table) -> bool:
        return any(setting.table is table for setting in self.settings)

    @cached_property
    def trainer(self) -> Program:
        """Whose defaults hold where the arguments of a training say nothing; without any if there are none."""
        for table, program in _TRAINERS:
            if self.has(table):
                return program
        if any(setting.table is ARGUMENTS and not _is_beside(setting) for setting in self.settings):
            if self._names >= TUTORIAL.signs:
                return TUTORIAL
            return TRL if self._is_trl else TRAINER
        return Program("", "")

    @property
    def program(self) -> str:
        """Whose configuration it is, in words."""
        names = [self.trainer.name]
        names += [program.name for table, program in _BESIDE if self.has(table)]
        names += [name for name in self.launchers if name in ("torchrun", "deepspeed") and name not in names]
        return " and ".join(dict.fromkeys(filter(None, names))) or "a command of python"

    @property
    def _names(self) -> set[str]:
        return {ARGUMENTS.plain(setting.name) for setting in self.settings if setting.table is ARGUMENTS}

    @property
    def _is_trl(self) -> bool:
        names = self._names
        scripts = [str(setting.value) for setting in self.settings if setting.name == "script"]
        known_together = "dataset_name" in names and names & {"max_length", "max_seq_length", "max_seq_len"}
        is_sft = any(re.search(r"(^|[/.])sft(\.py)?$", name) for name in scripts)
        is_preference = any(method_of(name)[1] in PREFERENCES for name in scripts)
        is_example = any(re.search(r"(^|[/.])run_clm(_no_trainer)?(\.py)?$", name) for name in scripts)
        is_told = "trl" in names or is_sft or is_preference
        return is_told or (not is_example and bool(known_together or names & TRL.signs))

    def find(self, name: str) -> Path | None:
        """A file that another one names: from here, or from the folder of one of those given, or from above it."""
        folders = [Path()]
        for setting in self.names:
            folders += list(Path(setting).absolute().parents)[:LEVELS_UP]
        places = (folder / name for folder in folders)  # of a whole path, that itself
        return next((place for place in places if is_there(place) and place.is_file()), None)

    def read(self, path: Path) -> dict[str, Any]:
        """The mapping that a file holds. Raises ``UserError``."""
        mapping = _mapping(_read(path), path)
        if mapping is None:
            raise user_error("neither JSON nor YAML", "a file of keys and values", where=str(path))
        return mapping


TRAINERS = (AXOLOTL, VERSION_1, LLAMA_FACTORY, TORCHTUNE, SWIFT, ARGUMENTS)
"""Tables of programs that train; a run is one program's."""
_TRAINERS = (
    (AXOLOTL, AXOLOTL_YAML),
    (VERSION_1, LLAMA_FACTORY_1),
    (LLAMA_FACTORY, LLAMA_FACTORY_YAML),
    (TORCHTUNE, TORCHTUNE_YAML),
    (SWIFT, SWIFT_COMMAND),
)
_BESIDE = ((ACCELERATE, ACCELERATE_YAML), (DEEPSPEED, DEEPSPEED_JSON))
FOLLOWED = ("deepspeed_file", "arguments_file", "accelerate_file", "accelerate_config")
"""Quantities that name another file of keys, which is read as well if it is there."""
MOST_FILES = 8
"""That are read for one import."""
LEVELS_UP = 6
"""Folders in which a file that another one names is looked for."""


def _is_beside(setting: ForeignSetting) -> bool:
    """Whether an argument says what is started, or how it is divided, and nothing of the training."""
    return setting.name in ("script", "config", "CUDA_VISIBLE_DEVICES") or setting.name.startswith("fsdp_config.")


def read_files(sources: Sequence[Path | str], workers: int | None = None) -> Files:
    """Read every file, and a command where a source is words and no file. Raises ``UserError`` for those of which
    nothing can be made, all together."""
    reading = _Reading()
    for source in sources:
        reading.add(source)
    if not reading.problems:
        reading.follow()
    where = " and ".join(reading.names)
    if len(reading.settings) > MOST_KEYS:
        reading.problems.append(Problem(f"more than {MOST_KEYS:,} keys", WANTED, where=where))
    if reading.problems:
        raise UserError(*reading.problems)
    instead = {ARGUMENTS.title: LLAMA_FACTORY} if reading.is_llama_factory else {}
    settings = tuple(
        replace(setting, number=number, table=instead.get(setting.table.title, setting.table))
        for number, setting in enumerate(filled_in(reading.settings))
    )
    trainers = {setting.table.title for setting in settings if setting.table in TRAINERS and not _is_beside(setting)}
    if len(trainers) > 1:
        raise user_error(f"configurations of {' and '.join(sorted(trainers))}", "of one of them", where=where)
    return Files(settings, tuple(reading.names), tuple(reading.launchers), workers)


@dataclass
class _Reading:
    """What has been read so far."""

    settings: list[ForeignSetting] = field(default_factory=list)
    launchers: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def is_llama_factory(self) -> bool:
        """Whether arguments of a script are those of LLaMA-Factory."""
        arguments = {setting.name for setting in self.settings if setting.table is ARGUMENTS}
        is_its_table = any(setting.table is LLAMA_FACTORY for setting in self.settings)
        return is_its_table or any(signs <= arguments for signs in LLAMA_FACTORY.signs)

    def add(self, source: Path | str) -> None:
        is_command = isinstance(source, str) and _is_command(source)
        where = COMMAND if is_command else str(Path(source))
        self.names.append(where)
        try:
            text = str(source) if is_command else _read(Path(source))
            mapping = None if is_command else _mapping(text, Path(source))
            if mapping is not None:
                self.settings += settings_of_mapping(mapping, where)
            else:
                command = read_command(text, where)
                self.settings += command.settings
                self.launchers.append(command.launcher)
        except UserError as error:
            self.problems += error.problems

    def follow(self) -> None:
        """Read what the files name as well, where it is found."""
        for setting in self.settings:  # which grows
            is_file = setting.key is not None and setting.key.quantity in FOLLOWED and isinstance(setting.value, str)
            read_names = {Path(name).name for name in self.names}
            if not is_file or Path(setting.value).name in read_names:
                continue
            path = Files((), tuple(self.names), ()).find(setting.value)
            if len(self.names) < MOST_FILES and path is not None:
                self.add(path)


COMMAND = "the command"
"""Where settings are from that were given as words and not in a file."""


def _is_command(text: str) -> bool:
    """Whether a word of ours is a command of others, in quotes, and no file."""
    return len(text.split()) > 1 and not is_there(Path(text))


def settings_of_mapping(mapping: Mapping[str, Any], where: str) -> list[ForeignSetting]:
    """The settings of a mapping, which belongs to the program that ``recognition`` says."""
    if "model" in mapping and "data" in mapping:
        raise unreadable("a config of tonnage already", where)
    leaves = list(islice(flat(mapping), MOST_KEYS + 1))
    if len(leaves) > MOST_KEYS:
        raise unreadable(f"more than {MOST_KEYS:,} keys", where)
    kind = kind_of(mapping, leaves, where)
    settings: list[ForeignSetting] = []
    for name, value in leaves:
        inner = name.removeprefix("deepspeed.")
        if kind.table is not DEEPSPEED and inner != name:  # the whole of DeepSpeed's, written inside
            settings.append(ForeignSetting(DEEPSPEED, inner, value, where, RANK_DEEPSPEED, name))
        else:
            settings.append(ForeignSetting(kind.table, kind.prefix + name, value, where, kind.rank, name))
    return settings


_NO_FILES: Mapping[type[OSError], str] = {
    FileNotFoundError: "no such file",
    NotADirectoryError: "no such file: a part of the path is a file",
    IsADirectoryError: "a directory",
}


def _read(path: Path) -> str:
    try:
        return read_bytes(path, LARGEST_BYTES, "a configuration").decode("utf-8-sig")
    except tuple(_NO_FILES) as error:
        raise unreadable(_NO_FILES[type(error)], path) from None
    except UnicodeDecodeError:
        problem = "not UTF-8 text" + (" (pickled arguments are not read)" if path.suffix == ".bin" else "")
        raise unreadable(problem, path) from None


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
        raise unreadable("not YAML" + (f" ({detail})" if detail else ""), where) from None
    except RecursionError:
        raise unreadable(f"more than {DEEPEST} levels", path) from None
    except ValueError as error:
        problem = "a number of thousands of digits" if "int_max_str_digits" in str(error) else str(error)
        raise unreadable(problem, path) from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise unreadable("no keys with values", path)
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


def _num_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Values that a node stands for once its aliases are written out. Raises ``ValueError`` for one within itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in counts:
        if counts[id(node)] == 0:
            raise ValueError("an alias within what it stands for")
        return counts[id(node)]
    counts[id(node)] = 0
    is_mapping = isinstance(node, yaml.MappingNode)
    inner = [part for pair in node.value for part in pair] if is_mapping else node.value
    counts[id(node)] = 1 + sum(_num_values(part, counts) for part in inner)
    return counts[id(node)]


def _check(value: Any, level: int = 0) -> None:
    """Refuse what is too deep and numbers that nobody can count to. Raises ``RecursionError``, ``ValueError``."""
    if level > DEEPEST:
        raise RecursionError
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check(part, level + 1)
    elif isinstance(value, int) and abs(value) >= LARGEST_INTEGER:
        raise ValueError(f"a number of {value.bit_length():,} bits")


def _json(text: str, path: Path) -> Any:
    twice: set[str] = set()

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            twice.update(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return mapping

    try:
        value = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise unreadable(f"not JSON ({error})", f"{path}:{error.lineno}") from None
    if twice:
        names = ", ".join(name[:60] for name in sorted(twice)[:10])
        raise user_error(f"{names} written twice", "each key once", "remove one", str(path))
    return value
