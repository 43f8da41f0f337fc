"""Tokenised documents in Arrow files: one file per part of a source, written once, memory-mapped ever after.

A row of a file is one document: the number of the row it came from, its tokens, the spans of them that are trained on
with their weights, how many tokens that is, a 64-bit key of its content, the numbers that go with it, if the options
carry any, and where it parts, if it is a pair of answers. Documents know nothing of lengths, packs or validation, so
that a change of those needs no tokenising.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from tonnage.data.images.table import ImageTable, Stamp, stamps_now
from tonnage.data.text.masks import Span
from tonnage.data.tokens.encoder import Document, Fork, content_key

BATCH_TOKENS = 1 << 20
IMAGES = ".images"
"""Ending of the table of a part's images."""


@dataclass(frozen=True)
class BadRow:
    """A row that could not be used. ``row`` counts within its part until the store puts parts together."""

    row: int
    kind: str
    reason: str
    change: str = ""
    """What can be done about it, where that is known."""
    unread: int = 0
    """Bytes of the file that are not read because of it."""


@dataclass
class PartTotals:
    rows: int = 0
    """Conversations of a row that holds several count as rows."""
    lines: int = 0
    """Lines of the part, from which the numbers of the rows after it follow."""
    bad: int = 0
    documents: int = 0
    closing: set[int] = field(default_factory=set)
    """Ids of the tokens that closed turns."""
    unread: dict[str, int] = field(default_factory=dict)
    """Fields that nobody reads -> how often they were there."""
    values: dict[str, dict[str, int]] = field(default_factory=dict)
    """Fields that nobody reads -> those of their values that may be verdicts -> rows (``verdicts.Values``)."""
    columns: dict[str, int] = field(default_factory=dict)
    """Columns that the source names -> rows that have them."""
    moved: int = 0
    """Turns whose first token begins before them, in the template's header."""
    trimmed: int = 0
    """Conversations that held a token which the template puts there too."""
    thoughts: int = 0
    """Conversations of which the template leaves thoughts out, before the last question."""
    with_controls: int = 0
    """Conversations that hold control tokens in their own words, and became documents."""
    controls: dict[str, int] = field(default_factory=dict)
    """Those tokens -> conversations that hold them."""
    ties: int = 0
    """Pairs of which both answers have the same score."""
    desirable: int = 0
    """Documents of answers with a label whose answer is a good one."""
    undesirable: int = 0
    with_images: int = 0
    """Documents with images."""
    images: int = 0
    """Those of all documents."""
    image_tokens: int = 0
    """Tokens in whose places features of these go."""
    control_rows: list[int] = field(default_factory=list)
    """The first rows of these."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "closing": sorted(self.closing)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> PartTotals:
        return PartTotals(**{**value, "closing": set(value["closing"])})


class DocumentWriter:
    """Writes documents to an Arrow file, a batch of about a million tokens at a time."""

    def __init__(self, path: Path, *, carries: bool = False, pairs: bool = False, images: bool = False) -> None:
        """``carries``: whether numbers go with each document. ``pairs``: whether each is a pair of answers. ``images``:
        whether any may have these."""
        import pyarrow as pa

        self._pa = pa
        self._schema = pa.schema(
            [
                ("row", pa.int64()),
                ("tokens", pa.list_(pa.int32())),
                ("spans", pa.list_(pa.int32())),
                ("weights", pa.list_(pa.float32())),
                ("supervised", pa.int32()),
                ("content", pa.uint64()),
                *([("carried", pa.list_(pa.float64()))] if carries else []),
                *([("shared", pa.int32()), ("second", pa.int32())] if pairs else []),
                *([("images", pa.list_(pa.int32())), ("image_tokens", pa.int32())] if images else []),
            ]
        )
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        self._rows: list[int] = []
        self._waiting: list[Document] = []
        self._num_tokens = self.documents = 0

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None and self._waiting:
            self._flush()
        self._writer.close()
        self._sink.close()

    def add(self, row: int, document: Document) -> None:
        self._rows.append(row)
        self._waiting.append(document)
        self._num_tokens += len(document.tokens)
        self.documents += 1
        if self._num_tokens >= BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        pa, documents = self._pa, self._waiting
        tokens = [document.tokens for document in documents]
        offsets = np.zeros(len(tokens) + 1, dtype=np.int32)
        np.cumsum([len(ids) for ids in tokens], out=offsets[1:])
        columns = {
            "row": self._rows,
            "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(tokens))),
            "spans": [[border for span in document.spans for border in span[:2]] for document in documents],
            "weights": [[weight for _, _, weight in document.spans] for document in documents],
            "supervised": [document.supervised for document in documents],
            "content": [_content(document) for document in documents],
            "carried": [list(document.carried) for document in documents],
            "shared": [document.fork.shared for document in documents],
            "second": [document.fork.second for document in documents],
            "images": [list(document.images) for document in documents],
            "image_tokens": [document.image_tokens for document in documents],
        }
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows, self._waiting, self._num_tokens = [], [], 0


def _content(document: Document) -> int:
    """A key of what a row holds itself: not of its mate's answer."""
    tokens, spans = document.tokens, document.spans
    if document.has_mate:
        second = document.fork.second
        tokens, spans = tokens[:second], [span for span in spans if span[0] < second]
    return content_key(tokens, spans, document.carried, document.image_digests)


@dataclass(frozen=True)
class StoredPart:
    """One Arrow file of the store, as ``documents.json`` lists it."""

    source: int
    files: tuple[str, ...]
    """One, or one for each row."""
    row_base: int
    """Added to a document's row to get its number in the file."""
    totals: PartTotals

    @property
    def documents(self) -> int:
        return self.totals.documents

    def where(self, row: int) -> tuple[str, int]:
        """File and row of a row that counts within the part."""
        return (self.files[0], row + self.row_base) if len(self.files) == 1 else (self.files[row - 1], 1)


class Documents:
    """The documents of all sources, memory-mapped. Opening reads headers only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        described = json.loads((path / "documents.json").read_text(encoding="utf-8"))
        self.parts = TypeAdapter(list[StoredPart]).validate_python(described["parts"])
        self.carry = tuple(described.get("carry", ()))
        """Names of the numbers that go with each document."""
        self.closing = tuple(sorted(set().union(*(part.totals.closing for part in self.parts))))
        self._first = np.cumsum([0] + [part.documents for part in self.parts])
        self._open: dict[int, tuple[np.ndarray, list[_Batch]]] = {}
        self._tables: dict[int, ImageTable] = {}
        self._columns: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self._first[-1])

    def _part(self, part: int) -> tuple[np.ndarray, list[_Batch]]:
        if part not in self._open:
            import pyarrow as pa

            mapped = pa.memory_map(str(self.path / part_file(part)))
            opened = pa.ipc.open_file(mapped)
            batches = [_Batch(opened.get_batch(at)) for at in range(opened.num_record_batches)]
            self._open[part] = (np.cumsum([0] + [len(batch) for batch in batches]), batches)
        return self._open[part]

    def _part_number(self, document: int) -> int:
        return int(np.searchsorted(self._first, document, side="right")) - 1

    def part_of(self, document: int) -> StoredPart:
        return self.parts[self._part_number(document)]

    def _find(self, document: int) -> tuple[_Batch, int]:
        part = self._part_number(document)
        first, batches = self._part(part)
        within = document - int(self._first[part])
        batch = int(np.searchsorted(first, within, side="right")) - 1
        return batches[batch], within - int(first[batch])

    def tokens(self, document: int) -> np.ndarray:
        """Tokens of a document: int32 (num_tokens,), a view of the map."""
        batch, at = self._find(document)
        return batch.lists("tokens")[at]

    def spans(self, document: int) -> list[Span]:
        """Trained spans of a document, in tokens."""
        batch, at = self._find(document)
        borders = batch.lists("spans")[at].tolist()
        return list(zip(borders[::2], borders[1::2], batch.lists("weights")[at].tolist(), strict=True))

    def carried(self, document: int) -> np.ndarray:
        """Numbers that go with a document: float64, as many as ``carry`` names."""
        batch, at = self._find(document)
        return batch.lists("carried")[at]

    def fork(self, document: int) -> Fork:
        """Where a document that is a pair of answers parts."""
        batch, at = self._find(document)
        return Fork(int(batch.numbers("shared")[at]), int(batch.numbers("second")[at]))

    @property
    def has_images(self) -> bool:
        return any(part.totals.with_images for part in self.parts)

    def images(self, document: int) -> list[tuple[ImageTable, int]]:
        """The images of a document, in order: their table and their numbers there."""
        batch, at = self._find(document)
        numbers = batch.lists("images")[at].tolist()
        return [(self._table(self._part_number(document)), number) for number in numbers]

    def _table(self, part: int) -> ImageTable:
        if part not in self._tables:
            self._tables[part] = ImageTable.open((self.path / part_file(part)).with_suffix(IMAGES))
        return self._tables[part]

    def changed_images(self) -> list[Stamp]:
        """The stamps of all image files as they are now, if any has changed since rows were prepared; else none."""
        names = [part for part in range(len(self.parts)) if (self.path / part_file(part)).with_suffix(IMAGES).exists()]
        stamps = [stamp for part in names for stamp in self._table(part).stamps()]
        now = stamps_now(stamps)
        return now if now != stamps else []

    def where(self, document: int) -> tuple[str, int]:
        """File and row that a document came from."""
        batch, at = self._find(document)
        return self.part_of(document).where(int(batch.numbers("row")[at]))

    def sources(self) -> np.ndarray:
        """Source of every document: int16 (num_documents,)."""
        return np.repeat(
            np.array([part.source for part in self.parts], dtype=np.int16), [part.documents for part in self.parts]
        )

    def column(self, name: str) -> np.ndarray:
        """``lengths``, ``supervised``, ``content`` (uint64), ``shared`` and ``second`` (``Fork``), or ``image_tokens``
        of every document; int32 where nothing else is said. It is read once, and asked for with every pack."""
        if name not in self._columns:
            column = np.zeros(len(self), dtype=np.uint64 if name == "content" else np.int32)
            at = 0
            for batch in self._batches():
                column[at : at + len(batch)] = (
                    np.diff(batch.lists("tokens").offsets) if name == "lengths" else batch.numbers(name)
                )
                at += len(batch)
            column.setflags(write=False)
            self._columns[name] = column
        return self._columns[name]

    def token_batches(self) -> Iterator[Lists]:
        """Tokens of all documents, in order, a batch of about a million at a time; views of the map."""
        return (batch.lists("tokens") for batch in self._batches())

    def _batches(self) -> Iterator[_Batch]:
        for part in range(len(self.parts)):
            yield from self._part(part)[1]

    def bad_rows(self) -> Iterator[tuple[StoredPart, BadRow]]:
        """All bad rows, in order; ``row`` counts within the part."""
        for number, part in enumerate(self.parts):
            if not part.totals.bad:
                continue
            path = (self.path / part_file(number)).with_suffix(".bad.jsonl")
            rows = [BadRow(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
            for row in sorted(rows, key=lambda row: row.row):
                yield part, row


@dataclass(frozen=True)
class HalfRead:
    """A file that is damaged so that not all of it is read."""

    source: int
    file: str
    row: int
    reason: str
    """Why its first damage, at ``row``, cannot be read."""
    unread_bytes: int
    file_bytes: int


def half_read_files(documents: Documents) -> list[HalfRead]:
    """The files of which bytes are not read, in order."""
    damaged: dict[tuple[int, str], HalfRead] = {}
    for part, bad in documents.bad_rows():
        if not bad.unread:
            continue
        file, row = part.where(bad.row)
        size = Path(file).stat().st_size
        before = damaged.get((part.source, file), HalfRead(part.source, file, row, bad.reason, 0, size))
        damaged[part.source, file] = replace(before, unread_bytes=min(before.unread_bytes + bad.unread, size))
    return list(damaged.values())


@dataclass(frozen=True)
class Lists:
    """Lists of numbers as they lie in a file, one behind another, such as the tokens of some documents."""

    offsets: np.ndarray
    """int (num_lists + 1,): where each begins in ``values``, and where the last one ends."""
    values: np.ndarray

    def __getitem__(self, at: int) -> np.ndarray:
        return self.values[self.offsets[at] : self.offsets[at + 1]]


class _Batch:
    """Views of the columns of one record batch; nothing is copied."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._numbers: dict[str, np.ndarray] = {}
        self._lists: dict[str, Lists] = {}

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers; zeros where the file has no such column."""
        if name not in self._numbers:
            has_it = name in self._batch.schema.names
            self._numbers[name] = _view(self._batch.column(name)) if has_it else np.zeros(len(self), np.int32)
        return self._numbers[name]

    def lists(self, name: str) -> Lists:
        """A column of lists; empty ones where the file has no such column."""
        if name not in self._lists:
            if name in self._batch.schema.names:
                array = self._batch.column(name)
                self._lists[name] = Lists(_view(array.offsets), _view(array.values))
            else:
                self._lists[name] = Lists(np.zeros(len(self) + 1, np.int32), np.zeros(0, np.int32))
        return self._lists[name]


def _view(array: Any) -> np.ndarray:
    """The values of a flat Arrow array, not copied (``to_numpy`` would import pandas into every worker)."""
    types = {"int32": np.int32, "int64": np.int64, "uint64": np.uint64, "float": np.float32, "double": np.float64}
    kind = types[str(array.type)]
    values = array.buffers()[1]
    if values is None or len(array) == 0:
        return np.zeros(0, dtype=kind)
    return np.frombuffer(values, dtype=kind)[array.offset : array.offset + len(array)]


def part_file(part: int) -> str:
    return f"part-{part:05d}.arrow"
