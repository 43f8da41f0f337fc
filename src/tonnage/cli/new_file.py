"""A file that a command writes and that must not be there yet."""

from __future__ import annotations

import os
from pathlib import Path

from tonnage.errors import user_error
from tonnage.files.writing import write_whole


def check_new(path: Path) -> None:
    """Refuse a file that is there, or has no directory to be in. Raises ``UserError``."""
    if os.path.lexists(path):
        raise user_error("is there already", "a new file", "name another, or remove it", str(path))
    if not path.parent.is_dir():
        raise user_error(f"no directory {path.parent}", "a new file in a directory that is there", where=str(path))


def write_new(path: Path, text: str) -> None:
    """Write a file that nobody has written meanwhile. Raises ``UserError``."""
    check_new(path)
    try:
        write_whole(path, text, new=True)
    except FileExistsError:
        check_new(path)
        raise
