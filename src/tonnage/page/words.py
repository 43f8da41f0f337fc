"""What the page asks of the command line, as the words of a command: checked, so that none of them is an option that
nobody meant, none names a file outside of the folder, and no code runs because a stranger's config says so."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tonnage.config import as_overrides, overrides_text, read_config
from tonnage.errors import user_error
from tonnage.host.cachedir import why_untrusted
from tonnage.page.folder import Folder

OVERRIDE = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
MOST_WORDS, LONGEST_WORD = 100, 4000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def checked(folder: Folder, base: Path, words: Sequence[object]) -> list[str]:
    """Overrides of a config, ``KEY=VALUE`` each, against the paths that are read from ``base``.

    Raises:
        UserError: a word is none, or names a file outside of the folder.
    """
    if len(words) > MOST_WORDS:
        raise user_error(f"{len(words)} overrides", f"at most {MOST_WORDS}")
    overrides = []
    for word in words:
        match = OVERRIDE.fullmatch(word) if isinstance(word, str) and len(word) <= LONGEST_WORD else None
        if match is None:
            raise user_error(f"{str(word)[:60]!r}", "KEY=VALUE, a key of the config and its value", "optimizer.lr=1e-4")
        for text in _texts(_value(match[2])):
            check_file(folder, base, text)
        overrides.append(match[0])
    return overrides


def checked_model(folder: Folder, base: Path, model: str) -> str:
    """A hub id, or the directory of a model or a run. Raises ``UserError``."""
    if not model or model.startswith("-") or len(model) > LONGEST_WORD:
        raise user_error(f"model {model[:60]!r}", "a hub id, or a directory of a model", "Qwen/Qwen2.5-0.5B")
    check_file(folder, base, model)
    return model


def check_file(folder: Folder, base: Path, text: str) -> None:
    """Refuse a text that names a file, or could, outside of the folder. Raises ``UserError``."""
    is_path = text.startswith(("/", "~")) or ".." in text.split("/") or os.path.lexists(base / text[:LONGEST_WORD])
    if is_path and text:
        path = Path(text).expanduser() if text.startswith("~") else base / text
        folder.inside(os.path.relpath(path, folder.path))


def check_author(config: Path, words: Sequence[str], *, runs_code: bool = False) -> None:
    """Refuse a command that would run code because a config says so that a stranger wrote, or could have.

    ``runs_code``: it does whatever the config says; else only where that trusts the code of its model.

    Raises:
        UserError: so it is, or the config cannot be read.
    """
    why = config.is_file() and (why_untrusted(config.parent) or why_untrusted(config))
    if why and (runs_code or read_config(str(config), check_files=False).trust_remote_code):
        raise user_error(
            f"a config, or its directory, that {why}",
            "one that is yours or root's and that not all may write: it says which code runs here",
            f"read it, and if you trust it type the command in a terminal: {shlex.join(['tonnage', *words])}",
            str(config),
        )


def as_yaml(model: str, overrides: Sequence[str]) -> str:
    """A config that says the same as a model and overrides. Raises ``UserError``."""
    return overrides_text([*as_overrides({"model": model}), *overrides])


def checked_name(name: str) -> str:
    """A name of a new run. Raises ``UserError``."""
    if not NAME.fullmatch(name):
        needed = "a name of letters, digits, dots, dashes and underscores, which begins with a letter or a digit"
        raise user_error(f"{name[:60]!r}", needed, "first")
    return name


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return text


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for key, inner in value.items():
                yield from _texts(key)
                yield from _texts(inner)
        case list():
            for inner in value:
                yield from _texts(inner)
        case _:
            pass
