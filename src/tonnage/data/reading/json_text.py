"""JSON files of any layout, read one value at a time in bounded memory.

Five layouts are told apart by their beginning (``layout_of``):

    lines      a value on each line
    array      [{...}, {...}]
    values     objects one after another, printed over several lines
    holder     one object, of which one field is the array: {"version": 1, "data": [{...}, ...]}
    row        one object, which is the only row

Everything but lines is read through a window that slides over the text and holds one value at a time.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tonnage.data.reading.opening import DAMAGED, open_file
from tonnage.errors import user_error
from tonnage.forms.conversation import RowError
from tonnage.forms.formats import PURPOSES, candidates
from tonnage.forms.turns import LISTS

MAX_ROW_BYTES = 16 << 20
"""A row of more than 16 MiB is refused: no context holds it, and reading it would cost a gigabyte."""
HEAD_BYTES = 1 << 16
BLOCK_BYTES = 1 << 20
"""Taken from a file at a time."""
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_OTHER_LISTS = "contents segments instances tools functions history replies context image images"
_ANSWERS = "prompt completion chosen rejected conversation_a conversation_b"
_OF_A_ROW = frozenset((*LISTS, *_OTHER_LISTS.split(), *_ANSWERS.split()))
"""Fields of a row that are lists of objects."""
_SPACE = " \t\r\n"


class Damaged(Exception):
    """The text is no JSON from here on, and nobody knows where the next value begins."""

    def __init__(self, error: RowError) -> None:
        self.error = error


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object from its fields. Raises ``RowError`` where one stands twice: nobody knows which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError("invalid_json", f"field {twice[:60]!r} stands twice in one object")
    return found


def as_row(value: object) -> dict[str, Any] | RowError:
    """A value as a row: an object, or a list of messages, which is a row with no other field."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        return {"messages": value}
    what = {str: "a string", list: "a list", bool: "true/false", type(None): "null"}.get(type(value), "a number")
    hint = ': write {"text": "..."}' if isinstance(value, str) else ""
    return RowError("wrong_type", f"the row is {what}, not an object with fields{hint}")


def too_large(size: int, more: str = "", most: int | None = None) -> RowError:
    return RowError("too_large", f"the row has {size:,}{more} bytes; at most {most or MAX_ROW_BYTES:,} are read")


class Window:
    def __init__(self, opened: IO[bytes]) -> None:
        self._file: Any = opened
        self._characters = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._num_bytes = 0
        """Taken from the file until now."""
        self._failure: BaseException | None = None
        """What the file raised when the bytes before were taken."""
        self._decode = json.JSONDecoder(object_pairs_hook=unique).raw_decode
        self._text, self._at, self._ended = "", 0, False
        self._lines, self._counted = 1, 0
        """Line breaks before ``_counted``, and one."""

    @property
    def line(self) -> int:
        """The line that the next value begins on, from 1."""
        self.peek()
        self._lines += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._lines

    def peek(self) -> str:
        """The next character that is no white space; nothing at the end. Raises ``Damaged``."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def take(self) -> str:
        """``peek``, and go past it."""
        character = self.peek()
        self._at += len(character)
        return character

    def value(self) -> Any:
        """The next value. Raises ``RowError`` for one that is read but cannot be used, ``Damaged`` for none."""
        first = self.peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except RecursionError:
                raise Damaged(RowError("invalid_json", "nested too deeply")) from None
            except RowError as error:
                self._skip(error)
                raise
            except ValueError as error:
                if len(self._text) - self._at > MAX_ROW_BYTES:
                    raise Damaged(too_large(len(self._text) - self._at, " or more")) from None
                if self._more():
                    continue
                reason = getattr(error, "msg", str(error))
                kind = "truncated" if first in ("{", "[", '"') and self._ended else "invalid_json"
                raise Damaged(RowError(kind, f"not JSON ({reason})")) from None
            if end == len(self._text) and self._more():
                continue
            self._at = end
            return value

    def elements(self) -> Iterator[tuple[int, Any]]:
        """The elements of the array that comes next, numbered from 1, ``RowError`` in the place of what is none; goes
        past its end. Raises ``Damaged``."""
        self.take()
        number = 0
        while (character := self.peek()) != "]":
            if number and character:
                if character != ",":
                    raise Damaged(RowError("invalid_json", f"found {character!r} instead of a comma"))
                self.take()
                character = self.peek()
            if not character:
                raise Damaged(RowError("truncated", "the file ends before the array does"))
            number += 1
            try:
                yield number, self.value()
            except RowError as error:
                yield number, error
        self.take()

    def field(self) -> str:
        """The name of the next field of an object, past its colon; nothing at the object's end. Raises ``Damaged``."""
        if self.peek() == ",":
            self.take()
        if self.peek() in ("}", ""):
            return ""
        if self.peek() == '"':
            name = str(self.value())
            if self.take() == ":":
                return name
        raise Damaged(RowError("invalid_json", "not JSON (a field without a name)"))

    def skip(self) -> None:
        """Go past the next value, of a list one element at a time. Raises ``Damaged``."""
        if self.peek() == "[":
            for _ in self.elements():
                pass
            return
        with suppress(RowError):
            self.value()

    def unread(self, file_bytes: int) -> int:
        """How many of the ``file_bytes`` of the file lie behind this place; of a packed file, in proportion to what is
        unpacked, and all of them where it cannot be unpacked to its end, since its check sums stand there."""
        left = len(self._text[self._at :].encode("utf-8", "surrogateescape")) + len(self._characters.getstate()[0])
        try:
            if self._failure is not None:
                raise self._failure
            while block := self._file.read1(BLOCK_BYTES):
                left, self._num_bytes = left + len(block), self._num_bytes + len(block)
        except DAMAGED:
            return file_bytes
        return min(file_bytes, round(file_bytes * left / max(self._num_bytes, 1)))

    def _skip(self, error: RowError) -> None:
        """Go past a value that decodes, but not into something of use."""
        try:
            _, self._at = json.JSONDecoder().raw_decode(self._text, self._at)
        except ValueError:
            raise Damaged(error) from None

    def _more(self) -> bool:
        if self._ended:
            return False
        block = self._block(max(BLOCK_BYTES, len(self._text) - self._at))
        self._ended = not block
        more = self._characters.decode(block, final=not block)
        self._lines += self._text.count("\n", self._counted, self._at)
        self._text, self._at, self._counted = self._text[self._at :] + more, 0, 0
        return not self._ended or bool(more)

    def _block(self, size: int) -> bytes:
        """The next bytes, up to where the file cannot be read any more; nothing at its end. Raises ``Damaged``."""
        block = bytearray()
        try:
            while self._failure is None and len(block) < size and (more := self._file.read1(size - len(block))):
                block += more
        except DAMAGED as error:
            self._failure = error
        self._num_bytes += len(block)
        if self._failure is not None and not block:
            raise Damaged(RowError("unreadable", f"the file cannot be read from here on ({self._failure})"))
        return bytes(block)


def layout_of(file: Path, split: str) -> tuple[str, str]:
    """The layout of a file, and of a holder the field that holds the rows. Raises ``UserError`` where nobody can know
    which of several fields it is."""
    with open_file(file) as opened:
        head = opened.read(HEAD_BYTES)
    text = head.decode("utf-8-sig", "replace").lstrip(_SPACE)
    line, newline, rest = text.partition("\n")
    whole_line = bool(newline) or len(head) < HEAD_BYTES
    first = _parsed(line) if whole_line else None
    if text.startswith("["):
        if isinstance(first, list):
            on_lines = rest.lstrip(_SPACE).startswith("[") or (not rest.strip() and _is_conversation(first))
            return ("lines" if on_lines else "array"), ""
        return ("lines" if not whole_line and _begins_a_conversation(text) else "array"), ""
    if not text.startswith("{"):
        return "lines", ""
    if isinstance(first, dict) and rest.strip():
        return "lines", ""
    if first is None and whole_line and rest.lstrip(_SPACE).startswith("{"):
        return "lines", ""  # a first line that is broken
    name = _holder(file, split)
    if name is not None:
        return "holder", name
    return ("lines" if isinstance(first, dict) or not whole_line else "values"), ""


def read_values(file: Path, layout: str, field: str) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """The rows of a file of any layout but lines, with their numbers: of an array the place, else the line.

    A ``RowError`` behind which nothing more is read says how many bytes that leaves.
    """
    number, size = 0, file.stat().st_size
    with open_file(file) as opened:
        window = Window(opened)
        try:
            if layout == "values":
                while window.peek():
                    number = window.line
                    try:
                        yield number, as_row(window.value())
                    except RowError as error:
                        yield number, error
                return
            if layout == "holder":
                window.take()
                while window.field() != field:
                    window.skip()
            if window.peek() != "[":
                raise Damaged(RowError("invalid_json", "the file holds one JSON value, not rows"))
            for number, value in window.elements():
                yield number, value if isinstance(value, RowError) else as_row(value)
            if layout == "holder":
                while window.field():
                    window.skip()
                if not window.take():
                    raise Damaged(RowError("truncated", "the file ends before the object does"))
            if rest := window.peek():
                raise Damaged(RowError("invalid_json", f"more text after the end of the rows ({rest!r})"))
        except Damaged as damaged:
            yield number + 1 if layout != "values" else max(number, 1), damaged.error.leaving(window.unread(size))


def _holder(file: Path, split: str) -> str | None:
    """The field of an object that holds its rows; none if the object is a row itself, or there are several objects."""
    lists: list[str] = []
    others: dict[str, Any] = {}
    begun = ""
    with open_file(file) as opened:
        window = Window(opened)
        try:
            window.take()
            while name := window.field():
                if window.peek() != "[":
                    others[name] = window.value()
                    continue
                size, objects, sample = 0, True, []
                for size, value in window.elements():
                    objects &= isinstance(value, dict)
                    begun = name if objects and name not in _OF_A_ROW else ""
                    if size <= 2:
                        sample.append(value)
                    if size == 2 and name not in _OF_A_ROW and objects and name == split:
                        return name
                others[name], begun = sample, ""
                if size and objects and name not in _OF_A_ROW:
                    lists.append(name)
            window.take()
            if window.peek():
                return None
        except (Damaged, RowError):
            lists += [begun] if begun else []
            return lists[0] if len(lists) == 1 and not _is_row(others) else None
    if _is_row(others) or not lists:
        return None
    if split in lists:
        return split
    if len(lists) > 1 or lists[0] in SPLITS:
        fault = f"one object with the lists {', '.join(lists)}"
        raise user_error(fault, "to know which of them is meant", f"set split: {lists[0]} for this source", str(file))
    return lists[0]


def _is_row(fields: dict[str, Any]) -> bool:
    return any(candidates(fields, purpose) for purpose in PURPOSES)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_conversation(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)


def _begins_a_conversation(text: str) -> bool:
    """Whether the first element of an array that goes on beyond ``text`` is a message."""
    try:
        value, _ = json.JSONDecoder().raw_decode(text, 1)
    except (ValueError, RecursionError):
        return False
    return _is_conversation([value])
