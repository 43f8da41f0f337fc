"""Paths as people write them: ``~`` is a home directory, wherever a shell did not see to it.

What takes a path from outside, a key of a config or a word of a command line, has it go through ``expanded`` once.
``$VARIABLE`` is left to shells: what a config means must not depend on who reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tonnage.errors import user_error
from tonnage.files.visible import shortened

LONGEST_PATH, LONGEST_NAME = 4096, 255
"""Bytes of a path and of one name in it, beyond which no file system has one (Linux's PATH_MAX and NAME_MAX)."""
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


class NotAPathError(ValueError):
    """What was written is no path on this machine; says why."""


def expanded(text: str) -> str:
    """The path with ``~`` and ``~user`` at its start written out; any other path stays as it is.

    Raises:
        NotAPathError: nobody has that home directory, or no file can have such a name.
    """
    if "\0" in text:
        raise NotAPathError("a path without the character NUL")
    if text.startswith("~"):
        try:
            text = str(Path(text).expanduser())
        except RuntimeError as error:
            user = text.split("/")[0]
            raise NotAPathError(
                f"the home directory of somebody whom this machine knows, not of {user!r}; write the path out, or "
                f"./{user} for a file of that name"
            ) from error
    size = len(text.encode(errors="surrogateescape"))
    longest = max(len(name.encode(errors="surrogateescape")) for name in text.split("/"))
    if size > LONGEST_PATH or longest > LONGEST_NAME:
        raise NotAPathError(
            f"a path of at most {LONGEST_PATH:,} bytes, and {LONGEST_NAME} in each of its names; it has {size:,} and "
            f"{longest:,}"
        )
    return text


def is_there(path: Path) -> bool:
    """Whether anything is at a path, as far as this process may see: not of one that is too long to be a path."""
    try:
        return path.exists()
    except OSError:
        return False


def is_jinja(text: str) -> bool:
    """Whether a text is a Jinja template itself, and not the path or the name of one."""
    return "{{" in text or "{%" in text


def word(text: str) -> str:
    """A path on a command line (a ``parser`` of typer's), expanded. Raises ``UserError`` where it is none."""
    try:
        return expanded(text)
    except NotAPathError as error:
        raise user_error(f"{shortened(text)!r} where a path belongs", str(error)) from error


def path_word(text: str) -> Path:
    """As ``word``, as a ``Path``."""
    return Path(word(text))


def matching(pattern: Path) -> Iterator[Path]:
    """Paths that fit a pattern, which means the same with every version of Python.

    Raises:
        ValueError: it is none.
    """
    if any("**" in name and name != "**" for name in pattern.parts):  # which 3.13 takes for a single star
        raise ValueError("Invalid pattern: '**' can only be an entire path component")
    anchor = Path(pattern.anchor)
    return anchor.glob(str(pattern.relative_to(anchor)))


def literal_variable(path: str) -> str:
    """The first ``$NAME`` or ``${NAME}`` in a path that is not part of anything that is there; empty if there is none.

    Raises:
        OSError: what is there cannot be looked at.
    """
    so_far = Path(path).anchor or "."
    for name in Path(path).parts[bool(Path(path).anchor) :]:
        so_far = f"{so_far}/{name}"
        if (match := _VARIABLE.search(name)) and not Path(so_far).exists():
            return match[0]
    return ""
