"""Small files, whole or not at all; and no file of ours that others may write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CLOSED_TO_OTHERS = 0o022


def close_to_others() -> None:
    """Let no file or directory that this process and its children make be writable for group and others.

    For the beginning of a program: the mask belongs to the whole process. What the user's own mask takes away besides
    stays taken away.
    """
    os.umask(os.umask(CLOSED_TO_OTHERS) | CLOSED_TO_OTHERS)


@contextmanager
def made(directory: Path) -> Iterator[None]:
    """Make a directory; if what is to be written into it cannot be, and it is new and empty, it goes again."""
    was_there = directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if not was_there:
            with suppress(OSError):
                directory.rmdir()
        raise


def write_whole(path: Path, content: str | bytes, *, new: bool = False) -> None:
    """Write a file so that others see the old one or the new one, never half of one; nothing stays behind on failure.

    ``new``: it must not be there yet.

    Raises:
        FileExistsError: with ``new``, it is.
        OSError: it cannot be written; the error names ``path``.
    """
    beside = path if new else path.with_name(f".{path.name[:100]}.{os.getpid()}")
    opened = False
    try:
        with beside.open("xb" if new else "wb") as file:
            opened = True
            file.write(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        if not new:
            beside.replace(path)
    except BaseException as error:
        if opened:
            with suppress(OSError):
                beside.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise
