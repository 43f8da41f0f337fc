"""What is computed once, before training, in chunks that are kept: their files, and whose they are in the end.

KEY.parts/000000.npy ...    beside the cache's entry, each written by rank 0 as soon as it is there: whoever is
                            interrupted goes on behind the last one
KEY/                        the entry, when all are there: for every run of the same
RUN/.../KEY                 links to its files, from which a run trains
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from tonnage.data import PackedDataset
from tonnage.data import cache as store
from tonnage.errors import refusals
from tonnage.files.writing import write_whole
from tonnage.training.setting import WorkerSetting


def provide(
    setting: WorkerSetting, phase: str, contents: str, entry: Path, own: Path, compute: Callable[[], None]
) -> None:
    """See to it that a run has results as its ``own``: from before, from the cache's entry, or from ``compute``, which
    makes that. ``contents`` says in messages what they are. Raises ``UserError``, and what ``compute`` raises."""
    world = setting.world
    setting.phases.enter(phase, micro_batch=0, num_micro_batches=0)
    places = [own.exists(), entry.exists()] if world.rank == 0 else [False, False]
    is_own, is_cached = world.sum(*map(float, places))
    if not is_own and not is_cached:
        compute()
    if world.rank == 0 and not is_own:
        link_whole(entry, own, contents)
    setting.log(f"{contents}: read from {own}{'' if is_own else f', links to {entry}'}")
    world.barrier()
    setting.phases.end()


def make_whole(entry: Path, num_chunks: int, others: Mapping[str, np.ndarray]) -> None:
    """The cache's entry of chunks, without a copy where links are possible, and of ``others`` by the names of their
    files. Raises ``UserError``."""
    parts = parts_of(entry)

    def build(building: Path) -> None:
        for number in range(num_chunks):
            for file in parts.glob(f"{number:06}.*"):
                link(file, building / file.name)
        for name, array in others.items():
            write_whole(building / name, array_bytes(array))

    store.entry(entry, build)
    shutil.rmtree(parts, ignore_errors=True)


def visited_packs(
    train: PackedDataset, validation: PackedDataset | None, num_packs: int, seed: int
) -> list[np.ndarray]:
    """The packs that a run of ``num_packs`` packs sees: of the data it trains on, and of validation."""
    visited = np.arange(train.num_packs)
    if num_packs < train.num_packs:
        visited = np.unique(train.first_packs(num_packs, seed))
    return [visited] if validation is None else [visited, np.arange(validation.num_packs)]


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
