"""Where rows come from: files, globs, directories and hub ids, read a part at a time in bounded memory.

``resolve`` turns a ``Source`` into ``Part``s: pieces of files that can be read independently of one another, at
borders that depend on the file alone (16 MiB of a JSONL file, one row group of a Parquet file, one whole JSON or CSV
file), so that it does not matter how many processes share them. ``read_rows`` yields the rows of one part. A row that
cannot be read comes out as a ``RowError`` in its place, and reading goes on: nothing that a file holds is
passed over in silence.

Row numbers are what an editor or a viewer shows: the line of a JSONL file, else the row counted from 1.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.data.conversation import RowError
from tonnage.data.options import Source
from tonnage.errors import Problem, UserError

PART_BYTES = 16 << 20
MAX_ROW_BYTES = 16 << 20
"""A row of more than 16 MiB is refused: no context holds it, and reading it would cost a gigabyte."""

HUB_SECONDS = 10.0

_SUFFIXES = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".arrow": "arrow",
    ".txt": "txt",
}

Row = tuple[int, dict[str, Any] | RowError]


@dataclass(frozen=True)
class Part:
    """A piece of a file."""

    source: int
    """Index of the source in (train sources + validation sources)."""
    file: str
    kind: str
    """json | jsonl | parquet | csv | tsv | arrow"""
    start: int = 0
    """jsonl: first byte; parquet: row group; arrow: record batch."""
    stop: int = 0
    """jsonl: byte at which the last line starts at the latest; else one past ``start``."""


def resolve(source: Source, index: int) -> list[Part]:
    """Parts of a source, in order. Raises ``UserError`` when it is missing, empty or of an unknown kind."""
    files = _files(source)
    parts: list[Part] = []
    for file in files:
        if file.stat().st_size == 0:
            raise UserError(
                Problem(found=f"{file} is empty (0 bytes)", needed="at least one row", where=f"data: {source.path}")
            )
        parts += _parts(file, index)
    return parts


def _files(source: Source) -> list[Path]:
    path = Path(source.path).expanduser()
    where = f"data: {source.path}"
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.is_file()
            and file.suffix.lower() in _SUFFIXES
            and not file.name.startswith((".", "_"))
            and file.name not in ("dataset_info.json", "state.json", "dataset_dict.json")
        )
        if not files:
            known = ", ".join(_SUFFIXES)
            raise UserError(
                Problem(found="a directory without data files", needed=f"files ending in {known}", where=where)
            )
        return files
    if path.is_file():
        if path.suffix.lower() not in _SUFFIXES:
            raise UserError(
                Problem(
                    found=f"a file ending in {path.suffix or 'nothing'!r}",
                    needed=f"one of {', '.join(_SUFFIXES)}",
                    change="rename or convert the file",
                    where=where,
                )
            )
        return [path]
    if glob.has_magic(source.path):
        files = sorted(file for file in _expand(path) if file.is_file())
        if not files:
            raise UserError(Problem(found="no file fits this pattern", needed="at least one file", where=where))
        unknown = [str(file) for file in files if file.suffix.lower() not in _SUFFIXES]
        if unknown:
            raise UserError(
                Problem(
                    found=f"files of an unknown kind: {', '.join(unknown[:5])}",
                    needed=", ".join(_SUFFIXES),
                    where=where,
                )
            )
        return files
    if _looks_like_hub_id(source.path):
        return _hub_files(source)
    raise UserError(
        Problem(found="no such file or directory", needed="a file, a directory, a glob or a hub id", where=where)
    )


def _expand(pattern: Path) -> Iterator[Path]:
    anchor = Path(pattern.anchor)
    return anchor.glob(str(pattern.relative_to(anchor)))


def _looks_like_hub_id(path: str) -> bool:
    words = path.split("/")
    return (
        len(words) <= 2
        and all(words)
        and not path.startswith((".", "~"))
        and Path(path).suffix.lower() not in (*_SUFFIXES, ".yaml", ".gz", ".zip")
    )


def _hub_files(source: Source) -> list[Path]:
    """Arrow files that ``datasets`` keeps for one split of a hub data set."""
    where = f"data: {source.path}"
    try:
        import datasets

        with _no_waiting_for_the_hub(source.path):
            dataset = datasets.load_dataset(source.path, split=source.split)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            Problem(
                found=f"no such file here, and as a hub id it does not load ({reason})",
                needed=f"a file, or a hub data set with a split {source.split!r}",
                change="check the path; without a connection, only what was loaded before can be used",
                where=where,
            )
        ) from error
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    if not files:
        raise UserError(Problem(found="the hub data set has no files", needed="at least one row", where=where))
    return files


@contextmanager
def _no_waiting_for_the_hub(name: str) -> Iterator[None]:
    """Ask the hub once, for ``HUB_SECONDS`` at most, and use what is here if it does not answer.

    ``datasets`` by itself tries six times, which takes half a minute without a network and minutes behind a firewall
    that drops packets.
    """
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    before = datasets.config.HF_HUB_OFFLINE
    try:
        HfApi(endpoint=datasets.config.HF_ENDPOINT).dataset_info(name, timeout=HUB_SECONDS)
    except (HfHubHTTPError, ValueError):
        pass  # it has answered, or no hub has such a name: ``datasets`` says why it will not give the data set
    except Exception:
        datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _parts(file: Path, index: int) -> list[Part]:
    kind = _SUFFIXES[file.suffix.lower()]
    if kind in ("json", "jsonl", "txt"):
        kind = _sniff_json(file, kind)
    name = str(file)
    if kind == "jsonl":
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
    return [Part(index, name, kind)]


def _unreadable(file: Path, kind: str, error: BaseException) -> UserError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(
        Problem(found=f"not a readable {kind} file ({reason})", needed=f"a whole {kind} file", where=str(file))
    )


def _sniff_json(file: Path, kind: str) -> str:
    with file.open("rb") as opened:
        head = opened.read(1 << 16)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if kind == "txt":
        if start == b"{":
            return "jsonl"
        raise UserError(
            Problem(
                found="a text file that does not hold JSON lines",
                needed="rows: one JSON object per line",
                change='write each document as {"text": "..."} on a line of its own, in a .jsonl file',
                where=str(file),
            )
        )
    if kind == "json" and start == b"{":
        line = head.removeprefix(b"\xef\xbb\xbf").lstrip().split(b"\n", 1)[0]
        try:
            json.loads(line)
        except ValueError:
            if len(line) < 1 << 15 and b"\n" in head:
                return "json"
        except RecursionError:
            pass
        return "jsonl"
    if kind == "jsonl" and start == b"[":
        return "json"
    return kind


def digest(file: str) -> str:
    """Digest of a file's bytes."""
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()[:32]


def read_rows(part: Part) -> Iterator[Row]:
    """Rows of a part with their numbers; for JSONL, numbers count from the first line of the part."""
    match part.kind:
        case "jsonl":
            return _read_lines(part)
        case "json":
            return _read_array(part)
        case "csv":
            return _read_csv(part, ",")
        case "tsv":
            return _read_csv(part, "\t")
        case "parquet":
            return _read_parquet(part)
        case "arrow":
            return _read_arrow(part)
    raise ValueError(f"unknown kind {part.kind!r}")


def first_rows(part: Part) -> Iterator[Row]:
    """The same rows, for a look at the first few: reads no more of a JSON array than it has to."""
    return _scan_array(part.file) if part.kind == "json" else read_rows(part)


def lines_of(part: Part) -> int:
    """Lines of a JSONL part, blank ones too."""
    count, at = int(part.start == 0), max(part.start, 1) - 1
    with Path(part.file).open("rb") as opened:
        opened.seek(at)
        while at < part.stop - 1 and (block := opened.read(min(part.stop - 1 - at, 1 << 20))):
            count, at = count + block.count(b"\n"), at + len(block)
    return count


def _too_large(size: int, more: str = "") -> RowError:
    return RowError("too_large", f"the row has {size:,}{more} bytes; at most {MAX_ROW_BYTES:,} are read")


def _read_lines(part: Part) -> Iterator[Row]:
    with Path(part.file).open("rb") as opened:
        if part.start:
            opened.seek(part.start - 1)
            while (rest := opened.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
        number, at = 0, opened.tell()
        while at < part.stop:
            line = opened.readline(MAX_ROW_BYTES + 1)
            at += len(line)
            number += 1
            if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                size = len(line)
                while (rest := opened.readline(1 << 20)) and not rest.endswith(b"\n"):
                    size += len(rest)
                at += size + len(rest) - len(line)
                yield number, _too_large(size + len(rest))
                continue
            if part.start == 0 and number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line or line.isspace():
                continue
            yield number, _parse(line)


def _parse(line: bytes) -> dict[str, Any] | RowError:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowError("invalid_utf8", f"byte {error.start} of the row is not UTF-8 (0x{line[error.start]:02x})")
    except RecursionError:
        return RowError("invalid_json", "nested too deeply to be read")
    except ValueError as error:
        cut = "" if line.endswith(b"\n") else ": the last line is cut off"
        return RowError("truncated" if cut else "invalid_json", f"not JSON{cut} ({error})")
    return _as_row(value)


def _as_row(value: object) -> dict[str, Any] | RowError:
    if isinstance(value, dict):
        return value
    return RowError("wrong_type", f"the row is {type(value).__name__}, not an object with fields")


def _read_array(part: Part) -> Iterator[Row]:
    """Elements of a JSON array, whole if it is small and whole, else one after another from a sliding window."""
    if Path(part.file).stat().st_size <= 4 * PART_BYTES:
        try:
            values = json.loads(Path(part.file).read_bytes().decode("utf-8-sig"))
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, list):
            for number, value in enumerate(values, 1):
                yield number, _as_row(value)
            return
    yield from _scan_array(part.file)


def _scan_array(file: str) -> Iterator[Row]:
    decode = json.JSONDecoder().raw_decode
    number, window, at, ended = 0, "", 0, False
    with Path(file).open(encoding="utf-8-sig", errors="surrogateescape") as opened:

        def more() -> bool:
            nonlocal window, at, ended
            block = "" if ended else opened.read(max(1 << 20, len(window) - at))
            ended = not block
            window, at = window[at:] + block, 0
            return not ended

        def next_character() -> str:
            nonlocal at
            while True:
                while at < len(window) and window[at] in " \t\r\n":
                    at += 1
                if at < len(window) or not more():
                    return window[at : at + 1]

        if next_character() != "[":
            reason = "the file holds one JSON value, not rows: needed [{...}, ...] or one object per line"
            yield 1, RowError("invalid_json", reason)
            return
        at += 1
        while True:
            character = next_character()
            if character == "]":
                at += 1
                if rest := next_character():
                    yield number + 1, RowError("invalid_json", f"more text after the end of the array ({rest!r})")
                return
            if number and character == ",":
                at += 1
                character = next_character()
            elif number and character:
                yield (
                    number + 1,
                    RowError("invalid_json", f"found {character!r} instead of a comma; nothing after it is read"),
                )
                return
            number += 1
            if not character:
                yield number, RowError("truncated", "the file ends before the array does")
                return
            while True:
                try:
                    value, end = decode(window, at)
                    if end == len(window) and more():
                        continue
                    at = end
                    break
                except RecursionError:
                    yield number, RowError("invalid_json", "nested too deeply; nothing after it is read")
                    return
                except ValueError as error:
                    if len(window) - at > MAX_ROW_BYTES:
                        yield number, _too_large(len(window) - at, " or more")
                        return
                    if more():
                        continue
                    reason = getattr(error, "msg", str(error))
                    kind = "truncated" if character in '{["' and ended else "invalid_json"
                    yield number, RowError(kind, f"not JSON ({reason}); nothing after it is read")
                    return
            yield number, _as_row(value)


def _read_csv(part: Part, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(MAX_ROW_BYTES)
    with Path(part.file).open(encoding="utf-8-sig", errors="surrogateescape", newline="") as opened:
        reader = csv.reader(opened, delimiter=delimiter)
        try:
            header = next(reader, None)
        except csv.Error as error:
            yield 1, RowError("invalid_csv", f"the header cannot be read ({error})")
            return
        if not header:
            yield 1, RowError("invalid_csv", "no header")
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
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for at in range(batch.num_rows):
            try:
                yield batch.slice(at, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield RowError("invalid_utf8", f"a string that is not UTF-8 ({error.reason})")
