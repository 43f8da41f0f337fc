"""Where rows come from: files, globs, directories and hub ids, read a part at a time in bounded memory.

``resolve`` turns a ``Source`` into ``Part``s: pieces of files that can be read independently of one another, at
borders that depend on the file alone (16 MiB of a JSONL file, one row group of a Parquet file, one whole file of any
other kind), so that it does not matter how many processes share them. ``rows.read_rows`` reads one.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tonnage.config import Source
from tonnage.data.csv_text import SEPARATORS, separated_by
from tonnage.data.hub import Found, files_of_copy, hub_files, is_hub_id
from tonnage.data.json_text import layout_of
from tonnage.data.opening import DAMAGED, PACKED, kind_suffix, open_file, packing_of
from tonnage.data.rows import ALL, PART_BYTES, UNPACKED_ONLY, Part, arrow_batches
from tonnage.errors import Problem, UserError
from tonnage.files.paths import matching

MOST_FILES = 100_000
"""Below a directory, of any kind; more are not looked through."""
TEXTS_OF_PART = 256
"""Small text files that make one part."""
KINDS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
}
"""Ending -> what a file holds. JSON of any layout is found out from the file."""
_ABOUT = re.compile(r"(readme|licen[cs]e|changelog|notice)\b", re.IGNORECASE)
"""Names of texts that come with data and are none."""
_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")


@dataclass(frozen=True)
class Resolved:
    """What a source comes to."""

    parts: list[Part]
    commit: str = ""
    """Of a hub data set, what its revision is now."""
    left: tuple[str, ...] = ()
    """Files that lie there and are not read: of other splits, texts among files of rows, files of other kinds."""


def resolve(source: Source, index: int) -> Resolved:
    """Parts of a source, in order. Raises ``UserError`` when it is missing, empty or of an unknown kind."""
    resolved = _files(source)
    for file in resolved.files:
        if file.stat().st_size == 0:
            raise UserError(
                Problem(found=f"{file} is empty (0 bytes)", needed="at least one row", where=f"data: {source.path}")
            )
    texts = [file for file in resolved.files if _kind(file) == "text" and not _holds_json(file)]
    if source.documents != "file" and not any(_kind(file) == "text" for file in resolved.files):
        raise UserError(
            Problem(
                found=f"documents: {source.documents}, and no file of plain text",
                needed="files ending in .txt or .md",
                change="leave documents out",
                where=f"data: {source.path}",
            )
        )
    if source.documents == "file" and len(texts) == len(resolved.files) > 1:
        groups = [list(map(str, texts[at : at + TEXTS_OF_PART])) for at in range(0, len(texts), TEXTS_OF_PART)]
        return Resolved(
            [Part(index, group[0], "file", more=tuple(group[1:])) for group in groups], resolved.commit, resolved.left
        )
    parts = [part for file in resolved.files for part in _parts(file, index, source)]
    return Resolved(parts, resolved.commit, resolved.left)


def _files(source: Source) -> Found:
    where = f"data: {source.path}"
    try:
        path = Path(source.path).expanduser()
        is_there, is_folder = os.path.lexists(path), path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            Problem(found=f"no name of a file ({error})", needed="a file, a directory, a glob or a hub id", where=where)
        ) from None
    if is_folder:
        return _named(path, source) if source.files else _below(path, source)
    if source.files and (is_there or not is_hub_id(source.path)):
        problem = Problem(
            found=f"files ({', '.join(source.files)}) of {source.path}, which is no directory here and no hub data set",
            needed="the name of one of these",
            change="leave files out, or check the path",
            where=where,
        )
        raise UserError(problem)
    if is_there or not glob.has_magic(source.path):
        if is_there:
            _check_file(path, where)
            return Found(_no_split([path], source))
        if is_hub_id(source.path) and kind_suffix(path) not in KINDS:
            return hub_files(source)
        raise UserError(
            Problem(found="no such file or directory", needed="a file, a directory, a glob or a hub id", where=where)
        )
    try:
        files = sorted(file for file in matching(path) if not file.is_dir())
    except ValueError as error:
        problem = Problem(f"no pattern: {error}", "** as a whole part of a path, as in data/**/*.jsonl", where=where)
        raise UserError(problem) from None
    if not files:
        raise UserError(Problem(found="no file fits this pattern", needed="at least one file", where=where))
    unknown = [str(file) for file in files if _kind(file) is None]
    if unknown:
        raise UserError(
            Problem(found=f"files of an unknown kind: {', '.join(unknown[:5])}", needed=", ".join(KINDS), where=where)
        )
    for file in files:
        _check_file(file, where)
    return Found(_no_split(files, source))


def _check_file(path: Path, where: str) -> None:
    if not path.is_file():
        fault = "a link that leads nowhere" if path.is_symlink() and not path.exists() else "no regular file"
        raise UserError(Problem(found=f"{path} is {fault}", needed="a file with rows in it", where=where))
    if _kind(path) is None:
        ending = f"{kind_suffix(path)}{packing_of(path)}" or path.suffix
        raise UserError(
            Problem(
                found=f"a file ending in {ending or 'nothing'!r}",
                needed=f"one of {', '.join(KINDS)} (all but .parquet and .arrow also with {', '.join(PACKED)})",
                change=f"unzip {shlex.quote(str(path))}, and name what comes out"
                if ending == ".zip"
                else "convert it, or rename it if it is one of these under another name",
                where=where,
            )
        )


def _no_split(files: list[Path], source: Source) -> list[Path]:
    """The files. Raises ``UserError`` where the source names a subset, revision or split that they cannot have."""
    settings = {"name": source.name, "revision": source.revision}
    if source.split != "train" and not all(_kind(file) == "json" for file in files):
        settings["split"] = source.split
    if names := [name for name, value in settings.items() if value is not None]:
        raise UserError(
            Problem(
                found=f"{' and '.join(names)} for a file, which has none",
                needed="a hub data set, or a directory that is a copy of one",
                change=f"leave {' and '.join(names)} out, or name the directory",
                where=f"data: {source.path}",
            )
        )
    return files


def _named(path: Path, source: Source) -> Found:
    """The files of a directory that a source names, in the order in which it does, each once."""
    where = f"data: {source.path}"
    files: list[Path] = []
    for name in source.files:
        try:
            fitting = sorted(file for file in matching(path / name) if not file.is_dir())
        except ValueError as error:
            raise UserError(Problem(f"{name}: no pattern: {error}", "a name or a pattern", where=where)) from None
        if not fitting:
            raise UserError(Problem(f"no file {name} in this directory", "at least one file", where=where))
        files += [file for file in fitting if file not in files]
    for file in files:
        _check_file(file, where)
    return Found(_no_split(files, source))


def _below(path: Path, source: Source) -> Found:
    """The data files below a directory: of one split, where it has splits."""
    where = f"data: {source.path}"
    files: list[Path] = []
    others: list[Path] = []
    links: list[str] = []
    num_entries = 0
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        num_entries += len(folders) + len(names)
        if num_entries > MOST_FILES:
            raise UserError(
                Problem(
                    found=f"a directory with more than {MOST_FILES:,} files and folders below it",
                    needed="one that holds the rows and little else",
                    change="name the directory of the rows, or a pattern such as rows/*.jsonl",
                    where=where,
                )
            )
        links += [f"{(Path(folder) / name).relative_to(path)}/" for name in folders if Path(folder, name).is_symlink()]
        for name in sorted(names):
            if not name.startswith((".", "_")) and name not in _NOT_ROWS:
                file = Path(folder, name)
                (others if _kind(file) is None else files).append(file)
    beside = (*links, *_by_ending([file.relative_to(path) for file in others if not _ABOUT.match(file.name)]))
    if (copy := files_of_copy(path, files, source)) is not None:
        for file in copy.files:
            _check_file(file, where)
        return replace(copy, left=(*copy.left, *beside))
    rows = [file for file in files if _kind(file) != "text" or _holds_json(file)]
    texts = [file for file in files if file not in set(rows) and not _ABOUT.match(file.name)]
    chosen = sorted(rows or texts)
    if not chosen:
        raise UserError(
            Problem(found="a directory without data files", needed=f"files ending in {', '.join(KINDS)}", where=where)
        )
    for file in chosen:
        _check_file(file, where)
    left = tuple(str(file.relative_to(path)) for file in texts) if rows else ()
    return Found(_no_split(chosen, source), left=(*left, *beside))


def _by_ending(files: Sequence[Path]) -> Iterator[str]:
    """Names of files of kinds that are not read; if several have an ending, only how many."""
    alike: dict[str, list[Path]] = {}
    for file in files:
        alike.setdefault(file.suffix, []).append(file)
    for ending, some in alike.items():
        yield str(some[0]) if len(some) == 1 else f"{len(some):,} files ending in {ending or 'nothing'}"


def _kind(file: Path) -> str | None:
    """What a file holds by its name, ``None`` if nothing that is read."""
    kind = KINDS.get(kind_suffix(file))
    return None if kind in UNPACKED_ONLY and packing_of(file) else kind


def _parts(file: Path, index: int, source: Source) -> list[Part]:
    kind, name, field = str(_kind(file)), str(file), ""
    if kind in ("json", "text", "csv", "tsv"):
        _refuse_utf_16(file)
    if kind in SEPARATORS:
        try:
            kind = separated_by(file)
        except DAMAGED as error:
            raise _unreadable(file, "", error) from error
    if kind == "text":
        kind = source.documents if not _holds_json(file) else "json"
    if kind == "json":
        try:
            layout, field = layout_of(file, source.split)
        except DAMAGED as error:
            raise _unreadable(file, "", error) from error
        kind = layout
    if kind in ("lines", "line"):
        if packing_of(file):
            return [Part(index, name, kind, 0, ALL)]
        size = file.stat().st_size
        return [Part(index, name, kind, at, min(at + PART_BYTES, size)) for at in range(0, size, PART_BYTES)]
    if kind == "parquet":
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(name) as opened:
                groups = opened.num_row_groups
        except Exception as error:
            raise _unreadable(file, "Parquet", error) from error
        return [Part(index, name, kind, group, group + 1) for group in range(groups)]
    if kind == "arrow":
        try:
            batches = sum(1 for _ in arrow_batches(name, 0, -1))
        except Exception as error:
            raise _unreadable(file, "Arrow", error) from error
        return [Part(index, name, kind, at, min(at + 16, batches)) for at in range(0, batches, 16)]
    return [Part(index, name, kind, field=field)]


def _unreadable(file: Path, kind: str, error: BaseException) -> UserError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    noun = f"{kind} file" if kind else "file"
    return UserError(Problem(found=f"not a readable {noun} ({reason})", needed=f"a whole {noun}", where=str(file)))


def _refuse_utf_16(file: Path) -> None:
    try:
        with open_file(file) as opened:
            head = opened.read(2)
    except DAMAGED as error:
        raise _unreadable(file, "", error) from error
    if head in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(
            Problem(
                found="text in UTF-16",
                needed="UTF-8",
                change=f"iconv -f UTF-16 -t UTF-8 {file.name} > utf8-{file.name}",
                where=str(file),
            )
        )


def _holds_json(file: Path) -> bool:
    """Whether a text file holds JSON lines."""
    if kind_suffix(file) != ".txt" or not file.is_file():
        return False
    try:
        with open_file(file) as opened:
            line = opened.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip().split(b"\n", 1)[0]
    except DAMAGED:
        return False
    try:
        return line.startswith(b"{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def digest(file: str) -> str:
    """Digest of a file's bytes."""
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()[:32]
