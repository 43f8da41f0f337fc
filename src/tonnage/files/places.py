"""Where commands may write: only where nothing of somebody else's is touched.

A directory to write into must be new, empty, or hold nothing but what we left in it; a file to write must be new,
empty, or what the same command wrote before. Links, devices and pipes are refused: a file that is written whole would
take their place.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryFile

from tonnage.errors import user_error
from tonnage.files.writing import is_unfinished

SHOWN_NAMES = 4
BLOCK = 4096
KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISREG, "a file"),
)


def check_vacant(
    directory: Path, needed: str, change: str, *, is_own: Callable[[Path], bool] = lambda _: False, where: str = ""
) -> None:
    """Refuse to write into a directory that holds anything but what ``is_own`` says of, path by path.

    Raises:
        UserError: it does, or is no directory; names some of what is in it.
        OSError: it cannot be looked at.
    """
    where = where or str(directory)
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise user_error(f"{directory} is {kind_of(directory.lstat().st_mode)}", needed, change, where)
    others = sorted(path.name for path in directory.iterdir() if not (is_own(path) or is_unfinished(path)))
    if others:
        shown = ", ".join(others[:SHOWN_NAMES])
        more = f" and {len(others) - SHOWN_NAMES:,} more" if len(others) > SHOWN_NAMES else ""
        observed = f"{directory} is a directory that is not empty: it holds {shown}{more}"
        raise user_error(observed, needed, change, where)


def check_file(
    path: Path, *, is_own: Callable[[Path], bool], inputs: Iterable[str | Path] = (), where: str = ""
) -> None:
    """Refuse to write a file in the place of anything but an empty file or one that ``is_own`` knows.

    ``inputs`` are files that the command reads.

    Raises:
        UserError: something else is there, or one of ``inputs``.
        OSError: it cannot be looked at.
    """
    where, needed = where or str(path), "a new file, or one that this command wrote before"
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        change = "name a new file"
        if stat.S_ISLNK(mode) and path.is_file():
            change = f"name what it leads to, {os.path.realpath(path)}, or a new file"
        raise user_error(f"{path} is {kind_of(mode)}", needed, change, where)
    if any(Path(source).exists() and path.samefile(source) for source in inputs):
        raise user_error(f"{path} is what is read", needed, "name a new file", where)
    if path.stat().st_size and not is_own(path):
        raise user_error(f"{path} is there, with other content", needed, "name a new file", where)


def begins_with(start: str) -> Callable[[Path], bool]:
    """Of a file: whether its first bytes, a few thousand, have ``start`` among them."""

    def is_own(path: Path) -> bool:
        with path.open("rb") as file:
            return start.encode() in file.read(BLOCK)

    return is_own


def check_writable(path: Path) -> None:
    """Find out now whether a file can be made in a directory, or in the nearest one above it that is there.

    Raises ``OSError``.
    """
    directory = existing(path)
    try:
        with TemporaryFile(dir=directory) as file:
            file.write(b" " * BLOCK)
    except OSError as error:
        error.filename = str(path)  # not a name that nobody knows
        raise


def existing(path: Path) -> Path:
    """A path, absolute, or the nearest directory above it that is there. Raises ``OSError``."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def kind_of(mode: int) -> str:
    """What a mode is of, in words."""
    return next((name for is_kind, name in KINDS if is_kind(mode)), "a device")
