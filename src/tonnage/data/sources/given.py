"""What a config names as data: the sources, the files of each, and the form of their rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tonnage.config import Data, Source
from tonnage.data.reading.rows import Part, first_rows
from tonnage.data.sources.files import resolve
from tonnage.data.sources.hub import Resolved, problem_of, unusable
from tonnage.errors import Problem, UserError
from tonnage.forms.advice import advice, written
from tonnage.forms.conversation import Conversation, as_row_error
from tonnage.forms.formats import (
    FORMATS,
    Form,
    as_turns,
    candidates,
    detect,
    fields_of,
    form_of,
    known_forms,
    nearest_field,
    rename,
)
from tonnage.forms.reader import Reader

SAMPLED_ROWS = 64
SAMPLED_FILES = 8


@dataclass(frozen=True)
class Sources:
    """All sources, those for validation last."""

    given: tuple[Source, ...]
    num_train: int
    resolved: list[Resolved]
    """Of each source its files and parts."""
    forms: list[Form]
    single_turn: bool
    with_turns: bool
    """Whether completions are lists of messages, and no plain texts."""
    row_bytes: float

    @property
    def parts(self) -> list[Part]:
        """All parts, in order."""
        return [part for resolved in self.resolved for part in resolved.parts]

    @property
    def files(self) -> list[str]:
        """All files, each once."""
        return list(dict.fromkeys(file for part in self.parts for file in part.files))

    @property
    def total_bytes(self) -> int:
        return sum(Path(file).stat().st_size for file in self.files)

    @property
    def formats(self) -> list[str]:
        """What templates must be able to write."""
        return ["messages" if form.format == "completion" and self.with_turns else form.format for form in self.forms]

    def key(self, at: int) -> str:
        """The config's key of source number ``at``."""
        side, count = (
            ("train", self.num_train) if at < self.num_train else ("validation", len(self.given) - self.num_train)
        )
        number = at if at < self.num_train else at - self.num_train
        return f"data.{side}" if count == 1 else f"data.{side}.{number}"


def read_sources(options: Data) -> Sources:
    """All sources with the forms of their rows. Raises ``UserError`` with the problems of all of them."""
    validation = options.validation if isinstance(options.validation, tuple) else ()
    all_sources = options.train + validation
    sources = Sources(all_sources, len(options.train), [], [], True, False, 1.0)
    problems: list[Problem] = []
    single_turn, with_turns, sizes = True, False, []
    for index, source in enumerate(all_sources):
        try:
            resolved = resolve(source, index)
            sample, first_bad = _sample(resolved.parts)
            form = _form(source, sources.key(index), sample, first_bad)
        except UserError as error:
            problems += error.problems
            continue
        sources.resolved.append(resolved)
        sources.forms.append(form)
        sizes += [len(json.dumps(row, default=str)) for row in sample[:16]]
        single_turn &= all(_is_single(conversation) for conversation in _conversations(sample, form))
        with_turns |= any(_has_turns(rename(row, form.columns)) for row in sample)
    if problems:
        raise UserError(*problems)
    row_bytes = float(np.mean(sizes)) if sizes else 1.0
    return replace(sources, single_turn=single_turn, with_turns=with_turns, row_bytes=row_bytes)


def _sample(parts: Sequence[Part]) -> tuple[list[dict[str, Any]], str]:
    """The first readable rows of each of the first files, and why the first unreadable row is unreadable."""
    rows: list[dict[str, Any]] = []
    row_counts: dict[str, int] = {}
    first_bad = ""
    for part in parts:
        count = row_counts.get(part.file, 0)
        # A file's first part may hold no readable row.
        if count or (part.file not in row_counts and len(row_counts) >= SAMPLED_FILES):
            continue
        for number, row in first_rows(part):
            if isinstance(row, dict):
                rows.append(row)
                count += 1
            else:
                first_bad = first_bad or f"{part.file}:{number}: {row.reason}"
            if count >= SAMPLED_ROWS or number >= 16 * SAMPLED_ROWS:
                break
        row_counts[part.file] = count
    return rows, first_bad


def _form(source: Source, key: str, sample: Sequence[dict[str, Any]], first_bad: str) -> Form:
    if source.format != "auto":
        return _with_settings(form_of(source.format, source.columns, source.roles), source)
    if not sample and first_bad:
        change = "mend that row, or take it out of the file"
        raise unusable(source, f"no readable row; the first one: {first_bad}", "at least one row", change)
    if not sample:
        raise unusable(source, "no row", "at least one row")
    renamed = [rename(row, source.columns) for row in sample] if source.columns else list(sample)
    formats = detect(renamed)
    if len(formats) == 1:
        return _with_settings(Form(formats[0], dict(source.columns), dict(source.roles)), source)
    columns = ", ".join(map(str, list(sample[0])[:20]))
    if not formats:
        columns_key = f"{key}: {{path: {written(source.path)}, columns: {{instruction: ..., output: ...}}}}"
        change = f"map the columns of a question and its answer: {columns_key}"
        if source.columns:
            change = "correct columns, which maps our fields to those of the rows"
        change = advice(key, source.path, sample[0]) or change
        raise unusable(source, f"rows with the fields {columns}", f"a form that is known: {known_forms()}", change)
    fitting = [candidates(row) for row in renamed]
    if len(set(fitting)) > 1 and not set.intersection(*map(set, fitting)):
        first_fits = dict.fromkeys(fits[0] for fits in fitting if fits)
        fault = f"rows of several forms in one file: {', '.join(first_fits)}"
        change = "write the rows of each form to a file of their own"
    else:
        fault = f"rows that fit several forms: {', '.join(formats)} (fields: {columns})"
        change = f"{key}: {written({'path': source.path, 'format': formats[0]})} (or {', '.join(formats[1:])})"
    raise unusable(source, fault, "one form", change)


def _with_settings(form: Form, source: Source) -> Form:
    """The form with the settings of its source. Raises ``UserError`` for those that do not fit it."""
    problems = []
    for ours in source.columns:
        if ours not in fields_of(form.format):
            near = nearest_field(ours, form.format)
            fault = f"columns names a field {ours!r}, which rows of form {form.format} do not have"
            needed = f"one of {', '.join(fields_of(form.format))}"
            problems.append(problem_of(source, fault, needed, f"did you mean {near}?" if near else ""))
    if problems:
        raise UserError(*problems)
    if source.system == "drop" and not FORMATS[form.format].is_chat:
        raise unusable(source, f"system: drop for rows of form {form.format}", "conversations", "leave system out")
    return replace(form, between=source.between, drops_system=source.system == "drop")


def _conversations(rows: Sequence[dict[str, Any]], form: Form) -> Iterator[Conversation]:
    """The conversations of those rows that can be read."""
    reader = Reader(form)
    for row in rows:
        try:
            yield from reader.read(row)
        except Exception as error:
            as_row_error(error)  # a bad row, which is listed when all rows are read


def _is_single(conversation: Conversation) -> bool:
    return [turn.role for turn in conversation.turns] in ([], ["user", "assistant"])


def _has_turns(row: dict[str, Any]) -> bool:
    """Whether a prompt or a completion is messages, which have roles, and no plain text."""
    return any(not isinstance(as_turns(row[name]), str) for name in ("prompt", "completion") if name in row)
