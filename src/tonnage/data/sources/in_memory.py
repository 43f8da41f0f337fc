"""Rows that lie in memory, written once into the cache: JSON lines under the hash of their content.

    rows/HASH/rows-in-memory.jsonl

From there they are rows of a file like any other: a run that goes on finds them, and the same rows have the same name.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tonnage.errors import UserError, refusals, user_error
from tonnage.host.cachedir import default_directory, room_for, trusted

FILE = "rows-in-memory.jsonl"
SHOWN = "rows in memory"
"""How an account names them."""


def keep_rows(rows: Any, cache: Path | None = None) -> Path:
    """Write rows into the cache, unless they are there already; returns the file.

    ``rows`` is a pandas or polars frame (a row each), or any iterable of dictionaries, such as a list, a generator or a
    ``datasets.Dataset``; it is gone through once. Arrays are lists, dates are text in ISO form, and what pandas says is
    missing is null.

    Raises:
        UserError: a row is no dictionary or holds what JSON cannot (named by its number, from 0, and field), there is
            none, or the cache cannot be written.
    """
    root = default_directory() if cache is None else cache
    folder = trusted(root, "rows")
    with refusals(f"{SHOWN} could not be written", folder):
        room_for(folder / "x")
        folder.mkdir(exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=f".{os.getpid()}", dir=folder)
        content = hashlib.blake2b(digest_size=16)
        try:
            with os.fdopen(descriptor, "wb") as file:
                for line in _lines(rows):
                    content.update(line)
                    file.write(line)
            path = trusted(root, "rows", content.hexdigest()) / FILE
            if not path.exists():
                room_for(path)
                Path(name).chmod(0o644)
                Path(name).replace(path)
            return path
        finally:
            with suppress(OSError):
                Path(name).unlink(missing_ok=True)


def plain_rows(rows: Any) -> list[dict[str, Any]]:
    """The same rows as those of ``keep_rows`` would be read, without a file. Raises ``UserError`` as it does."""
    return [json.loads(line) for line in _lines(rows)]


def shown_name(path: str) -> str:
    """What an account calls a source: its path, or ``SHOWN`` for rows that lay in memory."""
    return SHOWN if Path(path).name == FILE and Path(path).parent.parent.name == "rows" else path


def _lines(rows: Any) -> Iterator[bytes]:
    number = -1
    for number, row in enumerate(_each(rows)):
        if not isinstance(row, Mapping):
            raise _refused(number, f"is a {type(row).__name__}", "a dictionary: fields and their values")
        try:
            line = _json(row)
        except (TypeError, ValueError, RecursionError) as error:
            needed = "text, numbers that are finite, dates, lists and dictionaries of these"
            raise _refused(number, f"holds{_field_of(row)} what JSON cannot: {error}", needed) from None
        yield line
    if number < 0:
        raise user_error("no row", "at least one row", where=SHOWN)


def _json(row: Mapping[Any, Any]) -> bytes:
    return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_as_json).encode() + b"\n"


def _each(rows: Any) -> Iterable[Any]:
    if callable(as_dicts := getattr(rows, "to_dicts", None)):  # polars
        return as_dicts()  # type: ignore[no-any-return]
    if hasattr(rows, "columns") and callable(getattr(rows, "to_dict", None)):  # pandas
        return ({key: _unless_missing(value) for key, value in row.items()} for row in rows.to_dict("records"))
    if not isinstance(rows, Iterable):
        raise user_error(
            f"a {type(rows).__name__}", "a path, or rows: dictionaries, a frame or a data set", where="data"
        )
    return rows


def _unless_missing(value: Any) -> Any:
    """None for what is not equal to itself, as pandas marks what is missing (NaN, NaT)."""
    try:
        return None if value is None or value != value or type(value).__name__ == "NAType" else value
    except (TypeError, ValueError):  # an array, or pandas' NA, of which nobody knows
        return None if type(value).__name__ == "NAType" else value


def _as_json(value: Any) -> Any:
    """What ``json`` does not know itself. Raises ``TypeError``."""
    if callable(as_list := getattr(value, "tolist", None)):
        return as_list()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__}")


def _field_of(row: Mapping[Any, Any]) -> str:
    for name, value in row.items():
        try:
            _json({name: value})
        except (TypeError, ValueError, RecursionError):
            return f" in {str(name)[:60]!r}"
    return ""


def _refused(number: int, found: str, needed: str) -> UserError:
    return user_error(f"row {number} {found}", needed, where=SHOWN)
