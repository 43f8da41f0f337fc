"""Advice of a command that takes no config, where the same sentences elsewhere name keys of one.

``data.max_length=512`` becomes ``--max-length 512`` if the command has that option. What no option does is left out of
the advice, and where nothing else is left, it is what to do with the rows or files themselves.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from dataclasses import replace

from tonnage.errors import Problem, UserError

OPTIONS = {
    "data.max_length": "--max-length",
    "data.template": "--template",
    "allow_unexpected": "--allow-unexpected",
}
"""Keys of a config, and the options that say the same."""
INSTEAD = {
    "data.max_length": "shorten the rows, or take them out of the file",
    "data.over_length": "shorten these rows, or take them out of the file",
    "data.on_bad_row": "mend these rows, or take them out of the file",
    "data.train": "rename the fields of the rows to those of a form that is known",
    "objective": "write the answers to a file of their own, as prompt and completion",
    "split": "download it, and give the file of that split",
    "name": "download it, and give its files",
}
"""What to do where no option says what a key does."""
_KEY = re.compile(
    r"(?:set |write )?`?\b(?P<key>data\.\w+|objective|allow_unexpected|allow_missing|init|(?<=set )split|(?<=set )name)"
    r"(?:\[\d+\])?(?:=|: ?)(?P<value>\[[^\]]*\]|\{.*\}|[^\s,;`]+)`?(?: for this source| \(or [^)]*\))?"
)
_BETWEEN = re.compile(r"(, or,? |; )")
_FORMAT = re.compile(r"\bformat: (\w+)")


def with_options(error: UserError, options: Collection[str]) -> UserError:
    """The same problems with the ``options`` of a command in the place of keys of a config."""
    return UserError(*(_of_command(problem, options) for problem in error.problems))


def _of_command(problem: Problem, options: Collection[str]) -> Problem:
    where = problem.where
    if (key := OPTIONS.get(where, "")) in options:
        where = key
    elif where.startswith("data."):
        where = next((one for one in ("--data", "--file") if one in options), where)
    return replace(problem, where=where, change=_advice(problem.change, options))


def _advice(change: str, options: Collection[str]) -> str:
    parts, instead = list[str](), ""
    separator = ""
    for at, part in enumerate(_BETWEEN.split(change.replace(" (or data.cache)", ""))):
        if at % 2:
            separator = part
            continue
        if (named := _KEY.search(part)) is None:
            text = part
        elif option := _as_option(named["key"], named["value"], options):
            text = part[: named.start()] + option + part[named.end() :]
        else:
            instead = instead or INSTEAD.get(named["key"], "")
            continue
        parts += [separator, text] if parts else [text]
    return "".join(parts) or instead


def _as_option(key: str, value: str, options: Collection[str]) -> str:
    """What a key's value is as words of the command line; empty where no option says it."""
    if key == "data.train" and "--format" in options and "columns" not in value and (form := _FORMAT.search(value)):
        return f"--format {form[1]}"
    if (option := OPTIONS.get(key)) not in options:
        return ""
    values = value.strip("[]").split(", ") if value.startswith("[") else [value]
    return " ".join(f"{option} {shlex.quote(word.strip(chr(34)))}" for word in values)
