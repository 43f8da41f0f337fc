"""Rows of one part into documents, in bounded memory.

Rows come in chunks of about a megabyte. They are read, rendered and cut into words here while ``tokenizers`` encodes
what is new in the chunk before on threads of its own, in Rust.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from tonnage.data.control import ControlTokens, refused
from tonnage.data.conversation import Conversation, Pieces, RowError, as_row_error
from tonnage.data.documents import BadRow, DocumentWriter, PartTotals
from tonnage.data.formats import Form
from tonnage.data.json_text import MAX_ROW_BYTES
from tonnage.data.masks import Borders, Span, requests
from tonnage.data.reader import Reader
from tonnage.data.recipe import Recipe, Script
from tonnage.data.rendering import ChatTemplate, Request
from tonnage.data.rows import Part, Row, lines_of, read_rows
from tonnage.data.thoughts import check_thoughts
from tonnage.data.tokens import Batch, Document, Encoder, supervised_count

CONTROL_ROWS = 5
"""First rows with control tokens in their words that are named."""
CHUNK_ROWS = 512
CHUNK_CHARACTERS = 1 << 20
FOLD = "put the system message at the beginning of the first question: data.fold_system: true"


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
    controls: tuple[str, ...] = ()
    """Control tokens in its own words."""
    as_words: bool = False
    """Whether ``whole`` has stand-ins for all other control tokens."""


@dataclass(frozen=True)
class Made:
    """A document that lies in memory."""

    document: Document
    supervised: int
    """Tokens that count."""
    carried: Sequence[float]
    """Numbers that go with it."""


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
        self._controls = ControlTokens(recipe.controls)
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
        reader = Reader(form, fills_nulls=part.fills_nulls, carry=self._recipe.carry)
        bad: list[str] = []
        with _rare_collection(), DocumentWriter(out, carries=bool(self._recipe.carry)) as writer:

            def refuse(row: int, error: RowError) -> None:
                totals.bad += 1
                reason = error.reason.encode("utf-8", "backslashreplace").decode("utf-8")[:2000]
                bad.append(json.dumps(asdict(BadRow(row, error.kind, reason, error.change, error.unread))) + "\n")

            self._through(read_rows(part), reader, writer.add, totals, refuse, advance)
            totals.documents = writer.documents
        if bad:
            out.with_suffix(".bad.jsonl").write_text("".join(bad), encoding="utf-8")
        totals.lines = lines_of(part) if part.kind in ("lines", "line") else 0
        totals.unread, totals.columns = dict(reader.unread), dict(reader.columns)
        totals.values = reader.values.seen
        totals.thoughts = sum(borders.settled for borders in self._borders)
        for borders in self._borders:
            borders.settled = 0
        return totals

    def documents(self, rows: Iterator[Row], form: Form) -> Iterator[tuple[int, Made | RowError]]:
        """Documents of rows that lie in memory, with the rows' numbers, and in the place of one the reason why a row
        makes none."""
        found: list[tuple[int, Made | RowError]] = []
        self._through(
            rows,
            Reader(form, carry=self._recipe.carry),
            lambda row, *made: found.append((row, Made(*made))),
            PartTotals(),
            lambda row, error: found.append((row, error)),
        )
        yield from sorted(found, key=lambda one: one[0])

    def _through(
        self,
        rows: Iterator[Row],
        reader: Reader,
        add: Callable[[int, Document, int, Sequence[float]], None],
        totals: PartTotals,
        refuse: Callable[[int, RowError], None],
        advance: Callable[[int], None] = lambda rows: None,
    ) -> None:
        """Rows in chunks, one of which is encoded while the next is read."""
        waiting: tuple[list[_Pending], Batch, Future[None]] | None = None
        for chunk in _chunks(rows):
            pending = self._render(chunk, reader, totals, refuse)
            usual = [("", ()) if one.as_words else (one.whole, one.spans) for one in pending]
            batch = self._encoder.begin([whole for whole, _ in usual], [spans for _, spans in usual])
            running = self._run(batch)
            if waiting is not None:
                self._collect(*waiting, add, totals, refuse)
            waiting = (pending, batch, running)
            advance(len(chunk))
        if waiting is not None:
            self._collect(*waiting, add, totals, refuse)

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
            except Exception as error:
                refuse(number, as_row_error(error))
                continue
            totals.rows += len(found) - 1
            for conversation in found:
                one = _Pending(number, conversation, min(bool(conversation.tools), len(self._templates) - 1))
                try:
                    asked = self._asked(one, totals) if conversation.is_chat else []
                except Exception as error:
                    refuse(number, as_row_error(error))
                    continue
                one.asked = len(asked)
                wanted[one.script] += asked
                pending.append(one)
        rendered = [iter(template.render_many(asked)) for template, asked in zip(self._templates, wanted, strict=True)]
        kept: list[_Pending] = []
        for one in pending:
            try:
                self._mark(one, list(islice(rendered[one.script], one.asked)))
                kept.append(one)
            except Exception as error:
                reason = as_row_error(error)
                system = one.conversation.is_chat and one.conversation.messages[0]["role"] == "system"
                if system and "system" in self._recipe.scripts[one.script].shape.lacks:
                    reason.change = reason.change or FOLD
                refuse(one.row, reason)
        return kept

    def _asked(self, one: _Pending, totals: PartTotals) -> list[Request]:
        """What must be rendered of a conversation: what finds its borders, and where control tokens stand in its own
        words, these broken up. Raises ``RowError``."""
        script, setting = self._recipe.scripts[one.script], self._recipe.control_tokens
        one.conversation = conversation = self._suited(one.conversation, script, totals)
        for number, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                check_thoughts(message, number)
        asked = requests(conversation, script.shape, self._recipe.train_on)
        one.controls = self._controls.in_words(conversation.messages, conversation.tools)
        if one.controls and setting == "error":
            raise refused(one.controls)
        one.as_words = bool(one.controls) and setting == "text" and script.shape.writes_turns
        if one.as_words:
            asked.append((*self._controls.broken(conversation.messages, conversation.tools), False))
        return asked

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
            if message["role"] == "assistant" and message["content"].rstrip().endswith(ends)
        ]
        if not begins and not closed:
            return conversation
        conversation = _without_ends(conversation, start if begins else "", closed, ends)
        totals.trimmed += 1
        return conversation

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
            openings, broken = (texts[1:-1], texts[-1]) if one.as_words else (texts[1:], whole)
            one.spans = self._borders[one.script].find(conversation, whole, openings)
            if isinstance(broken, RowError):
                raise broken
            one.whole = self._controls.words(whole, broken) if one.as_words else whole
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
        add: Callable[[int, Document, int, Sequence[float]], None],
        totals: PartTotals,
        refuse: Callable[[int, RowError], None],
    ) -> None:
        running.result()
        for one, document in zip(pending, self._encoder.documents(batch), strict=True):
            if one.conversation.ids is not None:
                document = self._of_ids(one.conversation)
            elif one.as_words:
                document = self._controls.encoder(self._recipe.tokenizer_json).document(one.whole, one.spans)
            if isinstance(document, RowError):
                refuse(one.row, document)
                continue
            supervised = supervised_count(document.spans)
            if not supervised:
                refuse(one.row, RowError("nothing_supervised", "no token of the row is trained on"))
                continue
            totals.moved += document.moved
            if one.controls:
                totals.with_controls += 1
                totals.control_rows = [*totals.control_rows, one.row][:CONTROL_ROWS]
                for token in one.controls:
                    totals.controls[token] = totals.controls.get(token, 0) + 1
            totals.closing.update(int(document.tokens[stop - 1]) for _, stop, _ in document.spans)
            add(one.row, document, supervised, one.conversation.carried)

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
        end = next(end for end in ends if content.rstrip().endswith(end))
        messages[at]["content"] = content.rstrip().removesuffix(end)
        removed = len(content) - len(messages[at]["content"])
        if at in pieces:
            size, weight = pieces[at][-1]
            if size < removed:
                raise RowError("mask", f"message {at}: its last part is a piece of the token that closes it")
            pieces[at] = [*pieces[at][:-1], (size - removed, weight)]
        said = content.strip()
        while ended := next((end for end in ends if said.endswith(end)), ""):
            said = said.removesuffix(ended).rstrip()
        if not said and "tool_calls" not in messages[at]:
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
