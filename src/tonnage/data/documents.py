"""Tokenised documents in Arrow files: one file per part of a source, written once, memory-mapped ever after.

A row of a file is one document: the number of the row it came from, its tokens, the spans of them that are trained on
with their weights, how many tokens that is, and a 64-bit key of its content. Documents know nothing of lengths, packs
or validation, so that a change of those needs no tokenising.

``PartBuilder`` does the work for one part in bounded memory: rows in chunks of about a megabyte, converted, rendered
and cut into words here while ``tokenizers`` encodes what is new in the chunk before on threads of its own, in Rust.
``Documents`` reads the result.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tonnage.data.conversation import Conversation, Pieces, RowError
from tonnage.data.formats import Form
from tonnage.data.json_text import MAX_ROW_BYTES
from tonnage.data.masks import Borders, Span, requests
from tonnage.data.prefixes import Tokens
from tonnage.data.reader import Reader
from tonnage.data.rendering import ChatTemplate, Request
from tonnage.data.shape import TurnShape
from tonnage.data.sources import Part, Row, lines_of, read_rows
from tonnage.data.tokens import Batch, Document, Encoder, content_key, supervised_count

CHUNK_ROWS = 512
CHUNK_CHARACTERS = 1 << 20
BATCH_TOKENS = 1 << 20
FOLD = "put the system message at the beginning of the first question: data.fold_system: true"


@dataclass(frozen=True)
class Script:
    """A template that conversations are written with, and its shape."""

    template: str
    special: dict[str, str]
    arguments: dict[str, Any]
    date: str
    shape: TurnShape

    @staticmethod
    def from_json(value: dict[str, Any]) -> Script:
        """A script back from plain values."""
        shape: dict[str, Any] = {
            name: tuple(one) if isinstance(one, list) else one for name, one in value.pop("shape").items()
        }
        return Script(shape=TurnShape(**shape), **value)


@dataclass(frozen=True)
class Recipe:
    """All that is needed to turn rows into documents: plain values, so that it can be handed to another process."""

    tokenizer_json: str
    scripts: tuple[Script, ...]
    """One, or another one besides for conversations with tools."""
    train_on: str
    fold_system: bool
    """Whether a system message goes into the first user's, where the template takes none."""
    text_start: str
    """What goes before a plain text: the beginning-of-text token where the tokenizer puts one."""
    text_end: str
    """What goes after a plain text: the end-of-text token."""

    def to_json(self) -> str:
        """The recipe as JSON."""
        return json.dumps(asdict(self), ensure_ascii=True)

    def key(self) -> dict[str, Any]:
        """Plain values that differ where recipes do; the tokenizer, a few megabytes, as a digest."""
        tokenizer = hashlib.blake2b(self.tokenizer_json.encode(), digest_size=16).hexdigest()
        return asdict(replace(self, tokenizer_json=tokenizer))

    @staticmethod
    def from_json(text: str) -> Recipe:
        """The recipe back from ``to_json``."""
        value = json.loads(text)
        return Recipe(scripts=tuple(map(Script.from_json, value.pop("scripts"))), **value)


@dataclass(frozen=True)
class BadRow:
    """A row that could not be used. ``row`` counts within its part until the store puts parts together."""

    row: int
    kind: str
    reason: str
    change: str = ""
    """What can be done about it, where that is known."""


@dataclass
class PartTotals:
    """What became of one part's rows."""

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
    columns: dict[str, int] = field(default_factory=dict)
    """Columns that the source names -> rows that have them."""
    moved: int = 0
    """Turns whose first token begins before them, in the template's header."""
    trimmed: int = 0
    """Conversations that held a token which the template puts there too."""
    thoughts: int = 0
    """Conversations of which the template leaves thoughts out, before the last question."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "closing": sorted(self.closing)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> PartTotals:
        """The totals back from ``to_json``."""
        return PartTotals(**{**value, "closing": set(value["closing"])})


@dataclass(slots=True)
class _Pending:
    """A conversation on its way to a document."""

    row: int
    conversation: Conversation
    script: int = 0
    asked: int = 0
    """How many texts were asked for, to find its borders."""
    whole: str = ""
    spans: Sequence[Span] = ()


class PartBuilder:
    """Turns parts into Arrow files, one after another."""

    def __init__(self, recipe: Recipe, *, overlap: bool) -> None:
        self._recipe = recipe
        self._templates = [ChatTemplate(one.template, one.special, one.arguments, one.date) for one in recipe.scripts]
        self._borders = [
            Borders(template, script.shape, recipe.train_on)
            for template, script in zip(self._templates, recipe.scripts, strict=True)
        ]
        self._encoder = Encoder(recipe.tokenizer_json)
        self._pool = ThreadPoolExecutor(1) if overlap else None

    def close(self) -> None:
        """Stop the thread that encodes."""
        if self._pool is not None:
            self._pool.shutdown()

    def build(
        self, part: Part, form: Form, out: Path, advance: Callable[[int], None] = lambda rows: None
    ) -> PartTotals:
        """Write the documents of ``part`` to ``out`` and its bad rows beside it (``.bad.jsonl``)."""
        totals = PartTotals()
        reader = Reader(form, fills_nulls=part.fills_nulls)
        bad: list[str] = []
        with _rare_collection(), DocumentWriter(out) as writer:

            def refuse(row: int, error: RowError) -> None:
                totals.bad += 1
                reason = error.reason.encode("utf-8", "backslashreplace").decode("utf-8")[:2000]
                bad.append(json.dumps(asdict(BadRow(row, error.kind, reason, error.change))) + "\n")

            waiting: tuple[list[_Pending], Batch, Future[None]] | None = None
            for chunk in _chunks(read_rows(part)):
                pending = self._render(chunk, reader, totals, refuse)
                batch = self._encoder.begin([one.whole for one in pending], [one.spans for one in pending])
                running = self._run(batch)
                if waiting is not None:
                    self._collect(*waiting, writer, totals, refuse)
                waiting = (pending, batch, running)
                advance(len(chunk))
            if waiting is not None:
                self._collect(*waiting, writer, totals, refuse)
            totals.documents = writer.documents
        if bad:
            out.with_suffix(".bad.jsonl").write_text("".join(bad), encoding="utf-8")
        totals.lines = lines_of(part) if part.kind in ("lines", "line") else 0
        totals.unread, totals.columns = dict(reader.unread), dict(reader.columns)
        totals.thoughts = sum(borders.settled for borders in self._borders)
        for borders in self._borders:
            borders.settled = 0
        return totals

    def _run(self, batch: Batch) -> Future[None]:
        if self._pool is not None:
            return self._pool.submit(self._encoder.run, batch)
        done: Future[None] = Future()
        self._encoder.run(batch)
        done.set_result(None)
        return done

    def _render(
        self,
        chunk: Sequence[Row],
        reader: Reader,
        totals: PartTotals,
        refuse: Callable[[int, RowError], None],
    ) -> list[_Pending]:
        pending: list[_Pending] = []
        wanted: list[list[Request]] = [[] for _ in self._templates]
        for number, row in chunk:
            totals.rows += 1
            try:
                if isinstance(row, RowError):
                    raise row
                found = reader.read(row)
            except RowError as error:
                refuse(number, error)
                continue
            except RecursionError:
                refuse(number, RowError("wrong_type", "nested too deeply"))
                continue
            totals.rows += len(found) - 1
            for conversation in found:
                script = min(bool(conversation.tools), len(self._templates) - 1)
                ask: list[Request] = []
                if conversation.is_chat:
                    conversation = self._suited(conversation, self._recipe.scripts[script], totals)
                    ask = requests(conversation, self._recipe.scripts[script].shape, self._recipe.train_on)
                    wanted[script] += ask
                pending.append(_Pending(number, conversation, script, len(ask)))
        rendered = [iter(template.render_many(asked)) for template, asked in zip(self._templates, wanted, strict=True)]
        kept: list[_Pending] = []
        for one in pending:
            try:
                self._mark(one, list(islice(rendered[one.script], one.asked)))
                kept.append(one)
            except RowError as error:
                system = one.conversation.is_chat and one.conversation.messages[0]["role"] == "system"
                if system and "system" in self._recipe.scripts[one.script].shape.lacks:
                    error.change = error.change or FOLD
                refuse(one.row, error)
        return kept

    def _suited(self, conversation: Conversation, script: Script, totals: PartTotals) -> Conversation:
        """The conversation without tokens that the template will put there, and without a system message of its own
        where the template takes none and it is to be folded."""
        messages = conversation.messages
        if self._recipe.fold_system and "system" in script.shape.lacks and messages[0]["role"] == "system":
            conversation = _folded(conversation)
            messages = conversation.messages
        start = script.special.get("bos_token", "")
        ends = (*script.shape.ends, script.special.get("eos_token") or script.shape.end)
        begins = bool(start) and messages[0]["content"].startswith(start) and script.shape.begins
        closed = [
            at
            for at, message in enumerate(messages)
            if message["role"] == "assistant" and message["content"].endswith(ends)
        ]
        if not begins and not closed:
            return conversation
        totals.trimmed += 1
        return _without_ends(conversation, start if begins else "", closed, ends)

    def _mark(self, one: _Pending, texts: Sequence[str | RowError]) -> None:
        conversation = one.conversation
        if conversation.ids is not None:
            return
        if conversation.text is not None:
            one.whole, one.spans = self._framed(conversation.text, conversation.pieces.get(0))
        else:
            whole = texts[0]
            if isinstance(whole, RowError):
                raise whole
            one.whole = whole
            one.spans = self._borders[one.script].find(conversation, whole, texts[1:])
        if len(one.whole) > MAX_ROW_BYTES:
            raise RowError(
                "too_large", f"the row makes a text of {len(one.whole):,} characters; at most {MAX_ROW_BYTES:,}"
            )

    def _framed(self, text: str, pieces: Pieces | None) -> tuple[str, list[Span]]:
        """A plain text with its first and last token, each once, and what of it is trained."""
        start, end = self._recipe.text_start, self._recipe.text_end
        start = "" if start and text.startswith(start) else start
        end = "" if end and text.endswith(end) else end
        whole = start + text + end
        if pieces is None:
            return whole, [(0, len(whole), 1.0)]
        spans: list[Span] = []
        at = len(start)
        for size, weight in pieces:
            spans.append((at, at + size, weight))
            at += size
        first, last = spans[0], spans[-1]
        spans[0] = (0, first[1], first[2])
        spans[-1] = (spans[-1][0], len(whole), last[2])
        return whole, [span for span in spans if span[0] < span[1]]

    def _collect(
        self,
        pending: Sequence[_Pending],
        batch: Batch,
        running: Future[None],
        writer: DocumentWriter,
        totals: PartTotals,
        refuse: Callable[[int, RowError], None],
    ) -> None:
        running.result()
        for one, document in zip(pending, self._encoder.documents(batch), strict=True):
            if one.conversation.ids is not None:
                document = self._of_ids(one.conversation)
            if isinstance(document, RowError):
                refuse(one.row, document)
                continue
            totals.moved += document.moved
            supervised = supervised_count(document.spans)
            if not supervised:
                refuse(one.row, RowError("nothing_supervised", "no token of the row is trained on"))
                continue
            totals.closing.update(int(document.tokens[stop - 1]) for _, stop, _ in document.spans)
            writer.add(one.row, document, supervised)

    def _of_ids(self, conversation: Conversation) -> Document | RowError:
        """A row of tokens as a document."""
        assert conversation.ids is not None
        if max(conversation.ids) >= self._encoder.num_tokens:
            return RowError(
                "wrong_type",
                f"token {max(conversation.ids)}, and the tokenizer's highest is {self._encoder.num_tokens - 1}",
            )
        spans: list[Span] = []
        for at, weight in enumerate(conversation.ids_weights):
            if at and weight > 0:
                if spans and spans[-1][1:] == (at, weight):
                    spans[-1] = (spans[-1][0], at + 1, weight)
                else:
                    spans.append((at, at + 1, weight))
        return Document(np.array(conversation.ids, dtype=np.int32), spans)


def _folded(conversation: Conversation) -> Conversation:
    """The system message at the beginning of the first user's."""
    system, *rest = conversation.messages
    at = next((at for at, message in enumerate(rest) if message["role"] == "user"), None)
    if at is None or not system["content"].strip():
        return conversation
    said = dict(rest[at])
    for name in ("content", *(("instruction",) if "instruction" in said else ())):
        said[name] = f"{system['content'].rstrip()}\n\n{said[name]}"
    return replace(
        conversation,
        messages=[*rest[:at], said, *rest[at + 1 :]],
        weights=conversation.weights[1:],
        pieces={number - 1: pieces for number, pieces in conversation.pieces.items()},
        unsaid=frozenset(number - 1 for number in conversation.unsaid if number),
    )


def _without_ends(conversation: Conversation, start: str, closed: Sequence[int], ends: tuple[str, ...]) -> Conversation:
    """Without the token that the first message begins with, and those that close the messages ``closed``."""
    messages = [dict(message) for message in conversation.messages]
    pieces = dict(conversation.pieces)
    if start:
        for name in ("content", "instruction"):
            if name in messages[0]:
                messages[0][name] = messages[0][name].removeprefix(start)
    for at in closed:
        content = messages[at]["content"]
        end = next(end for end in ends if content.endswith(end))
        messages[at]["content"] = content.removesuffix(end)
        if at in pieces:
            size, weight = pieces[at][-1]
            if size < len(end):
                raise RowError("mask", f"message {at}: its last part is a piece of the token that closes it")
            pieces[at] = [*pieces[at][:-1], (size - len(end), weight)]
        if not messages[at]["content"].strip() and "tool_calls" not in messages[at]:
            raise RowError("empty_answer", f"message {at}: nothing but the token that closes it")
    return replace(conversation, messages=messages, pieces=pieces)


@contextmanager
def _rare_collection() -> Iterator[None]:
    """Look for reference cycles less often: rows make none, and looking costs a third of the time spent in Python."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += _size(row[1])
        if len(chunk) >= CHUNK_ROWS or size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _size(row: object) -> int:
    if isinstance(row, dict):
        return sum(len(value) if isinstance(value, str) else 1000 for value in row.values())
    return 0


class DocumentWriter:
    """Writes documents to an Arrow file, a batch of about a million tokens at a time."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._pa = pa
        self.documents = 0
        self._schema = pa.schema(
            [
                ("row", pa.int64()),
                ("tokens", pa.list_(pa.int32())),
                ("spans", pa.list_(pa.int32())),
                ("weights", pa.list_(pa.float32())),
                ("supervised", pa.int32()),
                ("content", pa.uint64()),
            ]
        )
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        self._clear()

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._flush()
        self._writer.close()
        self._sink.close()

    def add(self, row: int, document: Document, supervised: int) -> None:
        """Add one document, of which ``supervised`` tokens count."""
        tokens = document.tokens
        self._rows.append(row)
        self._tokens.append(tokens)
        self._spans.append([border for span in document.spans for border in span[:2]])
        self._weights.append([span[2] for span in document.spans])
        self._supervised.append(supervised)
        self._contents.append(content_key(tokens, document.spans))
        self._size += len(tokens)
        self.documents += 1
        if self._size >= BATCH_TOKENS:
            self._flush()

    def _clear(self) -> None:
        self._rows: list[int] = []
        self._tokens: list[np.ndarray] = []
        self._spans: list[list[int]] = []
        self._weights: list[list[float]] = []
        self._supervised: list[int] = []
        self._contents: list[int] = []
        self._size = 0

    def _flush(self) -> None:
        if not self._rows:
            return
        pa = self._pa
        offsets = np.zeros(len(self._tokens) + 1, dtype=np.int32)
        np.cumsum([len(tokens) for tokens in self._tokens], out=offsets[1:])
        columns = [
            pa.array(self._rows, pa.int64()),
            pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(self._tokens))),
            pa.array(self._spans, pa.list_(pa.int32())),
            pa.array(self._weights, pa.list_(pa.float32())),
            pa.array(self._supervised, pa.int32()),
            pa.array(self._contents, pa.uint64()),
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._clear()


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
        """How many it has."""
        return self.totals.documents

    def where(self, row: int) -> tuple[str, int]:
        """File and row of a row that counts within the part."""
        return (self.files[0], row + self.row_base) if len(self.files) == 1 else (self.files[row - 1], 1)

    @staticmethod
    def from_json(value: dict[str, Any]) -> StoredPart:
        """A part back from plain values."""
        return StoredPart(
            value["source"], tuple(value["files"]), value["row_base"], PartTotals.from_json(value["totals"])
        )


class Documents:
    """The documents of all sources, memory-mapped. Opening reads headers only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        described = json.loads((path / "documents.json").read_text(encoding="utf-8"))
        self.parts = [StoredPart.from_json(part) for part in described["parts"]]
        self.closing = tuple(sorted(set().union(*(part.totals.closing for part in self.parts))))
        self._first = np.cumsum([0] + [part.documents for part in self.parts])
        self._open: dict[int, tuple[np.ndarray, list[_Batch]]] = {}

    def __len__(self) -> int:
        return int(self._first[-1])

    def first_of_part(self, part: int) -> int:
        """Index of a part's first document."""
        return int(self._first[part])

    def _part(self, part: int) -> tuple[np.ndarray, list[_Batch]]:
        if part not in self._open:
            import pyarrow as pa

            mapped = pa.memory_map(str(self.path / part_file(part)))
            opened = pa.ipc.open_file(mapped)
            batches = [_Batch(opened.get_batch(at)) for at in range(opened.num_record_batches)]
            self._open[part] = (np.cumsum([0] + [len(batch) for batch in batches]), batches)
        return self._open[part]

    def _find(self, document: int) -> tuple[_Batch, int]:
        part = int(np.searchsorted(self._first, document, side="right")) - 1
        first, batches = self._part(part)
        within = document - int(self._first[part])
        batch = int(np.searchsorted(first, within, side="right")) - 1
        return batches[batch], within - int(first[batch])

    def tokens(self, document: int) -> np.ndarray:
        """Tokens of a document: int32 (num_tokens,), a view of the map."""
        batch, at = self._find(document)
        return batch.tokens(at)

    def spans(self, document: int) -> list[Span]:
        """Trained spans of a document, in tokens."""
        batch, at = self._find(document)
        return batch.spans(at)

    def where(self, document: int) -> tuple[str, int]:
        """File and row that a document came from."""
        part = self.parts[int(np.searchsorted(self._first, document, side="right")) - 1]
        batch, at = self._find(document)
        return part.where(int(batch.rows[at]))

    def sources(self) -> np.ndarray:
        """Source of every document: int16 (num_documents,)."""
        return np.repeat(
            np.array([part.source for part in self.parts], dtype=np.int16), [part.documents for part in self.parts]
        )

    def column(self, name: str) -> np.ndarray:
        """``lengths`` (int32), ``supervised`` (int32) or ``content`` (uint64) of every document."""
        types = {"lengths": np.int32, "supervised": np.int32, "content": np.uint64}
        found = np.zeros(len(self), dtype=types[name])
        at = 0
        for part in range(len(self.parts)):
            for batch in self._part(part)[1]:
                found[at : at + len(batch)] = getattr(batch, name)
                at += len(batch)
        return found

    def token_batches(self) -> Iterator[Tokens]:
        """Tokens of all documents, in order, a batch of about a million at a time; views of the map."""
        for part in range(len(self.parts)):
            for batch in self._part(part)[1]:
                yield Tokens(*batch.all_tokens)

    def bad_rows(self) -> Iterator[tuple[StoredPart, BadRow]]:
        """All bad rows, in order; ``row`` counts within the part."""
        for number, part in enumerate(self.parts):
            if not part.totals.bad:
                continue
            found = (self.path / part_file(number)).with_suffix(".bad.jsonl")
            rows = [BadRow(**json.loads(line)) for line in found.read_text(encoding="utf-8").splitlines()]
            for row in sorted(rows, key=lambda row: row.row):
                yield part, row


class _Batch:
    """Views of one record batch; nothing is copied."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    @cached_property
    def rows(self) -> np.ndarray:
        return _view(self._batch.column(0))

    @cached_property
    def all_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        column = self._batch.column(1)
        return _view(column.offsets), _view(column.values)

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        spans, weights = self._batch.column(2), self._batch.column(3)
        return _view(spans.offsets), _view(spans.values), _view(weights.values)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.all_tokens[0])

    @property
    def supervised(self) -> np.ndarray:
        return _view(self._batch.column(4))

    @property
    def content(self) -> np.ndarray:
        return _view(self._batch.column(5))

    def tokens(self, at: int) -> np.ndarray:
        offsets, values = self.all_tokens
        return values[offsets[at] : offsets[at + 1]]

    def spans(self, at: int) -> list[Span]:
        offsets, borders, weights = self._spans
        start, stop = int(offsets[at]), int(offsets[at + 1])
        return [(int(borders[n]), int(borders[n + 1]), float(weights[n // 2])) for n in range(start, stop, 2)]


def _view(array: Any) -> np.ndarray:
    """The values of a flat Arrow array, not copied (``to_numpy`` would import pandas into every worker)."""
    types = {"int32": np.int32, "int64": np.int64, "uint64": np.uint64, "float": np.float32}
    kind = types[str(array.type)]
    values = array.buffers()[1]
    if values is None or len(array) == 0:
        return np.zeros(0, dtype=kind)
    return np.frombuffer(values, dtype=kind)[array.offset : array.offset + len(array)]


def part_file(part: int) -> str:
    """File name of a part's documents."""
    return f"part-{part:05d}.arrow"
