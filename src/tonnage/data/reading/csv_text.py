"""CSV read record by record, so that damage stays where it is and is said with its size.

What ``csv`` reads without a complaint goes through it. A record that it cannot read, or whose quotes are not in pairs,
is one bad row: a quote that is never closed would turn all rows behind it into one answer. Where such a record ends
is found line by line: a quoted field goes on up to a quote before a separator or the end of a line, so that the lines
of a damaged record never become rows of their own. It may be one record of several lines, or several records that a
quote joined. Nobody can know, and so the bytes of all its lines but the first count as not read.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tonnage.data.reading.json_text import MAX_ROW_BYTES
from tonnage.data.reading.opening import DAMAGED, kind_suffix, not_unpacked, open_file
from tonnage.forms.conversation import RowError

SEPARATORS = {"csv": ",", "tsv": "\t", "semicolons": ";"}
"""Kind of a file -> what stands between its fields."""
_QUOTES = re.compile('"+')

Record = tuple[int, dict[str, Any] | RowError]


def separated_by(file: Path) -> str:
    """The kind of a file of records: that of its ending, unless its header has one column then, but several with
    another separator. Raises any of ``DAMAGED``."""
    usual = kind_suffix(file).removeprefix(".")
    with open_file(file) as opened:
        header = opened.readline(1 << 16).decode("utf-8-sig", "replace").rstrip("\r\n")
    try:
        columns = {kind: len(next(csv.reader([header], delimiter=mark), [])) for kind, mark in SEPARATORS.items()}
    except csv.Error:
        return usual  # which reading will say
    return usual if columns[usual] > 1 else max(columns, key=lambda kind: (columns[kind], kind == usual))


def read_records(file: Path, separator: str) -> Iterator[Record]:
    """The records under the header of a file, numbered from 1."""
    csv.field_size_limit(MAX_ROW_BYTES)
    number = 0
    with (
        open_file(file) as packed,
        io.TextIOWrapper(packed, encoding="utf-8-sig", errors="surrogateescape", newline="") as opened,
    ):
        records = _Records(opened, separator)
        try:
            header = records.next()
            if (wrong := _wrong_header(header)) is not None:
                yield 1, wrong.leaving(file.stat().st_size)
                return
            assert isinstance(header, list)
            while (fields := records.next()) is not None:
                if fields:  # else a blank line
                    number += 1
                    yield number, records.as_row(header, fields) if isinstance(fields, list) else fields
        except DAMAGED as error:
            yield number + 1, not_unpacked(file, error)


def _wrong_header(header: list[str] | RowError | None) -> RowError | None:
    if isinstance(header, RowError):
        return RowError("invalid_csv", f"the header cannot be read ({header.reason})")
    if not header:
        return RowError("invalid_csv", "no header")
    if twice := [name for name, count in Counter(header).items() if name and count > 1]:
        return RowError("invalid_csv", f"the header names a column {twice[0][:60]!r} twice")
    return None


class _Records:
    """Records of CSV, and the lines that each of them is made of."""

    def __init__(self, opened: Iterator[str], separator: str) -> None:
        self._opened, self._separator = opened, separator
        self._line = 0
        """Number of the last line taken, from 1."""
        self._held: list[str] = []
        """Lines of the record that is read."""
        self._reader = csv.reader(self._lines(), delimiter=separator, strict=True)

    def _lines(self) -> Iterator[str]:
        for line in self._opened:
            self._line += 1
            self._held.append(line)
            yield line

    def next(self) -> list[str] | RowError | None:
        """The fields of the next record, none of a blank line; ``None`` at the end. May raise any of ``DAMAGED``."""
        self._held.clear()
        try:
            fields = next(self._reader, None)
        except csv.Error as error:
            return self._damaged(str(error))
        # Without quoting, as files with tabs are often written, a quote is a letter like others.
        if fields and self._separator != "\t" and sum(line.count('"') for line in self._held) % 2:
            return self._damaged("a quote too many, or too few")
        return fields

    def as_row(self, header: list[str], fields: list[str]) -> dict[str, Any] | RowError:
        """The record just read under the names of the header."""
        if len(fields) == len(header):
            return dict(zip(header, fields, strict=True))
        reason = f"{len(fields)} fields where the header has {len(header)}"
        return RowError("invalid_csv", reason) if len(self._held) == 1 else self._damaged(reason)

    def _damaged(self, reason: str) -> RowError:
        """The error for the record that the held lines begin, past its end."""
        first = self._line - len(self._held) + 1
        opened_on, is_open = first, False
        for number, line in enumerate(self._held, first):
            is_open, anew = _open_behind(line, self._separator, is_open)
            opened_on = number if anew else opened_on
        size = sum(map(_num_bytes, self._held[1:]))
        while is_open and (line := next(self._opened, "")):
            self._line += 1
            is_open, anew = _open_behind(line, self._separator, is_open)
            opened_on = self._line if anew else opened_on
            size += _num_bytes(line)
        where = f"line {first}" if self._line == first else f"lines {first} to {self._line}"
        if is_open:
            return RowError(
                "invalid_csv", f"{where}: the quote that opens on line {opened_on} is never closed"
            ).leaving(size)
        return RowError("invalid_csv", f"{where}: {reason}; a quote inside of a field is written twice").leaving(size)


def _open_behind(line: str, separator: str, is_open: bool) -> tuple[bool, bool]:
    """Whether a quoted field goes on behind a line, and whether it opened in that line; ``is_open``: whether the line
    begins inside of one. A quote closes a field before a separator or the end of the line only."""
    text = line.rstrip("\r\n")
    at, anew = 0, False
    while True:
        if not is_open:
            while at >= 0 and not text.startswith('"', at):
                at = text.find(separator, at) + 1 or -1
            if at < 0:
                return False, False
            at, is_open, anew = at + 1, True, True
        quotes = _QUOTES.search(text, at)
        if quotes is None:
            return True, anew
        at = quotes.end()
        is_open = len(quotes[0]) % 2 == 0 or not (at == len(text) or text.startswith(separator, at))


def _num_bytes(line: str) -> int:
    return len(line.encode("utf-8", "surrogateescape"))
