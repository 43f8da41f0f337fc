"""Which saves of a run are on the hub already, and which are to go there.

    push/pushed.json     the saves that were pushed, or given up
    push/step-.../       an export that is on its way
    push/lock            held by whoever pushes

A save is known by its step and by what it holds, as a run that goes on from an earlier step saves that step again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tonnage.files.reading import read_record
from tonnage.files.writing import write_whole
from tonnage.rundir.directory import COMPLETE, RunDirectory, complete_checkpoints, step_of

FOLDER = "push"


@dataclass(frozen=True)
class Pushed:
    """What became of the saves of a run, by their keys."""

    repository: str = ""
    done: list[str] = field(default_factory=list)
    overtaken: list[str] = field(default_factory=list)
    """Those that had been removed, for newer ones, before they were exported."""

    @staticmethod
    def of(run: RunDirectory, repository: str) -> Pushed:
        """What is noted for a repository. Raises ``UserError`` when the note cannot be read."""
        path = run.path / FOLDER / "pushed.json"
        record = read_record(path, Pushed) if path.is_file() else Pushed()
        return record if record.repository == repository else Pushed(repository)

    def write(self, run: RunDirectory) -> None:
        """Keep it. Raises ``OSError``."""
        (run.path / FOLDER).mkdir(exist_ok=True)
        write_whole(run.path / FOLDER / "pushed.json", json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True)
class Save:
    """A save that is to be pushed."""

    step: int
    key: str
    """Its step and what it holds, as the name of a directory."""
    staged: Path
    """Where its export lies until it has been pushed."""


def waiting(run: RunDirectory, repository: str) -> list[Save]:
    """Saves that are not on the hub yet, the oldest first: those that are exported, and complete checkpoints."""
    pushed = Pushed.of(run, repository)
    keys = {path.name for path in (run.path / FOLDER).glob("step-*-*") if path.is_dir()}
    for checkpoint in complete_checkpoints(run.checkpoints):
        try:
            digest = hashlib.sha256((checkpoint / COMPLETE).read_bytes()).hexdigest()
        except FileNotFoundError:  # a newer one took its place just now
            continue
        keys.add(f"{checkpoint.name}-{digest[:16]}")
    keys -= {*pushed.done, *pushed.overtaken}
    saves = [Save(step_of(Path(key.rpartition("-")[0])), key, run.path / FOLDER / key) for key in keys]
    return sorted(saves, key=lambda save: save.step)


@contextmanager
def alone(run: RunDirectory) -> Iterator[bool]:
    """Whether nobody else pushes this run, for as long as this lasts."""
    (run.path / FOLDER).mkdir(exist_ok=True)
    with (run.path / FOLDER / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
