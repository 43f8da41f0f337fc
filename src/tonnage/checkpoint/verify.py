"""Is a directory byte for byte what was written? Sizes and hashes against the list that was written with it.

Checkpoints carry the list in their COMPLETE file, exports in ``checksums.json``. A file that the list does not name is
a fault as well: nothing is ever read that was not written by the run.

A list proves nothing by itself: who changes a file may change its line as well. So a checkpoint's hashes stand in two
files, ``state.json`` (those of the tensors) and COMPLETE (those of all, ``state.json`` among them), and must agree. Who
rewrites all of it consistently is not found out: there is no secret that a run could sign with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

from annotated_types import Ge, Len

from tonnage.checkpoint.save import STATE, CursorForm, WrittenFile
from tonnage.checkpoint.shards import FAST_HASH, PUBLIC_HASH, counting, hash_file, read_header
from tonnage.errors import Problem, UserError, user_error
from tonnage.files.reading import read_record
from tonnage.files.writing import write_json
from tonnage.rundir.directory import COMPLETE

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


@dataclass(frozen=True)
class CheckpointList:
    """What COMPLETE says, by name."""

    files: dict[str, WrittenFile]


@dataclass(frozen=True)
class ExportedFile:
    """A file of an export as it was written."""

    bytes: Annotated[int, Ge(0)]
    sha256: Annotated[str, Len(64, 64)]


@dataclass(frozen=True)
class ExportList:
    """What ``checksums.json`` says, by name."""

    files: dict[str, ExportedFile]
    checkpoint: str = ""
    """From which it was made; empty in an export of an older version."""


def write_checksums(directory: Path, digests: Mapping[str, str], checkpoint: str) -> None:
    """Write the list of an export that was made from ``checkpoint``; ``digests`` are hashes that are known already."""
    files = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        digest = digests.get(name) or hash_file(path, PUBLIC_HASH)
        files[name] = {PUBLIC_HASH: digest, "bytes": path.stat().st_size}
    write_json(directory / CHECKSUMS, {"checkpoint": checkpoint, "files": files})


def check_written(
    directory: Path, digests: Mapping[str, str], advanced: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Read files of an export back. Raises ``UserError`` if one has other content than was written."""
    problems = [
        Problem("other content than was written", "a disk that keeps what it is given", where=str(directory / name))
        for name, digest in digests.items()
        if hash_file(directory / name, PUBLIC_HASH, advanced) != digest
    ]
    if problems:
        raise UserError(*problems)


def list_of(directory: Path) -> Path:
    """The file that lists what a directory holds. Raises ``UserError`` if there is none."""
    for name in (COMPLETE, CHECKSUMS):
        if (directory / name).is_file():
            return directory / name
    raise user_error(
        f"neither {COMPLETE} nor {CHECKSUMS}",
        "a checkpoint or an export, with the list of its files",
        where=str(directory),
    )


def listed_files(directory: Path) -> list[Listed]:
    """The files of a checkpoint or export, by name.

    Raises:
        UserError: there is no list, it cannot be read, or it names what is not in the directory.
    """
    source = list_of(directory)
    by_name: dict[str, tuple[int, str]] = {}
    if source.name == COMPLETE:
        written, hash_name = read_record(source, CheckpointList).files, FAST_HASH
        by_name = {name: (entry.bytes, entry.xxh3_128) for name, entry in written.items()}
    else:
        exported, hash_name = read_record(source, ExportList).files, PUBLIC_HASH
        by_name = {name: (entry.bytes, entry.sha256) for name, entry in exported.items()}
    outside = [name for name in by_name if not _is_inside(name)]
    if outside or (source.name == COMPLETE and STATE not in by_name):
        wrong = f"the name {outside[0][:60]!r}" if outside else f"no {STATE}"
        raise user_error(f"{wrong} in the list of files", "the file as it was written", where=str(source))
    return [Listed(directory / name, size, hash_name, digest) for name, (size, digest) in sorted(by_name.items())]


def exported_from(export: Path) -> str:
    """Name of the checkpoint that an export was made from; empty where it does not say. Raises ``UserError``."""
    return read_record(export / CHECKSUMS, ExportList).checkpoint if (export / CHECKSUMS).is_file() else ""


def _is_inside(name: str) -> bool:
    """Whether a name is that of a file in the directory or below it."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


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
        if any(part.startswith(".") for part in path.relative_to(directory).parts):
            continue  # what the hub's tools, file managers and network file systems leave, and nobody loads
        yield Problem("a file that was not written by the run", f"only what {source.name} lists", where=str(path))


def check_hash(file: Listed, advanced: Callable[[int], None] = lambda num_bytes: None) -> Problem | None:
    """The problem with the content of a file, if any; ``advanced`` is called with the bytes of every chunk read."""
    if (digest := hash_file(file.path, file.hash_name, advanced)) == file.digest:
        return None
    return Problem(
        f"content that has changed since it was written ({file.hash_name} {digest[:16]}...)",
        f"{file.hash_name} {file.digest[:16]}...",
        where=str(file.path),
    )


def check_state(checkpoint: Path, listed: Iterable[Listed]) -> Iterator[Problem]:
    """Problems of a checkpoint's state: in itself, or where it disagrees with the list of its files."""
    try:
        stated = read_record(checkpoint / STATE, CursorForm).shards
        if stated is None:  # written by an older version
            return
    except UserError as error:
        yield from error.problems
        return
    shards = {file.path.name: WrittenFile(file.num_bytes, file.digest) for file in listed if file.path.name != STATE}
    for name in sorted(shards | stated):
        if shards.get(name) != stated.get(name):
            digests = [
                f"{written.xxh3_128[:16]}..." if written else "nothing"
                for written in (shards.get(name), stated.get(name))
            ]
            yield Problem(
                f"{COMPLETE} says {digests[0]} of it, {STATE} {digests[1]}: one was changed after it was written",
                "the same in both",
                where=str(checkpoint / name),
            )


def check_checkpoint(checkpoint: Path) -> list[Problem]:
    """Problems that can be seen without reading the tensors: in names, sizes, headers, and everything that is JSON."""
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
    return problems or list(check_state(checkpoint, listed))


def verify(directory: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Problem]:
    """Everything that is wrong with a checkpoint or an export; every byte is read.

    ``progress`` is called with bytes done and bytes in all. Raises ``UserError`` if the directory has no list.
    """
    listed = listed_files(directory)
    problems = list(check_names(directory, listed))
    faulty = {problem.where for problem in problems}
    sound = [file for file in listed if str(file.path) not in faulty]
    advance = counting(sum(file.num_bytes for file in sound), progress)
    problems += [problem for file in sound if (problem := check_hash(file, advance)) is not None]
    if not problems and list_of(directory).name == COMPLETE:
        problems += check_state(directory, listed)
    return problems
