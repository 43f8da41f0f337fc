"""Where rows come from: files, globs, directories and hub ids, read a part at a time in bounded memory.

``resolve`` turns a ``Source`` into ``Part``s: pieces of files that can be read independently of one another, at
borders that depend on the file alone (16 MiB of a JSONL file, one row group of a Parquet file, one whole file of any
other kind), so that it does not matter how many processes share them. ``read_rows`` yields the rows of one part. A row
that cannot be read comes out as a ``RowError`` in its place, and reading goes on: nothing that a file holds is
passed over in silence.

Row numbers are what an editor or a viewer shows: the line of a JSONL or text file, else the row counted from 1.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tonnage.data.conversation import RowError
from tonnage.data.hub import Found, files_of_copy, hub_files, is_hub_id
from tonnage.data.json_text import MAX_ROW_BYTES, as_row, layout_of, read_values, too_large, unique
from tonnage.data.opening import DAMAGED, PACKED, kind_suffix, open_file, packing_of
from tonnage.data.options import Source
from tonnage.errors import Problem, UserError

PART_BYTES = 16 << 20
ALL = 1 << 62
"""Where a part ends of which nobody knows how long it is."""
MOST_FILES = 100_000
"""Below a directory, of any kind; more are not looked through."""
TEXTS_OF_PART = 256
"""Small text files that make one part."""

MOST_UNPACKED_BYTES = 256 << 20
"""Of a row of Parquet or Arrow, in which a text that stands there many times is stored once."""

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
_UNPACKED_ONLY = ("parquet", "arrow")
_ABOUT = re.compile(r"(readme|licen[cs]e|changelog|notice)\b", re.IGNORECASE)
"""Names of texts that come with data and are none."""
_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")

Row = tuple[int, dict[str, Any] | RowError]


@dataclass(frozen=True)
class Part:
    """A piece of a file, or some small text files."""

    source: int
    """Index of the source in (train sources + validation sources)."""
    file: str
    kind: str
    """lines | array | values | holder | parquet | csv | tsv | arrow | file | paragraph | line"""
    start: int = 0
    """lines, line: first byte; parquet: row group; arrow: record batch."""
    stop: int = 0
    """lines, line: byte at which the last line starts at the latest; else one past ``start``."""
    field: str = ""
    """holder: the field that holds the rows."""
    more: tuple[str, ...] = ()
    """file: the files after the first one, each a row."""

    @property
    def files(self) -> tuple[str, ...]:
        """All files of it."""
        return (self.file, *self.more)

    @property
    def fills_nulls(self) -> bool:
        """Whether objects of a column have the fields of all others, null where they were not there."""
        return self.kind in _UNPACKED_ONLY


def part_of(value: Mapping[str, Any]) -> Part:
    """A part back from plain values."""
    return Part(**{**value, "more": tuple(value["more"])})


@dataclass(frozen=True)
class Resolved:
    """What a source comes to."""

    parts: list[Part]
    commit: str = ""
    """Of a hub data set, what its revision is now."""
    left: tuple[str, ...] = ()
    """Files beside that are not read: of other splits, texts among files of rows, and those of other kinds."""


def resolve(source: Source, index: int) -> Resolved:
    """Parts of a source, in order. Raises ``UserError`` when it is missing, empty or of an unknown kind."""
    found = _files(source)
    for file in found.files:
        if file.stat().st_size == 0:
            raise UserError(
                Problem(found=f"{file} is empty (0 bytes)", needed="at least one row", where=f"data: {source.path}")
            )
    texts = [file for file in found.files if _kind(file) == "text" and not _holds_json(file)]
    if source.documents != "file" and not any(_kind(file) == "text" for file in found.files):
        raise UserError(
            Problem(
                found=f"documents: {source.documents}, and no file of plain text",
                needed="files ending in .txt or .md",
                change="leave documents out",
                where=f"data: {source.path}",
            )
        )
    if source.documents == "file" and len(texts) == len(found.files) > 1:
        groups = [list(map(str, texts[at : at + TEXTS_OF_PART])) for at in range(0, len(texts), TEXTS_OF_PART)]
        return Resolved([Part(index, one[0], "file", more=tuple(one[1:])) for one in groups], found.commit, found.left)
    parts = [part for file in found.files for part in _parts(file, index, source)]
    return Resolved(parts, found.commit, found.left)


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
        return _below(path, source)
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
        files = sorted(file for file in _expand(path) if not file.is_dir())
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
        what = "a link that leads nowhere" if path.is_symlink() and not path.exists() else "no regular file"
        raise UserError(Problem(found=f"{path} is {what}", needed="a file with rows in it", where=where))
    if _kind(path) is None:
        ending = f"{kind_suffix(path)}{packing_of(path)}" or path.suffix
        raise UserError(
            Problem(
                found=f"a file ending in {ending or 'nothing'!r}",
                needed=f"one of {', '.join(KINDS)} (all but .parquet and .arrow also with {', '.join(PACKED)})",
                change="rename or convert the file",
                where=where,
            )
        )


def _no_split(files: list[Path], source: Source) -> list[Path]:
    """The files, if what the source says of splits means anything for them."""
    said = {"name": source.name, "revision": source.revision}
    if source.split != "train" and not all(_kind(file) == "json" for file in files):
        said["split"] = source.split
    if given := [name for name, value in said.items() if value is not None]:
        raise UserError(
            Problem(
                found=f"{' and '.join(given)} for a file, which has none",
                needed="a hub data set, or a directory that is a copy of one",
                change=f"leave {' and '.join(given)} out, or name the directory",
                where=f"data: {source.path}",
            )
        )
    return files


def _below(path: Path, source: Source) -> Found:
    """The data files below a directory: of one split, where it has splits."""
    where = f"data: {source.path}"
    files: list[Path] = []
    others: list[Path] = []
    links: list[str] = []
    seen = 0
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        seen += len(folders) + len(names)
        if seen > MOST_FILES:
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
    found = sorted(rows or texts)
    if not found:
        raise UserError(
            Problem(found="a directory without data files", needed=f"files ending in {', '.join(KINDS)}", where=where)
        )
    for file in found:
        _check_file(file, where)
    left = tuple(str(file.relative_to(path)) for file in texts) if rows else ()
    return Found(_no_split(found, source), left=(*left, *beside))


def _by_ending(files: Sequence[Path]) -> Iterator[str]:
    """Names of files of kinds that are not read; only how many there are of an ending that several have."""
    alike: dict[str, list[Path]] = {}
    for file in files:
        alike.setdefault(file.suffix, []).append(file)
    for ending, some in alike.items():
        yield str(some[0]) if len(some) == 1 else f"{len(some):,} files ending in {ending or 'nothing'}"


def _kind(file: Path) -> str | None:
    """What a file holds by its name, ``None`` if nothing that is read."""
    kind = KINDS.get(kind_suffix(file))
    return None if kind in _UNPACKED_ONLY and packing_of(file) else kind


def _expand(pattern: Path) -> Iterator[Path]:
    anchor = Path(pattern.anchor)
    return anchor.glob(str(pattern.relative_to(anchor)))


def _parts(file: Path, index: int, source: Source) -> list[Part]:
    kind, name, field = str(_kind(file)), str(file), ""
    if kind in ("json", "text", "csv", "tsv"):
        _refuse_utf_16(file)
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
            batches = sum(1 for _ in _arrow_batches(name, 0, -1))
        except Exception as error:
            raise _unreadable(file, "Arrow", error) from error
        return [Part(index, name, kind, at, min(at + 16, batches)) for at in range(0, batches, 16)]
    return [Part(index, name, kind, field=field)]


def _unreadable(file: Path, kind: str, error: BaseException) -> UserError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    what = f"{kind} file" if kind else "file"
    return UserError(Problem(found=f"not a readable {what} ({reason})", needed=f"a whole {what}", where=str(file)))


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


def read_rows(part: Part) -> Iterator[Row]:
    """Rows of a part with their numbers; of lines, numbers count from the first line of the part."""
    match part.kind:
        case "lines":
            return _read_lines(part)
        case "array" | "values" | "holder":
            return _read_json(part)
        case "csv":
            return _read_csv(part, ",")
        case "tsv":
            return _read_csv(part, "\t")
        case "parquet":
            return _read_parquet(part)
        case "arrow":
            return _read_arrow(part)
        case "file":
            return _read_files(part.files)
        case "paragraph":
            return _read_paragraphs(part)
        case "line":
            return _read_text_lines(part)
    raise ValueError(f"unknown kind {part.kind!r}")


def first_rows(part: Part) -> Iterator[Row]:
    """The same rows, for a look at the first few: reads no more of an array than it has to."""
    return read_values(Path(part.file), part.kind, part.field) if part.kind == "array" else read_rows(part)


def lines_of(part: Part) -> int:
    """Lines of a part that is lines, blank ones too; 0 of a packed file, which is one part."""
    if part.stop == ALL:
        return 0
    count, at = int(part.start == 0), max(part.start, 1) - 1
    with Path(part.file).open("rb") as opened:
        opened.seek(at)
        while at < part.stop - 1 and (block := opened.read(min(part.stop - 1 - at, 1 << 20))):
            count, at = count + block.count(b"\n"), at + len(block)
    return count


def _lines(part: Part) -> Iterator[tuple[int, bytes | RowError]]:
    """Lines of a part, those that are blank left out; what is too long to be read comes as a ``RowError``."""
    number, at = 0, 0
    try:
        with open_file(Path(part.file)) as opened:
            if part.start:
                opened.seek(part.start - 1)
                while (rest := opened.readline(1 << 20)) and not rest.endswith(b"\n"):
                    pass
                at = opened.tell()
            while at < part.stop and (line := opened.readline(MAX_ROW_BYTES + 1)):
                at += len(line)
                number += 1
                if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                    size = len(line)
                    while (rest := opened.readline(1 << 20)) and not rest.endswith(b"\n"):
                        size += len(rest)
                    at += size + len(rest) - len(line)
                    yield number, too_large(size + len(rest))
                    continue
                if part.start == 0 and number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line and not line.isspace():
                    yield number, line
    except DAMAGED as error:
        if not packing_of(Path(part.file)):
            raise
        yield number + 1, RowError("truncated", f"the file cannot be unpacked from here on ({error})")


def _read_lines(part: Part) -> Iterator[Row]:
    for number, line in _lines(part):
        yield number, line if isinstance(line, RowError) else _parse(line)


_decode_json = json.JSONDecoder(object_pairs_hook=unique).decode


def _parse(line: bytes) -> dict[str, Any] | RowError:
    try:
        return as_row(_decode_json(line.decode("utf-8")))
    except RowError as error:
        return error
    except UnicodeDecodeError as error:
        return RowError("invalid_utf8", f"byte {error.start} of the row is not UTF-8 (0x{line[error.start]:02x})")
    except RecursionError:
        return RowError("invalid_json", "nested too deeply to be read")
    except ValueError as error:
        cut = "" if line.endswith(b"\n") else ": the last line is cut off"
        return RowError("truncated" if cut else "invalid_json", f"not JSON{cut} ({error})")


def _read_json(part: Part) -> Iterator[Row]:
    """Rows of a layout that is not lines: of an array whole if it is small and whole, else through a window."""
    path = Path(part.file)
    if part.kind == "array" and not packing_of(path) and path.stat().st_size <= 4 * PART_BYTES:
        try:
            values = _decode_json(path.read_bytes().decode("utf-8-sig"))
        except (ValueError, RecursionError, RowError):
            values = None
        if isinstance(values, list):
            for number, value in enumerate(values, 1):
                yield number, as_row(value)
            return
    yield from read_values(path, part.kind, part.field)


def _text_row(content: bytes) -> dict[str, Any] | RowError:
    try:
        return {"text": content.decode("utf-8")}
    except UnicodeDecodeError as error:
        return RowError("invalid_utf8", f"byte {error.start} of the text is not UTF-8 (0x{content[error.start]:02x})")


def _read_files(files: Sequence[str]) -> Iterator[Row]:
    for number, file in enumerate(files, 1):
        try:
            with open_file(Path(file)) as opened:
                content = opened.read(MAX_ROW_BYTES + 1)
        except DAMAGED as error:
            yield number, RowError("unreadable", f"the file cannot be read ({error})")
            continue
        whole = len(content) <= MAX_ROW_BYTES
        yield number, _text_row(content.removeprefix(b"\xef\xbb\xbf")) if whole else too_large(len(content), " or more")


def _read_text_lines(part: Part) -> Iterator[Row]:
    for number, line in _lines(part):
        yield number, line if isinstance(line, RowError) else _text_row(line.rstrip(b"\r\n"))


def _read_paragraphs(part: Part) -> Iterator[Row]:
    """Lines between blank ones, each paragraph under the number of its first line."""
    first, last, size = 0, 0, 0
    held: list[bytes] = []
    broken = False

    def whole() -> Row:
        return first, _text_row(b"".join(held).rstrip(b"\r\n")) if size <= MAX_ROW_BYTES else too_large(size)

    for number, line in _lines(Part(part.source, part.file, "lines", 0, ALL)):
        if number != last + 1:
            if held:
                yield whole()
            held, size, broken = [], 0, False
        last = number
        if isinstance(line, RowError):
            yield number, line
            held, broken = [], True
        elif not broken:
            first = first if held else number
            size += len(line)
            held.append(line if size <= MAX_ROW_BYTES else b"")
    if held:
        yield whole()


def _read_csv(part: Part, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(MAX_ROW_BYTES)
    with (
        open_file(Path(part.file)) as packed,
        io.TextIOWrapper(packed, encoding="utf-8-sig", errors="surrogateescape", newline="") as opened,
    ):
        reader = csv.reader(opened, delimiter=delimiter)
        try:
            header = next(reader, None)
        except (csv.Error, *DAMAGED) as error:
            yield 1, RowError("invalid_csv", f"the header cannot be read ({error})")
            return
        if not header:
            yield 1, RowError("invalid_csv", "no header")
            return
        if twice := [name for name, count in Counter(header).items() if name and count > 1]:
            yield 1, RowError("invalid_csv", f"the header names a column {twice[0][:60]!r} twice")
            return
        number = 0
        while True:
            number += 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield number, RowError("invalid_csv", str(error))
                continue
            except DAMAGED as error:
                yield number, RowError("truncated", f"the file cannot be unpacked from here on ({error})")
                return
            if not fields:
                number -= 1
                continue
            if len(fields) != len(header):
                reason = f"{len(fields)} fields where the header has {len(header)}"
                yield number, RowError("invalid_csv", reason)
                continue
            yield number, dict(zip(header, fields, strict=True))


def _read_parquet(part: Part) -> Iterator[Row]:
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(part.file) as opened:
            for group in range(part.start):
                number += opened.metadata.row_group(group).num_rows
            for batch in opened.iter_batches(batch_size=1024, row_groups=list(range(part.start, part.stop))):
                for row in _from_arrow(batch):
                    number += 1
                    yield number, row
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield number + 1, RowError("unreadable", f"the row group cannot be read from here on ({reason})")


def _read_arrow(part: Part) -> Iterator[Row]:
    number = 0
    try:
        for at, batch in enumerate(_arrow_batches(part.file, 0, part.stop)):
            if at < part.start:
                number += batch.num_rows
                continue
            for row in _from_arrow(batch):
                number += 1
                yield number, row
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield number + 1, RowError("unreadable", f"the record batch cannot be read from here on ({reason})")


def _arrow_batches(file: str, start: int, stop: int) -> Iterator[Any]:
    """Record batches of an Arrow file in either form (the random-access one, or the stream ``datasets`` writes)."""
    import pyarrow as pa

    with pa.memory_map(file) as mapped:
        try:
            opened = pa.ipc.open_file(mapped)
            for at in range(start, opened.num_record_batches if stop < 0 else stop):
                yield opened.get_batch(at)
        except pa.ArrowInvalid:
            mapped.seek(0)
            for at, batch in enumerate(pa.ipc.open_stream(mapped)):
                if stop >= 0 and at >= stop:
                    break
                if at >= start:
                    yield batch


def _from_arrow(batch: Any) -> Iterator[dict[str, Any] | RowError]:
    for column in batch.columns:
        try:
            column.validate(full=True)  # offsets that point outside of the file would crash the process
        except ValueError as error:
            if "utf8" not in str(error).lower() or column.type.num_fields:
                raise
    if _unpacked_bytes(batch) > MOST_UNPACKED_BYTES:
        for at in range(batch.num_rows):
            row = batch.slice(at, 1)
            if (size := _unpacked_bytes(row)) > MOST_UNPACKED_BYTES:
                yield too_large(size, most=MOST_UNPACKED_BYTES)
            else:
                yield from _from_arrow(row)
        return
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for at in range(batch.num_rows):
            try:
                yield batch.slice(at, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield RowError("invalid_utf8", f"a string that is not UTF-8 ({error.reason})")


def _unpacked_bytes(batch: Any) -> int:
    """About how large the values are when each stands for itself."""
    import pyarrow as pa

    size, waiting = 0, list(batch.columns)
    while waiting:
        one = waiting.pop()
        if pa.types.is_dictionary(one.type):
            size += len(one) * (one.dictionary.nbytes // max(1, len(one.dictionary)))
        elif pa.types.is_list(one.type) or pa.types.is_large_list(one.type):
            waiting.append(one.flatten())
        elif pa.types.is_struct(one.type):
            waiting += one.flatten()
        else:
            size += one.nbytes
    return size
