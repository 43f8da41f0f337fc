"""Refuses data that were read and must not be trained on as they are, because the options forbid it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from tonnage.config import Data
from tonnage.data.account import Account
from tonnage.data.selection import most_first
from tonnage.data.sources.given import Sources
from tonnage.data.sources.hub import problem_of
from tonnage.data.tokens.documents import Documents, half_read_files
from tonnage.errors import Problem, UserError
from tonnage.forms.formats import FORMATS, RowPurpose
from tonnage.forms.reader import PATH, SOURCE
from tonnage.forms.values import written
from tonnage.forms.verdicts import verdict_of

SHOWN_ROWS = 20


class DataError(UserError):
    """The data were read, but must not be trained on as they are. ``account`` says what is in them."""

    def __init__(self, account: Account, *problems: Problem) -> None:
        self.account = account
        super().__init__(*problems)


def refuse(account: Account, options: Data, documents: Documents, sources: Sources, most_positions: int | None) -> None:
    """Raise ``DataError`` with all that the options forbid. No ``max_length`` beyond ``most_positions`` is advised."""
    problems = list(_columns_never_seen(documents, sources))
    if not options.carry:  # with it, a loss of one's own gets numbers of rows, and may learn from both kinds
        problems += _verdicts(documents, sources)
    half_read = list(_half_read(documents, options))
    whole = account.total
    if whole.rows_bad and options.on_bad_row == "error":
        problems += _bad_rows(account, documents, sources, can_skip=not half_read)
    problems += half_read
    if options.over_length == "error" and whole.rows_dropped:
        (purpose,) = {FORMATS[form.format].purpose for form in sources.forms}
        problems.append(_too_long(account, options, most_positions, purpose))
    elif account.supervised_loss > options.max_loss:
        is_longest = (most_positions or math.inf) <= options.max_length
        problems.append(
            Problem(
                found=f"over_length: {options.over_length} would lose {whole.supervised.cut:,} of "
                f"{whole.supervised.read:,} supervised tokens ({account.supervised_loss:.2%})",
                needed=f"at most {options.max_loss:.2%}",
                change=f"data.max_loss: {math.ceil(account.supervised_loss * 1000) / 1000:g}"
                + ("" if is_longest else ", or a larger data.max_length"),
                where="data.max_loss",
            )
        )
    if problems:
        raise DataError(account, *problems)
    if account.train.packs == 0:
        change = "a smaller data.min_length" if options.min_length > 1 else ""
        raise DataError(account, Problem("no row is left to train on", "at least one", change, where="data.train"))
    if account.validation is None and isinstance(options.validation, tuple):
        raise DataError(account, Problem("no row is left to validate on", "at least one", where="data.validation"))
    if account.validation is None and options.validation:
        fault = "too few different rows to set some aside"
        raise DataError(account, Problem(fault, "at least two", where="data.validation"))


def _too_long(account: Account, options: Data, most_positions: int | None, purpose: RowPurpose) -> Problem:
    """Rows that are longer than ``max_length``, where none may be. Rows of preferences are never cut."""
    whole = account.total
    share = whole.supervised.cut / max(whole.supervised.read, 1)
    longest = max(source.lengths.longest for source in account.sources)
    can_grow = most_positions is None or longest <= most_positions
    rows = {"supervised": "rows", "pairs": "pairs", "verdicts": "rows with an answer of another one"}[purpose]
    limit = "" if can_grow else f"; the model has positions for {most_positions:,} tokens"
    drop = "data.over_length: drop" + (" (or truncate, split)" if purpose == "supervised" else "")
    return Problem(
        found=f"{whole.rows_dropped:,} of {whole.rows_read:,} {rows} are longer than {options.max_length:,} "
        f"tokens (the longest has {longest:,}); they hold {share:.2%} of the supervised tokens",
        needed=f"{rows} that fit{limit}",
        change=(f"data.max_length: {longest}, or " if can_grow else "") + drop,
        where="data.max_length",
    )


def _columns_never_seen(documents: Documents, sources: Sources) -> Iterator[Problem]:
    """Columns that a source names and no row of it has."""
    for at, (source, form) in enumerate(zip(sources.given, sources.forms, strict=True)):
        columns = most_first(part.totals.columns for part in documents.parts if part.source == at)
        for ours, theirs in form.columns.items():
            if theirs not in columns and ours not in form.optional:
                fault = f"columns says that {ours!r} stands in {theirs!r}, and no row has such a column"
                yield problem_of(source, fault, "a column of the rows", "correct it, or leave it out")


def _verdicts(documents: Documents, sources: Sources) -> Iterator[Problem]:
    """Columns that say which answers are good ones, where all of them would be trained."""
    for at, (source, form) in enumerate(zip(sources.given, sources.forms, strict=True)):
        values_by_column: dict[str, Counter[str]] = {}
        for part in documents.parts:
            for column, values in part.totals.values.items() if part.source == at else ():
                values_by_column.setdefault(column, Counter()).update(values)
        for column, counts in values_by_column.items():
            if verdict := verdict_of(column, counts, plain_text=not FORMATS[form.format].is_chat):
                yield problem_of(source, verdict.found, "answers that are all to be learned", verdict.change)


def _half_read(documents: Documents, options: Data) -> Iterator[Problem]:
    """Files of which more is not read than may be lost."""
    for damaged in half_read_files(documents):
        share = damaged.unread_bytes / max(damaged.file_bytes, 1)
        if share > options.max_loss:
            yield Problem(
                found=f"{share:.2%} of the file's {damaged.file_bytes:,} bytes are not read: {damaged.reason}",
                needed=f"at most {options.max_loss:.2%} of a file",
                change=f"mend the file, or data.max_loss: {math.ceil(share * 1000) / 1000:g}",
                where=f"{damaged.file}:{damaged.row}",
            )


def _bad_rows(account: Account, documents: Documents, sources: Sources, *, can_skip: bool) -> Iterator[Problem]:
    """A problem per reason why rows are bad, then one with their number; ``can_skip``: whether skipping them helps."""
    alike: dict[tuple[int, str], list[tuple[str, int]]] = {}
    changes: dict[tuple[int, str], str] = {}
    for part, bad in documents.bad_rows():
        alike.setdefault((part.source, bad.reason), []).append(part.where(bad.row))
        changes[part.source, bad.reason] = bad.change
    for (at, reason), places in list(alike.items())[:SHOWN_ROWS]:
        file, number = places[0]
        near = [other for name, other in places[1:4] if name == file]
        others = f" and {len(places) - 1 - len(near):,} more" if len(places) - 1 > len(near) else ""
        where = f"{file}:{number}" + "".join(f", :{other}" for other in near) + others
        change = changes[at, reason].replace(SOURCE, sources.key(at)).replace(PATH, written(sources.given[at].path))
        yield Problem(found=reason, needed="a row that can be trained on", change=change, where=where)
    whole = account.total
    listed = f"; {SHOWN_ROWS} of {len(alike):,} reasons are above" if len(alike) > SHOWN_ROWS else ""
    yield Problem(
        found=f"{whole.rows_bad:,} of {whole.rows_read:,} rows are bad{listed}; all are in {account.bad_rows_file}",
        needed="none",
        change="mend them"
        + (", or set data.on_bad_row: skip (they are counted and listed in any case)" if can_skip else ""),
        where="data.on_bad_row",
    )
