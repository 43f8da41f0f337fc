"""Files that anybody may have written, read within bounds: regular, of a size that is known to be enough, and as typed.

    read_text      a text file that people write: a config, a script
    read_record    a JSON file that we wrote, checked like a config: a value of another type is a sentence that names it

What a JSON file must hold is a dataclass, whose types pydantic checks strictly: those without a default must be there.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tonnage.errors import Problem, UserError, user_error
from tonnage.files.visible import shortened

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

PIPE_SECONDS = 10.0
"""For a pipe to be written and closed: ``<(command)`` in a shell is one."""
WRITER_SECONDS = 0.5
"""For somebody to open it for writing."""
LOOK_SECONDS = 0.02
RECORD_BYTES = 256 << 20
"""Largest file of JSON that is read: the account of a hundred thousand sources."""
DEEPEST = 100
"""Levels of JSON."""
LARGEST_INTEGER = 2**63
LARGEST_NUMBER = 1e100
"""Beyond these nothing is counted or measured."""
WRITTEN = "the file as it was written"
SHOWN_PROBLEMS = 3


class NotJson(UserError):
    """What was read as JSON is none; half of it, perhaps."""


def read_text(path: Path, most_bytes: int, needed: str) -> str:
    """A text file in UTF-8 of at most ``most_bytes``. A pipe is read to its end if that comes soon.

    Raises:
        UserError: it is none, is not there or cannot be read; ``needed`` says what it should be.
        FileNotFoundError, NotADirectoryError, IsADirectoryError: left to callers, who know what is near.
    """
    try:
        return read_bytes(path, most_bytes, needed).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        observed = f"byte {error.start:,} (0x{error.object[error.start]:02x}) is not UTF-8"
        raise user_error(observed, f"{needed}, which is UTF-8 text", where=str(path)) from None


def read_bytes(path: Path, most_bytes: int, needed: str) -> bytes:
    """A file of at most ``most_bytes``. Raises as ``read_text``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:  # a NUL in a path is a ValueError
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise user_error(f"cannot be read: {why}", f"a readable file: {needed}", where=str(path)) from None
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError
        if stat.S_ISFIFO(kind):
            return _read_pipe(descriptor, path, most_bytes, needed)
        if not stat.S_ISREG(kind):
            raise user_error("a device or a socket", f"a regular file: {needed}", where=str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            size = max(os.fstat(descriptor).st_size, len(content))
            raise user_error(f"{size:,} bytes", f"{needed}, of at most {most_bytes:,} bytes", where=str(path))
        return content
    except IsADirectoryError:
        raise
    except OSError as error:
        observed = f"cannot be read: {error.strerror}"
        raise user_error(observed, f"a readable file: {needed}", where=str(path)) from None
    finally:
        os.close(descriptor)


def _read_pipe(descriptor: int, path: Path, most_bytes: int, needed: str) -> bytes:
    """What is written into a pipe until its last writer closes it."""
    began, content = time.monotonic(), b""
    while time.monotonic() - began < PIPE_SECONDS:
        try:
            piece = os.read(descriptor, 1 << 16)
        except BlockingIOError:  # somebody has it open and has not written yet
            time.sleep(LOOK_SECONDS)
            continue
        content += piece
        if len(content) > most_bytes:
            observed = f"a pipe of more than {most_bytes:,} bytes"
            raise user_error(observed, f"{needed}, of at most {most_bytes:,} bytes", where=str(path))
        if not piece:
            if content or time.monotonic() - began > WRITER_SECONDS:
                break  # its writers are gone, or there is none
            time.sleep(LOOK_SECONDS)
    else:
        observed = f"a pipe whose writer has not closed it after {PIPE_SECONDS:g} s"
        raise user_error(observed, f"a regular file: {needed}", where=str(path))
    if not content:
        raise user_error("a pipe into which nobody writes", f"a regular file: {needed}", where=str(path))
    return content


def read_record(path: Path, kind: type[T]) -> T:
    """A JSON file as a ``kind``, which is a dataclass. Keys that it has not are passed over.

    Raises:
        UserError: it is not there, is no JSON, or a value is not of its type; names file and key.
    """
    return parse_record(_content(path), kind, str(path))


def read_object(path: Path, kind: type[Any]) -> dict[str, Any]:
    """A JSON object as it was written, once it is known to fit a ``kind``. Raises as ``read_record``."""
    return parse_object(_content(path), kind, str(path))


def parse_record(content: bytes | str, kind: type[T], where: str) -> T:
    """JSON as a ``kind``. Raises as ``read_record``."""
    return _parse(content, kind, where)[1]


def parse_object(content: bytes | str, kind: type[Any], where: str) -> dict[str, Any]:
    """A JSON object as it was written, once it is known to fit a ``kind``. Raises as ``read_record``."""
    mapping = _parse(content, kind, where)[0]
    assert isinstance(mapping, dict)
    return mapping


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, RECORD_BYTES, WRITTEN)
    except OSError as error:
        observed = "a directory" if isinstance(error, IsADirectoryError) else "no such file"
        raise UserError(_unreadable(path, observed)) from None


def _parse(content: bytes | str, kind: type[T], where: str) -> tuple[Any, T]:
    from pydantic import ValidationError

    try:
        plain = json.loads(content, parse_constant=_no_number)
        _check_numbers(plain)
        fitting: T = _adapter(cast(Any, kind)).validate_json(content, strict=True)
    except ValidationError as error:
        raise UserError(*_mistyped(error, where)) from None
    except RecursionError:
        raise UserError(_unreadable(where, f"JSON of more than {DEEPEST} levels")) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise NotJson(_unreadable(where, f"no JSON: {shortened(str(error))}")) from None
    except ValueError as error:
        observed = "a number of thousands of digits" if "int_max_str_digits" in str(error) else str(error)
        raise UserError(_unreadable(where, observed)) from None
    return plain, fitting


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _check_numbers(value: Any, level: int = 0) -> None:
    """Refuse numbers with which nobody can reckon, and what is too deep. Raises ``ValueError``, ``RecursionError``."""
    if level > DEEPEST:
        raise RecursionError
    match value:
        case dict() | list():
            for item in value.values() if isinstance(value, dict) else value:
                _check_numbers(item, level + 1)
        case bool() | str() | None:
            pass
        case int() if abs(value) >= LARGEST_INTEGER:
            raise ValueError(f"the number {shortened(str(value))} is too large")
        case float() if not math.isfinite(value) or abs(value) > LARGEST_NUMBER:
            raise ValueError(f"the number {value:g} is too large")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _mistyped(error: ValidationError, where: str) -> list[Problem]:
    errors = error.errors(include_url=False)
    problems = []
    for wrong in errors[:SHOWN_PROBLEMS]:
        key = ".".join(map(str, wrong["loc"]))
        if wrong["type"] == "missing":
            problems.append(_unreadable(where, f"{shortened(key)} is missing"))
        else:
            value = shortened(json.dumps(wrong["input"], default=str))
            shown = f"{shortened(key)} is {value}" if key else "no such record"
            problems.append(_unreadable(where, shown, needed=str(wrong["msg"]).removeprefix("Input should be ")))
    if len(errors) > SHOWN_PROBLEMS:
        problems.append(_unreadable(where, f"{len(errors) - SHOWN_PROBLEMS} more values like that"))
    return problems


def _unreadable(where: str | Path, observed: str, needed: str = WRITTEN) -> Problem:
    return Problem(observed, needed, "restore it from a copy, or use another run or checkpoint", str(where))
