"""Where rows come from: files, globs, directories and hub ids, read a part at a time in bounded memory.

``resolve`` turns a ``Source`` into ``Part``s: pieces of files that can be read independently of one another, at
borders that depend on the file alone (16 MiB of a JSONL file, one row group of a Parquet file, one whole file of any
other kind), so that it does not matter how many processes share them. ``rows.read_rows`` reads one.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tonnage.config import Source
from tonnage.data.reading.csv_text import SEPARATORS, separated_by
from tonnage.data.reading.json_text import layout_of
from tonnage.data.reading.opening import DAMAGED, PACKED, kind_suffix, open_file, packing_of
from tonnage.data.reading.rows import ALL, PART_BYTES, UNPACKED_ONLY, Part, num_batches
from tonnage.data.sources.hub import Resolved, files_of_copy, hub_files, is_hub_id, unusable
from tonnage.errors import UserError, user_error
from tonnage.files.paths import matching
from tonnage.forms.conversation import first_line

MOST_FILES = 100_000
"""Below a directory, of any kind; more are not looked through."""
TEXTS_OF_PART = 256
"""Small text files that make one part."""
ARROW_BATCHES = 16
"""Record batches that make one part."""
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
_ANY_PLACE = "a file, a directory, a glob or a hub id"
_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")


def resolve(source: Source, index: int) -> Resolved:
    """Files and parts of a source, in order. Raises ``UserError`` when it is missing, empty or of an unknown kind."""
    resolved = _files(source)
    for file in resolved.files:
        if file.stat().st_size == 0:
            raise unusable(source, f"{file} is empty (0 bytes)", "at least one row")
    texts = [file for file in resolved.files if _kind(file) == "text" and not _holds_json(file)]
    if source.documents != "file" and not any(_kind(file) == "text" for file in resolved.files):
        fault = f"documents: {source.documents}, and no file of plain text"
        raise unusable(source, fault, "files ending in .txt or .md", "leave documents out")
    if source.documents == "file" and len(texts) == len(resolved.files) > 1:
        groups = [list(map(str, texts[at : at + TEXTS_OF_PART])) for at in range(0, len(texts), TEXTS_OF_PART)]
        parts = [Part(index, group[0], "file", more=tuple(group[1:])) for group in groups]
    else:
        parts = [part for file in resolved.files for part in _parts(file, index, source)]
    return replace(resolved, parts=parts)


def _files(source: Source) -> Resolved:
    """The files of a source, without their parts. Raises ``UserError``."""
    try:
        path = Path(source.path).expanduser()
        is_there, is_folder = os.path.lexists(path), path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        raise unusable(source, f"no name of a file ({error})", _ANY_PLACE) from None
    if is_folder:
        return _named(path, source) if source.files else _below(path, source)
    if source.files and (is_there or not is_hub_id(source.path)):
        names = ", ".join(source.files)
        fault = f"files ({names}) of {source.path}, which is no directory here and no hub data set"
        raise unusable(source, fault, "the name of one of these", "leave files out, or check the path")
    if is_there:
        return _checked([path], source)
    if not glob.has_magic(source.path):
        if is_hub_id(source.path) and kind_suffix(path) not in KINDS:
            return hub_files(source)
        raise unusable(source, "no such file or directory", _ANY_PLACE)
    try:
        files = _fitting(path)
    except ValueError as error:
        needed = "** as a whole part of a path, as in data/**/*.jsonl"
        raise unusable(source, f"no pattern: {error}", needed) from None
    if not files:
        raise unusable(source, "no file fits this pattern", "at least one file")
    if unknown := [str(file) for file in files if _kind(file) is None]:
        raise unusable(source, f"files of an unknown kind: {', '.join(unknown[:5])}", ", ".join(KINDS))
    return _checked(files, source)


def _fitting(pattern: Path) -> list[Path]:
    """The files that a pattern fits, in order. Raises ``ValueError`` where it is none."""
    return sorted(file for file in matching(pattern) if not file.is_dir())


def _checked(files: list[Path], source: Source, left: tuple[str, ...] = ()) -> Resolved:
    """Files that hold rows. Raises ``UserError`` where one holds none, or the source names a subset, revision or split
    that they cannot have."""
    _check_files(files, source)
    settings = {"name": source.name, "revision": source.revision}
    if source.split != "train" and not all(_kind(file) == "json" for file in files):
        settings["split"] = source.split
    if names := " and ".join(name for name, value in settings.items() if value is not None):
        raise unusable(
            source,
            found=f"{names} for a file, which has none",
            needed="a hub data set, or a directory that is a copy of one",
            change=f"leave {names} out, or name the directory",
        )
    return Resolved(files, left=left)


def _check_files(files: Sequence[Path], source: Source) -> None:
    for path in files:
        if not path.is_file():
            fault = "a link that leads nowhere" if path.is_symlink() and not path.exists() else "no regular file"
            raise unusable(source, f"{path} is {fault}", "a file with rows in it")
        if _kind(path) is None:
            ending = f"{kind_suffix(path)}{packing_of(path)}" or path.suffix
            raise unusable(
                source,
                found=f"a file ending in {ending or 'nothing'!r}",
                needed=f"one of {', '.join(KINDS)} (all but .parquet and .arrow also with {', '.join(PACKED)})",
                change=f"unzip {shlex.quote(str(path))}, and name what comes out"
                if ending == ".zip"
                else "convert it, or rename it if it is one of these under another name",
            )


def _named(path: Path, source: Source) -> Resolved:
    """The files of a directory that a source names, in the order in which it does, each once."""
    files: dict[Path, None] = {}
    for name in source.files:
        try:
            fitting = _fitting(path / name)
        except ValueError as error:
            raise unusable(source, f"{name}: no pattern: {error}", "a name or a pattern") from None
        if not fitting:
            raise unusable(source, f"no file {name} in this directory", "at least one file")
        files |= dict.fromkeys(fitting)
    return _checked(list(files), source)


def _below(path: Path, source: Source) -> Resolved:
    """The data files below a directory: of one split, where it has splits."""
    files: list[Path] = []
    others: list[Path] = []
    unseen: list[str] = []  # links, and folders that are closed
    num_entries = 0

    def leave(folder: str | Path) -> None:
        unseen.append(f"{Path(folder).relative_to(path)}/")

    for folder, folders, names in os.walk(path, onerror=lambda error: leave(error.filename)):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        num_entries += len(folders) + len(names)
        if num_entries > MOST_FILES:
            raise unusable(
                source,
                found=f"a directory with more than {MOST_FILES:,} files and folders below it",
                needed="one that holds the rows and little else",
                change="name the directory of the rows, or a pattern such as rows/*.jsonl",
            )
        for name in folders:
            if Path(folder, name).is_symlink():
                leave(Path(folder, name))
        for name in sorted(names):
            if not name.startswith((".", "_")) and name not in _NOT_ROWS:
                file = Path(folder, name)
                (others if _kind(file) is None else files).append(file)
    beside = (*unseen, *_by_ending([file.relative_to(path) for file in others if not _ABOUT.match(file.name)]))
    if (copy := files_of_copy(path, files, source)) is not None:
        _check_files(copy.files, source)
        return replace(copy, left=(*copy.left, *beside))
    rows = [file for file in files if _kind(file) != "text" or _holds_json(file)]
    taken = set(rows)
    texts = [file for file in files if file not in taken and not _ABOUT.match(file.name)]
    if not (rows or texts):
        raise unusable(source, "a directory without data files", f"files ending in {', '.join(KINDS)}")
    left = tuple(str(file.relative_to(path)) for file in texts) if rows else ()
    return _checked(sorted(rows or texts), source, (*left, *beside))


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
    try:
        if kind not in UNPACKED_ONLY:
            _refuse_utf_16(file)
        if kind in SEPARATORS:
            kind = separated_by(file)
        if kind == "text":
            kind = source.documents if not _holds_json(file) else "json"
        if kind == "json":
            kind, field = layout_of(file, source.split)
    except DAMAGED as error:
        raise _unreadable(file, "file", error) from error
    if kind in ("lines", "line"):
        if packing_of(file):
            return [Part(index, name, kind, 0, ALL)]
        size = file.stat().st_size
        return [Part(index, name, kind, at, min(at + PART_BYTES, size)) for at in range(0, size, PART_BYTES)]
    if kind in UNPACKED_ONLY:
        try:
            count, step = (_num_groups(name), 1) if kind == "parquet" else (num_batches(name), ARROW_BATCHES)
        except Exception as error:
            raise _unreadable(file, f"{kind.capitalize()} file", error) from error
        return [Part(index, name, kind, at, min(at + step, count)) for at in range(0, count, step)]
    return [Part(index, name, kind, field=field)]


def _num_groups(name: str) -> int:
    import pyarrow.parquet as pq

    with pq.ParquetFile(name) as opened:
        return int(opened.num_row_groups)


def _unreadable(file: Path, noun: str, error: BaseException) -> UserError:
    return user_error(f"not a readable {noun} ({first_line(error)})", f"a whole {noun}", where=str(file))


def _refuse_utf_16(file: Path) -> None:
    with open_file(file) as opened:
        head = opened.read(2)
    if head in (b"\xff\xfe", b"\xfe\xff"):
        change = f"iconv -f UTF-16 -t UTF-8 {file.name} > utf8-{file.name}"
        raise user_error("text in UTF-16", "UTF-8", change, str(file))


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
