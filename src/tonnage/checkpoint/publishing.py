"""A directory that is there whole, or not at all: written under another name beside its place, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tonnage.checkpoint.save import explained
from tonnage.errors import user_error
from tonnage.files.places import check_vacant
from tonnage.files.writing import UNFINISHED, sync, synchronise


def check_empty(directory: Path) -> None:
    """Refuse to write into a directory that holds something, or whose place no other can take.

    Raises:
        UserError: it does.
    """
    check_vacant(directory, "a new or empty directory", "choose another directory")
    if os.path.ismount(os.path.realpath(directory)):
        observed = "a mount point, whose place a directory that was written beside it cannot take"
        raise user_error(observed, "a new or empty directory", f"name one in it: {directory / 'model'}", str(directory))


@contextmanager
def published(directory: Path, needed: str) -> Iterator[Path]:
    """A directory to write an export into, which is renamed to ``directory`` when it is whole; if writing fails,
    nothing stays. ``needed`` says how many bytes it takes, for what.

    Raises:
        UserError: the disk does not take it.
    """
    directory = Path(os.path.realpath(directory))  # of a link what it leads to
    temporary = directory.with_name(f".{directory.name}.partial{UNFINISHED}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        synchronise(temporary)
        if directory.exists():
            directory.rmdir()
        temporary.rename(directory)
        sync(directory.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise explained(error, temporary, "the export", needed=needed, change="choose another directory") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
