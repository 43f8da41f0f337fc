"""What a config names as data: the sources, the files of each, and the form of their rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tonnage.config import Data, Source
from tonnage.data.reading.rows import Part, first_rows
from tonnage.data.sources.files import resolve
from tonnage.data.sources.hub import Resolved, problem_of, unusable
from tonnage.errors import Problem, UserError
from tonnage.forms.advice import advice
from tonnage.forms.conversation import Conversation, as_row_error
from tonnage.forms.formats import (
    FORMATS,
    PURPOSES,
    Form,
    RowPurpose,
    candidates,
    detect,
    fields_of,
    form_of,
    known_forms,
    nearest_field,
    rename,
)
from tonnage.forms.labelled import COMPLETIONS
from tonnage.forms.preferences import has_turns, other_preference
from tonnage.forms.reader import PATH, SOURCE, Reader, for_chosen
from tonnage.forms.values import as_turns, is_turns, written

OBJECTIVES: dict[RowPurpose, str] = {
    "supervised": "objective: supervised, which learns every answer of such rows",
    "pairs": "objective: dpo, which learns from pairs",
    "verdicts": "objective: kto, which learns from answers that are each good or bad",
}
NEEDED: dict[RowPurpose, str] = {
    "supervised": "a form that is known",
    "pairs": "pairs of answers, as objective.kind wants them",
    "verdicts": "answers with a label each, as objective.kind kto wants them",
}
NO_SUCH: dict[RowPurpose, str] = {
    "supervised": "have answers that are all to be learned",
    "pairs": "are pairs of answers",
    "verdicts": "have an answer each that is good or bad",
}
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
    formats: list[str]
    """Of each source what templates must be able to write: the format of its rows, or one that is written alike."""
    single_turn: bool
    row_bytes: float

    @property
    def parts(self) -> list[Part]:
        return [part for resolved in self.resolved for part in resolved.parts]

    @property
    def files(self) -> list[str]:
        """All files, each once."""
        return list(dict.fromkeys(file for part in self.parts for file in part.files))

    @property
    def total_bytes(self) -> int:
        return sum(Path(file).stat().st_size for file in self.files)

    def key(self, at: int) -> str:
        """The config's key of source number ``at``."""
        side, count = (
            ("train", self.num_train) if at < self.num_train else ("validation", len(self.given) - self.num_train)
        )
        number = at if at < self.num_train else at - self.num_train
        return f"data.{side}" if count == 1 else f"data.{side}.{number}"


def read_sources(options: Data, purpose: RowPurpose = "supervised", *, images: bool = False) -> Sources:
    """All sources with the forms of their rows, which are for ``purpose``; ``images``: whether the model takes any.

    Raises ``UserError`` with the problems of all of them.
    """
    validation = options.validation if isinstance(options.validation, tuple) else ()
    all_sources = options.train + validation
    sources = Sources(all_sources, len(options.train), [], [], [], True, 1.0)
    problems: list[Problem] = []
    single_turn, sizes = True, []
    for index, source in enumerate(all_sources):
        try:
            resolved = resolve(source, index)
            sample, first_bad = _sample(resolved.parts)
            form = _form(source, sources.key(index), sample, first_bad, purpose)
        except UserError as error:
            problems += error.problems
            continue
        sources.resolved.append(resolved)
        sources.forms.append(form)
        sizes += [len(json.dumps(row, default=str)) for row in sample[:16]]
        single_turn &= all(_is_single(conversation) for conversation in _conversations(sample, form, images))
        sources.formats.append(_written_as([rename(row, form.columns) for row in sample], form.format))
    if problems:
        raise UserError(*problems)
    row_bytes = float(np.mean(sizes)) if sizes else 1.0
    return replace(sources, single_turn=single_turn, row_bytes=row_bytes)


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


def _form(source: Source, key: str, sample: Sequence[dict[str, Any]], first_bad: str, purpose: RowPurpose) -> Form:
    """The form of a source, whose key in the config is ``key``. Raises ``UserError``."""
    if source.format != "auto":
        form = form_of(source.format, source.columns, source.roles)
        theirs = FORMATS[form.format].purpose
        if (theirs, purpose) == ("pairs", "supervised"):
            raise _pairs_unasked(source, key, rename(sample[0], form.columns) if sample else {}, form.columns)
        if theirs != purpose:
            change = "leave format and columns of this source out; or " if _are_for(purpose, sample) else ""
            clause = "whose rows are no pairs of answers" if purpose == "pairs" else f"whose rows {NO_SUCH[theirs]}"
            raise _for_others(source, f"format: {source.format}, {clause}", (theirs, purpose), change)
        return _with_settings(form, source)
    if not sample and first_bad:
        change = "mend that row, or take it out of the file"
        raise unusable(source, f"no readable row; the first one: {first_bad}", "at least one row", change)
    if not sample:
        raise unusable(source, "no row", "at least one row")
    renamed = [rename(row, source.columns) for row in sample] if source.columns else list(sample)
    formats = detect(renamed, purpose)
    if purpose == "supervised" and _are_for("pairs", renamed):
        raise _pairs_unasked(source, key, renamed[0], source.columns)
    if len(formats) == 1:
        return _with_settings(Form(formats[0], dict(source.columns), dict(source.roles)), source)
    if not formats:
        raise _of_no_form(source, key, sample[0], renamed, purpose)
    columns = _columns_of(sample[0])
    fitting = [candidates(row, purpose) for row in renamed]
    if len(set(fitting)) > 1 and not set.intersection(*map(set, fitting)):
        first_fits = dict.fromkeys(fits[0] for fits in fitting if fits)
        fault = f"rows of several forms in one file: {', '.join(first_fits)}"
        change = "write the rows of each form to a file of their own"
    else:
        fault = f"rows that fit several forms: {', '.join(formats)} (fields: {columns})"
        change = f"{key}: {written({'path': source.path, 'format': formats[0]})} (or {', '.join(formats[1:])})"
    raise unusable(source, fault, "one form", change)


def _of_no_form(
    source: Source, key: str, row: dict[str, Any], renamed: Sequence[dict[str, Any]], purpose: RowPurpose
) -> UserError:
    """The error for rows that fit no form; ``row`` is the first of them as it lies in the file."""
    columns = _columns_of(row)
    refusal = next((error for named in renamed if (error := other_preference(named)) is not None), None)
    if refusal is not None:
        return unusable(source, refusal.reason, f"{NEEDED[purpose]}: {known_forms(purpose=purpose)}", refusal.change)
    for theirs in (other for other in PURPOSES if other != purpose and purpose != "supervised"):
        if fitting := detect(renamed, theirs):
            fault = f"rows of the form {' or '.join(fitting)} (fields: {columns})"
            return _for_others(source, fault, (theirs, purpose))
    subject, example = {
        "supervised": ("a question and its answer", "{instruction: ..., output: ...}"),
        "pairs": ("a prompt and its two answers", "{prompt: ..., chosen: ..., rejected: ...}"),
        "verdicts": ("a prompt, its answer and its label", "{prompt: ..., completion: ..., label: ...}"),
    }[purpose]
    change = f"map the columns of {subject}: {key}: {{path: {written(source.path)}, columns: {example}}}"
    if source.columns:
        change = "correct columns, which maps our fields to those of the rows"
    change = advice(key, source.path, row, purpose) or change
    fault, needed = f"rows with the fields {columns}", f"a form that is known: {known_forms(purpose=purpose)}"
    return unusable(source, fault, needed, change)


def _columns_of(row: dict[str, Any]) -> str:
    return ", ".join(map(str, list(row)[:20]))


def _are_for(purpose: RowPurpose, rows: Sequence[dict[str, Any]]) -> bool:
    """Whether all rows that have a form at all are for a ``purpose``."""
    are_theirs = [bool(candidates(row, purpose)) for row in rows if candidates(row, purpose) or candidates(row)]
    return bool(are_theirs) and all(are_theirs)


def _pairs_unasked(source: Source, key: str, row: dict[str, Any], columns: Mapping[str, str]) -> UserError:
    """The error for pairs of answers under an objective that learns every answer; ``row`` is one of them, renamed by
    ``columns``."""
    fault = "preferences, of which one answer is chosen and the other one rejected, and objective is supervised"
    needed = "an objective that learns from pairs, or rows whose answers are all to be learned"
    change = for_chosen(row, columns).replace(SOURCE, key).replace(PATH, written(source.path))
    return unusable(source, fault, needed, change)


def _for_others(source: Source, fault: str, purposes: tuple[RowPurpose, RowPurpose], change: str = "") -> UserError:
    """The error for rows that are for something else than the objective: what they are for, and what is wanted.
    ``change`` is what else can be done about it."""
    theirs, ours = purposes
    needed = f"{NEEDED[ours]}: {known_forms(purpose=ours)}"
    return unusable(source, fault, needed, f"{change}{OBJECTIVES[theirs]}")


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
    images = "" if source.images is None else str(Path(source.images).absolute())
    return replace(form, between=source.between, drops_system=source.system == "drop", images=images)


def _conversations(rows: Sequence[dict[str, Any]], form: Form, images: bool) -> Iterator[Conversation]:
    """The conversations of those rows that can be read."""
    reader = Reader(form, images=images)
    for row in rows:
        try:
            yield from reader.read(row)
        except Exception as error:
            as_row_error(error)  # a bad row, which is listed when all rows are read


def _is_single(conversation: Conversation) -> bool:
    return [turn.role for turn in conversation.turns] in ([], ["user", "assistant"])


def _written_as(rows: Sequence[dict[str, Any]], format: str) -> str:
    """The format by which a template is chosen for rows: a completion of messages is as good as messages, and a pair
    of answers as what its first answer would be alone."""
    if format == "completion":
        has_roles = any(
            not isinstance(as_turns(row[name]), str) for row in rows for name in ("prompt", "completion") if name in row
        )
        return "messages" if has_roles else format
    purpose = FORMATS[format].purpose
    if purpose == "supervised":
        return format
    whole = any(is_turns(row.get(name), "role", "from") for row in rows for name in COMPLETIONS)
    if format == "arena" or any(map(has_turns, rows)) or whole:
        return "messages"
    return "alpaca" if rows and all(row.get("instruction") for row in rows) else "completion"
