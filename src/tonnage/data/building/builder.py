"""Rows of one part into documents, in bounded memory.

Rows come in chunks of about a megabyte. While one chunk is read, rendered and cut into words here, ``tokenizers``
encodes the new words of the chunk before, in Rust, on threads of its own.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from tonnage.data.building.mates import Result, with_mates
from tonnage.data.building.recipe import Recipe, Script
from tonnage.data.images.rows import ImagesOfDocument, ImagesOfPart
from tonnage.data.reading.json_text import MAX_ROW_BYTES
from tonnage.data.reading.rows import Part, Row, lines_of, read_rows
from tonnage.data.text.masks import Borders, Marked, Span, requests
from tonnage.data.text.rendering import Request
from tonnage.data.text.thoughts import check_thoughts
from tonnage.data.tokens.control import ControlTokens, refused
from tonnage.data.tokens.documents import IMAGES, BadRow, DocumentWriter, PartTotals
from tonnage.data.tokens.encoder import Document, Encoder, TextBatch, paired
from tonnage.forms.conversation import Conversation, Pieces, RowError, as_row_error
from tonnage.forms.formats import FORMATS, Form
from tonnage.forms.reader import Reader

CONTROL_ROWS = 5
"""How many rows with control tokens in their words are named; the first ones."""
CHUNK_ROWS = 512
CHUNK_CHARACTERS = 1 << 20
FOLD = "put the system message at the beginning of the first question: data.fold_system: true"


NO_TEXT = Marked("", ())


def _silent(rows: int) -> None:
    """An ``advance`` that nobody hears."""


@dataclass(slots=True)
class _Pending:
    """A conversation on its way to a document."""

    row: int
    conversation: Conversation
    script: int = 0
    num_requests: int = 0
    """How many renderings it needs: to find its borders, and its control tokens."""
    marked: Marked = NO_TEXT
    controls: tuple[str, ...] = ()
    """Control tokens in its own words."""
    images: ImagesOfDocument | None = None
    as_words: bool = False
    """Whether these are trained as words: the text of ``marked`` then has stand-ins for all other control tokens."""


_Together = tuple[_Pending, ...]
"""A conversation, or the two of a pair."""


class PartBuilder:
    """Turns parts into Arrow files, one after another."""

    def __init__(self, recipe: Recipe, *, overlap: bool) -> None:
        self._recipe = recipe
        self._options = recipe.options
        self._templates = [script.template for script in recipe.scripts]
        self._borders = [Borders(script.template, script.shape, recipe.options.train_on) for script in recipe.scripts]
        self._encoder = Encoder(recipe.tokenizer_json)
        self._controls = ControlTokens(recipe.controls)
        self._pool = ThreadPoolExecutor(1) if overlap else None
        self._images: ImagesOfPart | None = None
        """Of the part that is built, where the model takes any."""

    def close(self) -> None:
        """Stop the thread that encodes."""
        if self._pool is not None:
            self._pool.shutdown()

    def build(self, part: Part, form: Form, out: Path, advance: Callable[[int], None] = _silent) -> PartTotals:
        """Write the documents of ``part`` to ``out`` and its bad rows beside it (``.bad.jsonl``)."""
        totals = PartTotals()
        takes_images = self._recipe.images is not None
        reader = Reader(form, fills_nulls=part.fills_nulls, carry=self._options.carry, images=takes_images)
        if self._recipe.images is not None:
            folder = Path(form.images) if form.images else Path(part.file).absolute().parent
            self._images = ImagesOfPart(self._recipe.images, folder, out.with_suffix(IMAGES))
        bad: list[str] = []
        purpose = FORMATS[form.format].purpose
        is_labelled = purpose == "verdicts"
        results = self._results(read_rows(part), reader, totals, advance)
        carries, pairs = is_labelled or bool(self._options.carry), purpose != "supervised"
        writes = {"carries": carries, "pairs": pairs, "images": takes_images}
        with _rare_collection(), DocumentWriter(out, **writes) as writer:
            for row, result in with_mates(results) if is_labelled else results:
                if isinstance(result, RowError):
                    reason = result.reason.encode("utf-8", "backslashreplace").decode("utf-8")[:2000]
                    bad_row = BadRow(row, result.kind, reason, result.change, result.unread)
                    bad.append(json.dumps(asdict(bad_row)) + "\n")
                else:
                    writer.add(row, result)
                    totals.desirable += is_labelled and result.carried[0] > 0
        if self._images is not None:
            self._images.close()
            self._images = None
        if bad:
            out.with_suffix(".bad.jsonl").write_text("".join(bad), encoding="utf-8")
        totals.bad, totals.documents = len(bad), writer.documents
        totals.undesirable = is_labelled * (totals.documents - totals.desirable)
        totals.lines = lines_of(part) if part.kind in ("lines", "line") else 0
        totals.unread, totals.columns = dict(reader.unread), dict(reader.columns)
        totals.values, totals.ties = reader.values.seen, reader.ties
        totals.thoughts = sum(borders.settled for borders in self._borders)
        for borders in self._borders:
            borders.settled = 0
        return totals

    def build_task(self, task: Mapping[str, Any], advance: Callable[[int], None] = _silent) -> dict[str, Any]:
        """Build the part of a ``task`` from another process. Task and answer are plain values."""
        part = Part(**{**task["part"], "more": tuple(task["part"]["more"])})
        totals = self.build(part, Form(**task["form"]), Path(task["out"]), advance)
        return {"number": task["number"], "totals": totals.to_json()}

    def documents(self, rows: Iterator[Row], form: Form) -> list[Result]:
        """Documents of rows in memory, each with its row's number; where a row makes none, the error says why."""
        results = self._results(rows, Reader(form, carry=self._options.carry), PartTotals())
        if FORMATS[form.format].purpose == "verdicts":
            results = with_mates(results)
        return sorted(results, key=lambda result: result[0])

    def _results(
        self, rows: Iterator[Row], reader: Reader, totals: PartTotals, advance: Callable[[int], None] = _silent
    ) -> Iterator[Result]:
        """Take rows through in chunks: one is encoded while the next is read."""
        encoded: Iterator[Result] = iter(())
        for chunk in _chunks(rows):
            pending, refused_rows = self._render(chunk, reader, totals)
            entries = chain.from_iterable(pending)
            batch = self._encoder.begin([NO_TEXT if entry.as_words else entry.marked for entry in entries])
            run = partial(self._encoder.run, batch)
            finish: Callable[[], None] = run if self._pool is None else self._pool.submit(run).result
            yield from refused_rows
            yield from encoded
            encoded = self._encoded(pending, batch, finish, totals)
            advance(len(chunk))
        yield from encoded

    def _render(
        self, chunk: Sequence[Row], reader: Reader, totals: PartTotals
    ) -> tuple[list[_Together], list[tuple[int, RowError]]]:
        """The conversations of a chunk as marked texts, and the rows that are refused."""
        refused_rows: list[tuple[int, RowError]] = []
        pending: list[_Together] = []
        requests_by_template: list[list[Request]] = [[] for _ in self._templates]
        for number, row in chunk:
            totals.rows += 1
            try:
                if isinstance(row, RowError):
                    raise row
                conversations = reader.read(row)
            except Exception as error:
                refused_rows.append((number, as_row_error(error)))
                continue
            totals.rows += len(conversations) - 1
            for conversation in conversations:
                script = min(bool(conversation.tools), len(self._templates) - 1)
                halves = (conversation,) if conversation.rejected is None else (conversation, conversation.rejected)
                entries = tuple(_Pending(number, half, script) for half in halves)
                try:
                    own_requests = [
                        self._requests_of(entry, totals) if entry.conversation.is_chat else [] for entry in entries
                    ]
                except Exception as error:
                    refused_rows.append((number, as_row_error(error)))
                    continue
                for entry, requests_of_entry in zip(entries, own_requests, strict=True):
                    entry.num_requests = len(requests_of_entry)
                    requests_by_template[script] += requests_of_entry
                pending.append(entries)
        rendered = [
            iter(template.render_many(own_requests))
            for template, own_requests in zip(self._templates, requests_by_template, strict=True)
        ]
        marked: list[_Together] = []
        for entries in pending:
            texts = [list(islice(rendered[entry.script], entry.num_requests)) for entry in entries]
            try:
                for entry, own_texts in zip(entries, texts, strict=True):
                    self._mark(entry, own_texts)
                marked.append(entries)
            except Exception as error:
                refused_rows.append((entries[0].row, self._advised(as_row_error(error), entries[0])))
        return marked, refused_rows

    def _advised(self, reason: RowError, entry: _Pending) -> RowError:
        """Why a conversation cannot be rendered, with what can be done about it."""
        system = entry.conversation.is_chat and entry.conversation.turns[0].role == "system"
        if system and "system" in self._recipe.scripts[entry.script].shape.lacks:
            reason.change = reason.change or FOLD
        return reason

    def _requests_of(self, entry: _Pending, totals: PartTotals) -> list[Request]:
        """The renderings that a conversation needs: those that find its borders and, if its own words hold control
        tokens, one more with these broken up. Raises ``RowError``."""
        script, setting = self._recipe.scripts[entry.script], self._options.control_tokens
        entry.conversation = conversation = self._suited(entry.conversation, script, totals)
        for number, turn in enumerate(conversation.turns):
            if turn.role == "assistant":
                check_thoughts(turn.message, number)
        own_requests = requests(conversation, script.shape, self._options.train_on)
        entry.controls = self._controls.in_words(conversation.messages, conversation.tools)
        if entry.controls and setting == "error":
            raise refused(entry.controls)
        entry.as_words = bool(entry.controls) and setting == "text" and script.shape.writes_turns
        if entry.as_words:
            own_requests.append((*self._controls.broken(conversation.messages, conversation.tools), False))
        return own_requests

    def _suited(self, conversation: Conversation, script: Script, totals: PartTotals) -> Conversation:
        """The conversation without first and last tokens that the template writes itself; a system message that the
        template does not take is folded into the first question, if the options say so."""
        if self._options.fold_system and "system" in script.shape.lacks and conversation.turns[0].role == "system":
            conversation = _folded(conversation)
        start = script.template.special.get("bos_token", "")
        ends = (*script.shape.ends, script.template.special.get("eos_token") or script.shape.end)
        begins = bool(start) and conversation.turns[0].message["content"].startswith(start) and script.shape.begins
        closed = [
            at
            for at, turn in enumerate(conversation.turns)
            if turn.role == "assistant" and turn.message["content"].rstrip().endswith(ends)
        ]
        if not begins and not closed:
            return conversation
        conversation = _without_ends(conversation, start if begins else "", closed, ends)
        totals.trimmed += 1
        return conversation

    def _mark(self, entry: _Pending, texts: Sequence[str | RowError]) -> None:
        conversation = entry.conversation
        if conversation.ids is not None:
            return
        if conversation.text is not None:
            entry.marked = self._framed(conversation.text, conversation.pieces)
        else:
            whole = texts[0]
            if isinstance(whole, RowError):
                raise whole
            openings, broken = (texts[1:-1], texts[-1]) if entry.as_words else (texts[1:], whole)
            spans = self._borders[entry.script].find(conversation, whole, openings)
            if isinstance(broken, RowError):
                raise broken
            entry.marked = Marked(self._controls.words(whole, broken) if entry.as_words else whole, spans)
            if conversation.images and self._images is not None:
                entry.images = self._images.of_row(whole, conversation.images)
                words = self._controls.stood_in if entry.as_words else str
                entry.marked = entry.images.expanded(entry.marked, words)
        if (size := len(entry.marked.text)) > MAX_ROW_BYTES:
            raise RowError("too_large", f"the row makes a text of {size:,} characters; at most {MAX_ROW_BYTES:,}")

    def _framed(self, text: str, pieces: Pieces | None) -> Marked:
        """A plain text with its first and last token, each exactly once, and its trained spans."""
        start, end = self._recipe.text_start, self._recipe.text_end
        start = "" if start and text.startswith(start) else start
        end = "" if end and text.endswith(end) else end
        whole = start + text + end
        if pieces is None:
            return Marked(whole, [(0, len(whole), 1.0)])
        spans: list[Span] = []
        at = len(start)
        for size, weight in pieces:
            spans.append((at, at + size, weight))
            at += size
        spans[0] = (0, *spans[0][1:])
        spans[-1] = (spans[-1][0], len(whole), spans[-1][2])
        return Marked(whole, [span for span in spans if span[0] < span[1]])

    def _encoded(
        self, pending: Sequence[_Together], batch: TextBatch, finish: Callable[[], None], totals: PartTotals
    ) -> Iterator[Result]:
        """What becomes of conversations when their ``batch`` is encoded, for which ``finish`` waits."""
        finish()
        encoded = iter(self._encoder.documents(batch))
        for entries in pending:
            documents = [self._document(entry, document) for entry, document in zip(entries, encoded, strict=False)]
            result = next((document for document in documents if isinstance(document, RowError)), None)
            if result is None:
                try:
                    own = [document for document in documents if isinstance(document, Document)]
                    document = own[0] if len(own) == 1 else paired(*own)
                    document.carried = entries[0].conversation.carried
                    _count(entries, document, totals)
                    yield entries[0].row, document
                    continue
                except RowError as error:
                    result = error
            yield entries[0].row, result

    def _document(self, entry: _Pending, encoded: Document | RowError) -> Document | RowError:
        """What a conversation becomes, of which the text was ``encoded``."""
        if entry.conversation.ids is not None:
            encoded = self._of_ids(entry.conversation)
        elif entry.as_words:
            encoded = self._controls.encoder(self._recipe.tokenizer_json).document(entry.marked)
        if entry.images is not None and isinstance(encoded, Document):
            encoded = entry.images.put_into(encoded, checks=not entry.as_words)
        if not isinstance(encoded, RowError) and not encoded.supervised:
            return RowError("nothing_supervised", "no token of the row is trained on")
        return encoded

    def _of_ids(self, conversation: Conversation) -> Document | RowError:
        assert conversation.ids is not None
        if (last := max(conversation.ids)) >= (size := self._encoder.num_tokens):
            return RowError("wrong_type", f"token {last}, and the tokenizer's highest is {size - 1}")
        spans: list[Span] = []
        for at, weight in enumerate(conversation.ids_weights):
            if at and weight > 0:
                if spans and spans[-1][1:] == (at, weight):
                    spans[-1] = (spans[-1][0], at + 1, weight)
                else:
                    spans.append((at, at + 1, weight))
        return Document(np.array(conversation.ids, dtype=np.int32), spans)


def _count(entries: _Together, document: Document, totals: PartTotals) -> None:
    totals.moved += document.moved
    totals.with_images += bool(document.images)
    totals.images += len(document.images)
    totals.image_tokens += document.image_tokens
    if controls := sorted({token for entry in entries for token in entry.controls}):
        totals.with_controls += 1
        totals.control_rows = [*totals.control_rows, entries[0].row][:CONTROL_ROWS]
        for token in controls:
            totals.controls[token] = totals.controls.get(token, 0) + 1
    totals.closing.update(int(document.tokens[stop - 1]) for _, stop, _ in document.spans)


def _folded(conversation: Conversation) -> Conversation:
    """The conversation with its system message at the beginning of the first user message."""
    system, *turns = conversation.turns
    words = system.message["content"].rstrip()
    at = next((at for at, turn in enumerate(turns) if turn.role == "user"), None)
    if at is None or not words:
        return conversation
    message = turns[at].message
    own = {name: f"{words}\n\n{message[name]}" for name in ("content", "instruction") if name in message}
    turns[at] = replace(turns[at], message=message | own)
    return replace(conversation, turns=turns)


def _without_ends(conversation: Conversation, start: str, closed: Sequence[int], ends: tuple[str, ...]) -> Conversation:
    """The conversation without ``start`` before its first message, and without the ends of the messages ``closed``."""
    turns = list(conversation.turns)
    if start:
        message = turns[0].message
        own = {name: message[name].removeprefix(start) for name in ("content", "instruction") if name in message}
        turns[0] = replace(turns[0], message=message | own)
    for at in closed:
        message, pieces = turns[at].message, turns[at].pieces
        content = message["content"]
        end = next(end for end in ends if content.rstrip().endswith(end))
        words = content.rstrip().removesuffix(end)
        removed = len(content) - len(words)
        if pieces is not None:
            size, weight = pieces[-1]
            if size < removed:
                raise RowError("mask", f"message {at}: its last part is a piece of the token that closes it")
            pieces = [*pieces[:-1], (size - removed, weight)]
        turns[at] = replace(turns[at], message=message | {"content": words}, pieces=pieces)
        rest = content.strip()
        while end := next((end for end in ends if rest.endswith(end)), ""):
            rest = rest.removesuffix(end).rstrip()
        if not rest and "tool_calls" not in message:
            raise RowError("empty_answer", f"message {at}: nothing but the token that closes it")
    return replace(conversation, turns=turns)


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


def _size(row: Any) -> int:
    """About how much a row holds: characters of its texts, bytes of its images."""
    size, waiting = 0, [row]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is str or kind is bytes:
            size += len(value)
        elif kind is dict:
            waiting += value.values()
        elif kind is list and value and type(value[0]) is not int:
            waiting += value
        else:
            size += 8 * len(value) if kind is list else 8
    return size
