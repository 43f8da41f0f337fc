"""What a call from Python says, as the words of a command line: so one reader checks both, and refuses in the same way.

Rows in memory may stand wherever a config has the path of a source. They are written into the cache first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tonnage.config import Config, Source, as_overrides, read_config
from tonnage.data import keep_rows
from tonnage.errors import user_error

ENDINGS = (".yaml", ".yml")
"""Of a config: what ends otherwise is a model."""


def first_word(model_or_config: str | os.PathLike[str]) -> str:
    """The first argument as a command line has it. Raises ``UserError`` where it is no name."""
    if not isinstance(model_or_config, str | os.PathLike):
        raise user_error(
            f"a {type(model_or_config).__name__} as the first argument",
            "a model (a hub id or a directory), or the path of a config that ends in .yaml",
        )
    name = os.fspath(model_or_config)
    return str(Path(name).expanduser()) if name.startswith("~") else name


def words_of(
    model_or_config: str | os.PathLike[str], data: Any, keys: Mapping[str, Any]
) -> tuple[str | None, list[str]]:
    """The config's path, None where a model was named, and the overrides ``KEY=VALUE``.

    Raises ``UserError``.
    """
    first = first_word(model_or_config)
    is_config = first.endswith(ENDINGS)
    keys_of_data: dict[str, Any] = {} if is_config else {"model": first}
    if "model" in keys and not is_config:
        raise user_error("two models", "one, as the first argument", "leave model=... out")
    if data is not None:
        keys_of_data["data"] = _section(data)
    return (first if is_config else None), as_overrides({**keys_of_data, **keys})


def config_of(model_or_config: str | os.PathLike[str], data: Any, keys: Mapping[str, Any]) -> Config:
    """The config that a call says. Raises ``UserError``."""
    path, words = words_of(model_or_config, data, keys)
    return read_config(path, words)


def _section(data: Any) -> dict[str, Any]:
    """The section ``data`` of a config, its sources being files and the like."""
    is_section = isinstance(data, Mapping) and not _is_source(data)
    section: dict[str, Any] = dict(data) if is_section else {"train": data}
    cache = section.get("cache")
    cache = Path(cache).expanduser() if isinstance(cache, str | os.PathLike) else None  # the reader refuses others
    for side in ("train", "validation"):
        value = section.get(side)
        if value is not None and not isinstance(value, int | float):
            section[side] = _sources(value, cache)
    return section


def _sources(value: Any, cache: Path | None) -> Any:
    """A source or several, whose paths may be rows."""
    if isinstance(value, str | os.PathLike):
        return value
    if _is_source(value):
        return {**value, "path": _sources(value["path"], cache)}
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(one, str | os.PathLike) or _is_source(one) for one in value)
    ):
        return [_sources(one, cache) for one in value]
    if isinstance(value, Mapping):
        return value  # no source, and no rows: the reader says what is wrong with it
    return str(keep_rows(value, cache))


def _is_source(value: Any) -> bool:
    """Whether a dictionary says where rows are and how to read them, and is no row itself."""
    return isinstance(value, Mapping) and "path" in value and set(value) <= set(Source.model_fields)


def files_of(rows: Any) -> list[str]:
    """Paths of rows: of a file, of several, or of rows in memory, which are written into the cache. Raises
    ``UserError``."""
    found = _sources(rows, None)
    files = found if isinstance(found, list) else [found]
    if not all(isinstance(source, str | os.PathLike) for source in files):
        needed = "a file, a list of files, or rows: a list of dictionaries, a frame"
        raise user_error("a dictionary", needed, "evaluate([row])", "evaluate")
    return [os.fspath(source) for source in files]


def conversations_of(
    prompts: Sequence[str | Sequence[Mapping[str, Any]]], name: str
) -> list[Sequence[Mapping[str, Any]]]:
    """Prompts as conversations: a text is what a user says. ``name`` is that of the function which they were given to.

    Raises ``UserError`` for one text in the place of a list.
    """
    if isinstance(prompts, str):
        raise user_error("one text", "a list of prompts", f"{name}([prompt])", name)
    return [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in prompts]
