"""Where results are kept that any run of this user may want again: prepared data, measurements of the machine.

What lies there decides plans and what is trained on, so it is read only where nobody else could have put it: a
directory that belongs to the user or to root and that not everybody may write. One that its owner has opened to a group
is shared with that group on purpose, and what members put into it counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pwd
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tonnage.errors import UserError, user_error
from tonnage.files.reading import read_record
from tonnage.files.visible import visible
from tonnage.files.writing import write_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


def default_directory() -> Path:
    """``$TONNAGE_CACHE``, else ``tonnage`` in the user's cache directory.

    Raises:
        UserError: others may have written it, or nobody knows where it is.
    """
    named = os.environ.get("TONNAGE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(named) if named else Path.home() / ".cache"
    except RuntimeError as error:
        change = "set TONNAGE_CACHE to a directory"
        raise user_error("a user without a home directory", "a place for a cache", change) from error
    return trusted(home if os.environ.get("TONNAGE_CACHE") else home / "tonnage")


def trusted(root: Path, *parts: str) -> Path:
    """A place in a cache, by the names that lead there from its ``root``, if nobody else could have put it there.

    Raises:
        UserError: somebody else owns it, or what leads there, or everybody may write it.
    """
    path, is_shared = root, False
    for part in ("", *parts):
        path = path / part
        if path.exists() and not path.is_dir() and path == root:
            change = "set TONNAGE_CACHE (or data.cache) to a directory, which need not exist yet"
            raise user_error("a cache that is no directory", "a directory", change, str(path))
        if why := why_untrusted(path, shared=is_shared):
            raise user_error(
                found=f"a cache that {why}",
                needed="one that is yours or root's and that not all may write: it decides what is trained on",
                change="set TONNAGE_CACHE (or data.cache) to a new directory of your own",
                where=str(path),
            )
        with suppress(OSError):
            is_shared |= bool(path.stat().st_mode & stat.S_IWGRP)
    return path


def why_untrusted(path: Path, *, shared: bool = False, owner_of: Path | None = None) -> str:
    """Why a file or directory may hold what others put there; empty if it does not, or is not there.

    ``shared``: it lies in a directory that is shared with a group, whose members are trusted. ``owner_of``: the owner
    of this file is trusted as well.
    """
    try:
        status = path.stat()
        others = {os.geteuid(), 0} | ({owner_of.stat().st_uid} if owner_of is not None else set())
    except OSError:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return f"everybody may write (mode {stat.S_IMODE(status.st_mode):o})"
    if status.st_uid not in others and not shared:
        return f"belongs to somebody else ({_name(status.st_uid)})"
    return ""


def _name(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name}, user {user}"
    except KeyError:
        return f"user {user}"


def room_for(path: Path) -> None:
    """Make the directory of a cache in which ``path`` will lie, and the cache itself where there is none yet.

    In a cache that its owner has opened to a group, the group may write into it as well.

    Raises:
        OSError: it cannot be made.
    """
    directory = path.parent
    directory.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir()
        mode = stat.S_IMODE(directory.parent.stat().st_mode)
        if mode & stat.S_IWGRP:
            directory.chmod(mode & ~stat.S_IWOTH)


@contextmanager
def kept(path: Path, otherwise: str) -> Iterator[None]:
    """Within it something is written to ``path`` that can be found anew; that it could not be is said once.

    ``otherwise`` says what that costs.
    """
    try:
        yield
    except OSError as error:
        what = f"{path.parent}: cannot be written ({error.strerror})"
        say_once(f"{what}; {otherwise}; TONNAGE_CACHE names another directory")


def remembered(
    place: tuple[Path, str, str] | None, inputs: Sequence[Any], kind: type[R], find: Callable[[], R], otherwise: str
) -> R:
    """What ``find`` comes to, a record of a ``kind`` that follows from ``inputs``, kept for the next time.

    ``place``: a cache, a folder in it, and what names of files there begin with; None keeps nothing. ``otherwise`` is
    what a cache that cannot be written costs.

    Raises:
        UserError: others may have written the cache; or whatever ``find`` raises.
    """
    if place is None:
        return find()
    key = hashlib.blake2b(json.dumps(inputs, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()
    path = trusted(place[0], place[1], f"{place[2]}{key}.json")
    with suppress(UserError):
        return read_record(path, kind)
    record = find()
    with kept(path, otherwise):
        room_for(path)
        write_json(path, asdict(record))
    return record


@cache
def say_once(sentence: str) -> None:
    """Tell people on standard error, if this process has not told them yet."""
    logging.getLogger("tonnage").warning("%s", visible(sentence))
