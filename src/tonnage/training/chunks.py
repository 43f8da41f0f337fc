"""What is computed once, before training, in chunks that are kept: their files, and whose they are in the end.

KEY.parts/000000.npy ...    beside the cache's entry, each written as soon as it is there
KEY/                        the entry, when all are there: for every run of the same
RUN/.../KEY                 links to its files, from which a run trains
"""

from __future__ import annotations

import io
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np

from tonnage.errors import refusals


def parts_of(entry: Path) -> Path:
    """Where the chunks of an entry lie that is not whole."""
    return entry.with_name(f"{entry.name}.parts")


def link_whole(entry: Path, own: Path, what: str) -> None:
    """The files of an entry as the run's own, all of them or none."""
    beside = own.with_name(f".{own.name}.unfinished")
    with refusals(f"{what} could not be written", own):
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        for file in sorted(entry.iterdir()):
            link(file, beside / file.name)
        beside.rename(own)


def link(source: Path, destination: Path) -> None:
    """A second name of a file; a copy, where its disk has none."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def holds(path: Path, num_rows: int) -> bool:
    """Whether a chunk is there, and whole."""
    with suppress(OSError, ValueError):
        return len(np.load(path, mmap_mode="r", allow_pickle=False)) == num_rows
    return False


def array_bytes(array: np.ndarray) -> bytes:
    """An array as a file of numpy's."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
