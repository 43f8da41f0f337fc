"""Is a directory byte for byte what was written? Sizes and hashes against the list that was written with it.

Checkpoints carry the list in their COMPLETE file, exports in ``checksums.json``. A file that the list does not name is
a fault as well: nothing is ever read that was not written by the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.checkpoint.save import COMPLETE
from tonnage.checkpoint.shards import HASHES, hash_file, read_header
from tonnage.errors import Problem, UserError
from tonnage.rundir import read_json

CHECKSUMS = "checksums.json"
"""The list of an export."""
SUFFIXES = (".safetensors", ".json")
"""Of the files that a checkpoint may hold; none of them can run code."""


@dataclass(frozen=True)
class Listed:
    """A file as it was written."""

    path: Path
    num_bytes: int
    hash_name: str
    digest: str


def list_of(directory: Path) -> Path:
    """The file that lists what a directory holds. Raises ``UserError`` if there is none."""
    for name in (COMPLETE, CHECKSUMS):
        if (directory / name).is_file():
            return directory / name
    raise UserError(
        Problem(
            f"neither {COMPLETE} nor {CHECKSUMS}",
            "a checkpoint or an export, with the list of its files",
            where=str(directory),
        )
    )


def listed_files(directory: Path) -> list[Listed]:
    """The files of a checkpoint or export. Raises ``UserError`` if there is no list, or it cannot be read."""
    source = list_of(directory)
    try:
        files = read_json(source)["files"]
        return [_listed(directory / name, entry) for name, entry in sorted(files.items())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            Problem("a list that cannot be read", "the file as it was written", where=str(source))
        ) from error


def _listed(path: Path, entry: Mapping[str, Any]) -> Listed:
    (hash_name,) = HASHES.keys() & entry.keys()
    return Listed(path, int(entry["bytes"]), hash_name, str(entry[hash_name]))


def check_names(directory: Path, listed: Iterable[Listed], suffixes: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Files that are missing, too short, too long, not listed, or (with ``suffixes``) of a kind that is not read."""
    listed = list(listed)
    for file in listed:
        if suffixes and file.path.suffix not in suffixes:
            yield Problem("a file of a kind that is never read", " or ".join(suffixes), where=str(file.path))
        elif not file.path.is_file():
            yield Problem("no such file", f"{file.num_bytes:,} bytes", where=str(file.path))
        elif (size := file.path.stat().st_size) != file.num_bytes:
            yield Problem(f"{size:,} bytes", f"the {file.num_bytes:,} that were written", where=str(file.path))
    source = list_of(directory)
    named = {path for file in listed for path in (file.path, *file.path.parents)} | {source}
    for path in sorted(set(directory.rglob("*")) - named):
        if source.name == CHECKSUMS and path.relative_to(directory).parts[0].startswith("."):
            continue  # what tools of the hub leave in a model directory, and nobody loads
        yield Problem("a file that was not written by the run", f"only what {source.name} lists", where=str(path))


def check_hash(file: Listed, told: Callable[[int], None] = lambda num_bytes: None) -> Problem | None:
    """What is wrong with the content of a file; ``told`` is called with the bytes of every chunk read."""
    if (found := hash_file(file.path, file.hash_name, told)) == file.digest:
        return None
    return Problem(
        f"content that has changed since it was written ({file.hash_name} {found[:16]}...)",
        f"{file.hash_name} {file.digest[:16]}...",
        where=str(file.path),
    )


def check_checkpoint(checkpoint: Path) -> list[Problem]:
    """What can be seen to be wrong without reading the tensors: names, sizes, headers, everything that is JSON."""
    try:
        listed = listed_files(checkpoint)
    except UserError as error:
        return list(error.problems)
    problems = list(check_names(checkpoint, listed, SUFFIXES))
    for file in listed if not problems else ():
        if file.path.suffix == ".json":
            problems += filter(None, [check_hash(file)])
            continue
        try:
            read_header(file.path)
        except UserError as error:
            problems += error.problems
    return problems


def verify(directory: Path, told: Callable[[int, int], None] = lambda done, total: None) -> list[Problem]:
    """Everything that is wrong with a checkpoint or an export; every byte is read.

    ``told`` is called with bytes done and bytes in all. Raises ``UserError`` if the directory has no list.
    """
    listed = listed_files(directory)
    problems = list(check_names(directory, listed))
    faulty = {problem.where for problem in problems}
    sound = [file for file in listed if str(file.path) not in faulty]
    done, total = 0, sum(file.num_bytes for file in sound)

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        told(done, total)

    return problems + [problem for file in sound if (problem := check_hash(file, advance)) is not None]
