"""Rows of one part of a file, with their numbers.

A row that cannot be read comes out as a ``RowError`` in its place, and reading goes on: nothing that a file holds is
passed over in silence. Numbers are what an editor or a viewer shows: the line of a JSONL or text file, else the row
counted from 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tonnage.data.reading.csv_text import SEPARATORS, read_records
from tonnage.data.reading.json_text import MAX_ROW_BYTES, as_row, read_values, too_large, unique
from tonnage.data.reading.opening import DAMAGED, not_unpacked, open_file, packing_of
from tonnage.forms.conversation import RowError, first_line

PART_BYTES = 16 << 20
"""Of lines in a part, about."""
ALL = 1 << 62
"""The end of a part whose length nobody knows."""
MOST_UNPACKED_BYTES = 256 << 20
"""Of a row of Parquet or Arrow, in which a text that stands there many times is stored once."""
UNPACKED_ONLY = ("parquet", "arrow")
_decode_json = json.JSONDecoder(object_pairs_hook=unique).decode

Row = tuple[int, dict[str, Any] | RowError]


@dataclass(frozen=True)
class Part:
    """A piece of a file, or some small text files."""

    source: int
    """Index of the source in (train sources + validation sources)."""
    file: str
    kind: str
    """lines | array | values | holder | parquet | csv | tsv | semicolons | arrow | file | paragraph | line"""
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
        return (self.file, *self.more)

    @property
    def fills_nulls(self) -> bool:
        """Whether objects of a column have the fields of all others, null where they were not there."""
        return self.kind in UNPACKED_ONLY


def read_rows(part: Part) -> Iterator[Row]:
    """Rows of a part with their numbers; of lines, numbers count from the first line of the part."""
    match part.kind:
        case "lines":
            return _read_lines(part, _parse)
        case "array" | "values" | "holder":
            return _read_json(part)
        case "csv" | "tsv" | "semicolons":
            return read_records(Path(part.file), SEPARATORS[part.kind])
        case "parquet":
            return _read_parquet(part)
        case "arrow":
            return _read_arrow(part)
        case "file":
            return _read_files(part.files)
        case "paragraph":
            return _read_paragraphs(part)
        case "line":
            return _read_lines(part, lambda line: _text_row(line.rstrip(b"\r\n")))
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
        yield number + 1, not_unpacked(Path(part.file), error)


def _read_lines(part: Part, parse: Callable[[bytes], dict[str, Any] | RowError]) -> Iterator[Row]:
    for number, line in _lines(part):
        yield number, line if isinstance(line, RowError) else parse(line)


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


def _read_parquet(part: Part) -> Iterator[Row]:
    import pyarrow.parquet as pq

    number = before = 0
    group_bytes = group_rows = 0
    try:
        with pq.ParquetFile(part.file) as opened:
            described = [opened.metadata.row_group(group) for group in range(part.stop)]
            number = before = sum(group.num_rows for group in described[: part.start])
            group_rows = sum(group.num_rows for group in described[part.start :])
            columns = [group.column(at) for group in described[part.start :] for at in range(group.num_columns)]
            group_bytes = sum(column.total_compressed_size for column in columns)
            for batch in opened.iter_batches(batch_size=1024, row_groups=list(range(part.start, part.stop))):
                for row in _from_arrow(batch):
                    number += 1
                    yield number, row
    except Exception as error:
        left = group_bytes * (group_rows + before - number) // max(group_rows, 1)
        damage = RowError("unreadable", f"the row group cannot be read from here on ({first_line(error)})")
        yield number + 1, damage.leaving(min(left, Path(part.file).stat().st_size))


def _read_arrow(part: Part) -> Iterator[Row]:
    number, at = 0, -1
    try:
        for at, batch in enumerate(islice(arrow_batches(part.file), part.stop)):
            if at < part.start:
                number += batch.num_rows
                continue
            for row in _from_arrow(batch):
                number += 1
                yield number, row
    except Exception as error:
        damage = RowError("unreadable", f"the record batch cannot be read from here on ({first_line(error)})")
        try:
            whole = num_batches(part.file)
        except Exception:  # nobody can count them
            whole = part.stop
        share = (part.stop - max(at, part.start)) / whole
        yield number + 1, damage.leaving(round(Path(part.file).stat().st_size * share))


def num_batches(file: str) -> int:
    return sum(1 for _ in arrow_batches(file))


def arrow_batches(file: str) -> Iterator[Any]:
    """Record batches of an Arrow file in either form (the random-access one, or the stream ``datasets`` writes)."""
    import pyarrow as pa

    with pa.memory_map(file) as mapped:
        try:
            opened = pa.ipc.open_file(mapped)
            for at in range(opened.num_record_batches):
                yield opened.get_batch(at)
        except pa.ArrowInvalid:
            mapped.seek(0)
            yield from pa.ipc.open_stream(mapped)


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
    """About how large the values are when none is stored once for many places."""
    import pyarrow as pa

    size, waiting = 0, list(batch.columns)
    while waiting:
        column = waiting.pop()
        if pa.types.is_dictionary(column.type):
            size += len(column) * (column.dictionary.nbytes // max(1, len(column.dictionary)))
        elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            waiting.append(column.flatten())
        elif pa.types.is_struct(column.type):
            waiting += column.flatten()
        else:
            size += column.nbytes
    return size
