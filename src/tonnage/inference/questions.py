"""Rows of a file as questions, each with the answer it holds, if any.

All forms of rows that can be trained on are understood, by the data room's own code. A row may also lack its
answer: that is what one is asked for. The question is everything before the last thing the assistant says. Of a pair
the preferred answer is expected, and none where the row says that its answer is undesirable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tonnage.config import Source
from tonnage.data.images.opening import located
from tonnage.data.reading.rows import Part, lines_of, read_rows
from tonnage.data.sources.files import resolve
from tonnage.errors import Problem, UserError, user_error
from tonnage.forms.conversation import Conversation, Image, RowError, as_row_error
from tonnage.forms.formats import FORMATS, PURPOSES, Form, candidates, form_of, known_forms, rename
from tonnage.forms.images import MARK
from tonnage.forms.reader import Reader

MOST_TOLD = 5
"""Rows that cannot be asked, of those that a refusal names."""
_UNANSWERED = "?"


@dataclass(frozen=True)
class Question:
    """What a model is asked, and what it should say."""

    row: Mapping[str, Any]
    """The row as it lies in the file."""
    format: str
    conversation: Conversation
    """Messages before the answer."""
    answer: str | None
    """What the row says the answer is."""


def read_questions(sources: Sequence[Source], limit: int | None = None, *, images: bool = False) -> list[Question]:
    """Questions of the first ``limit`` rows (all of them by default); ``images``: whether they may hold some, of which
    every path then leads to a file, within the folder that it may not leave.

    Raises:
        UserError: a file is missing or of no known kind, or rows cannot be understood; lists the first of them.
    """
    questions: list[Question] = []
    problems: list[Problem] = []
    rows = ((source, *row) for index, source in enumerate(sources) for row in _rows_of(resolve(source, index).parts))
    for source, where, row in islice(rows, limit):
        try:
            if isinstance(row, RowError):
                raise row
            questions += _questions(row, source, Path(where.rpartition(":")[0]), images)
        except Exception as error:
            problems.append(Problem(as_row_error(error).reason, "a row that can be asked", where=where))
    if problems:
        more = [Problem(f"{len(problems) - MOST_TOLD} more rows like these", "rows that can be asked")]
        raise UserError(*problems[:MOST_TOLD], *(more if len(problems) > MOST_TOLD else []))
    if not questions:
        raise user_error("no rows", "at least one", where=", ".join(source.path for source in sources))
    return questions


def _rows_of(parts: Sequence[Part]) -> Iterator[tuple[str, dict[str, Any] | RowError]]:
    """Rows with the places where they stand."""
    file, before = "", 0
    for part in parts:
        before = before if part.file == file else 0
        file = part.file
        for number, row in read_rows(part):
            yield f"{file}:{before + number}", row
        before += lines_of(part) if part.kind == "lines" else 0


def _questions(row: Mapping[str, Any], source: Source, file: Path, images: bool) -> list[Question]:
    """What a row of a ``file`` asks: one question, or more of a tree. Raises ``RowError``."""
    form = form_of(source.format, source.columns, source.roles)
    filled, fitting, answered = _understood(rename(row, form.columns) if form.columns else row, form.format)
    if len(fitting) != 1:
        columns = ", ".join(map(str, list(row)[:12]))
        forms = "; ".join(known_forms(only_chat=True, purpose=purpose) for purpose in PURPOSES)
        fits = f"fits several forms: {', '.join(fitting)}" if fitting else f"fits no form: {forms}"
        raise RowError("unknown_form", f"a row with the fields {columns} {fits}")
    named = {name: name for name in form.columns}  # they bear our names by now
    conversations = Reader(Form(fitting[0], named, form.roles), images=images).read(filled)
    questions = [_question(row, fitting[0], conversation, answered) for conversation in conversations]
    folder = file.absolute().parent if source.images is None else Path(source.images).absolute()
    for question in questions:
        own = question.conversation
        own.images = [Image(str(located(image.path, folder))) if image.path else image for image in own.images]
    return questions


def _question(row: Mapping[str, Any], format: str, conversation: Conversation, answered: bool) -> Question:
    if not conversation.is_chat:
        raise RowError("no_question", "a row of plain text asks nothing")
    last = max(at for at, turn in enumerate(conversation.turns) if turn.role == "assistant")
    if not last:
        raise RowError("no_question", "nothing stands before the assistant's answer")
    is_expected = answered and conversation.carried != (0.0,)  # which says that it is undesirable
    answer = conversation.turns[last].message["content"] if is_expected else None
    before = conversation.turns[:last]
    number = sum(turn.message["content"].count(MARK) for turn in before) if conversation.images else 0
    question = Conversation(before, conversation.tools, images=conversation.images[:number])
    return Question(row, format, question, answer)


def _understood(row: Mapping[str, Any], format: str) -> tuple[Mapping[str, Any], tuple[str, ...], bool]:
    """A row with an answer put in where it has none, the formats that it may have, and whether it had an answer.
    ``format`` is that of its source."""
    judged = candidates(row, "pairs") or candidates(row, "verdicts")
    if format != "auto":
        judged = () if FORMATS[format].purpose == "supervised" else (format,)
    if judged:
        return row, judged, True
    filled, answered = _filled(row, candidates(row) if format == "auto" else ())
    return filled, candidates(filled) if format == "auto" else (format,), answered


def _filled(row: Mapping[str, Any], formats: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """A row with an answer put in where it has none, and whether it had one. ``formats`` are those that the row has as
    it is: no field is added to make it fit another one too."""
    filled = dict(row)
    for question, answer in (("instruction", "output"), ("prompt", "completion")):
        if isinstance(row.get(question), str | list) and (answer in row or not formats):
            answered = bool(row.get(answer))
            filled[answer] = row[answer] if answered else _UNANSWERED
            return filled, answered
    for name in ("messages", "conversations"):
        turns = row.get(name)
        if isinstance(turns, list) and turns and isinstance(turns[-1], dict):
            key, content = ("role", "content") if "role" in turns[-1] else ("from", "value")
            if turns[-1].get(key) in ("system", "user", "human", "tool"):
                filled[name] = [*turns, {key: "assistant", content: _UNANSWERED}]
                return filled, False
    return filled, True
