"""What commands print, and where it goes: the one place where consoles are made.

    terminal()    for people: a console that reads no markup in what it is given and shows what would command it
    say           a line of it in pieces, some of them bold
    table         a table without lines, whose columns of numbers are ``number``
    put           for programs and people: text as it is, but on a terminal
    put_json      the same for JSON

    streams       around a command: a standard output that cannot be written ends it in a sentence

Names, rows and errors are strangers' text (``visible``). Nothing is bold because a file is called ``[bold]``: markup is
never read, and what is styled is said so piece by piece.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from tonnage.errors import OutputLost, Problem, refused, user_error
from tonnage.files.visible import as_json_text, visible


class Terminal(Console):
    """A console for text that anybody may have written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Plain text, before its width is reckoned."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything that is printed passes here, whatever it is."""
        for segment in super().render(renderable, options):
            shown = segment.text if segment.control else visible(segment.text)
            yield segment if shown == segment.text else segment._replace(text=shown)

    def on_broken_pipe(self) -> None:
        """Leave it to the stream (``streams``) what becomes of a reader who has gone."""
        raise


def terminal(*, stderr: bool = False) -> Console:
    """What a command prints to: standard output, or with ``stderr`` standard error."""
    return Terminal(stderr=stderr)


def say(console: Console, *pieces: str | tuple[str, str]) -> None:
    """Print a line of pieces, each a text or a text with its style."""
    shown = [visible(piece) if isinstance(piece, str) else (visible(piece[0]), piece[1]) for piece in pieces]
    console.print(Text.assemble(*shown), soft_wrap=True)


def table(*columns: Column | str, title: str | None = None, **options: Any) -> Table:
    """A table without lines, its title at the left."""
    return Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), **options)


def number(heading: str = "") -> Column:
    return Column(heading, justify="right")


def put(text: str, *, end: str = "\n", flush: bool = False) -> None:
    """Print text for whoever reads it: a program gets it as it is, a terminal with what would command it shown."""
    print(visible(text) if sys.stdout.isatty() else text, end=end, flush=flush)


def put_json(value: Any) -> None:
    """Print a value as JSON that is safe on a terminal, and the same to every program."""
    put(to_json(value, indent=2))


def to_json(value: Any, **options: Any) -> str:
    """A value as JSON, letters of all scripts as they are; any file and any terminal takes it."""
    return as_json_text(json.dumps(value, ensure_ascii=False, default=str, **options))


class _Output:
    """Standard output or standard error: what cannot be written is a ``UserError``, now or when the work is done."""

    def __init__(self, stream: TextIO, failure: OutputLost | None = None) -> None:
        self._stream = stream
        self.failure = failure
        """Why nothing more is written."""
        self.patient = False
        """Whether work goes on although nobody hears of it."""
        self.has_lost = False
        """Whether anything was to be written that was not."""

    def write(self, text: str) -> int:
        """As a file does. Raises ``OutputLost``."""
        if not text:
            return self._stream.write(text)  # which takes no bytes: so libraries find out what kind of stream it is
        if self.failure is None:
            try:
                return self._stream.write(text)
            except (OSError, ValueError) as error:
                failure = self._lose(error)
        else:
            failure = self.failure
        self.has_lost = True
        if not self.patient:
            raise failure
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self.failure is None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                failure = self._lose(error)
                if not self.patient:
                    raise failure from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError | ValueError) -> OutputLost:
        if isinstance(error, ValueError) and not self._stream.closed:
            raise error
        failure = _lost(error if isinstance(error, OSError) else OSError(errno.EBADF, "it is closed"))
        self.failure, self.has_lost = failure, True
        _to_nowhere(self._stream)
        return failure


def _lost(error: OSError) -> OutputLost:
    if error.errno == errno.EPIPE:
        return OutputLost(Problem("nobody reads it any more", "a reader", where="standard output"), reader_left=True)
    explained = refused(error)
    advice = "make room, or send it elsewhere: COMMAND > FILE"
    needed = explained.problems[0].needed if explained else "an open file, a pipe or a terminal"
    return OutputLost(Problem(f"could not be written: {error.strerror}", needed, advice, "standard output"))


def _to_nowhere(stream: TextIO) -> None:
    """Let what a stream still holds vanish: Python writes it out when it ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class _NoInput(io.TextIOBase):
    """Standard input that was closed before this process began."""

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        """Raises ``UserError``."""
        raise user_error("closed", "lines to answer", "type them, or pipe a file in: ... < FILE", "standard input")

    read = readline


@contextmanager
def streams() -> Iterator[None]:
    """Within it, to read or write one of the three standard streams works or is a ``UserError``.

    One that is closed is opened on nothing, so that no other file gets its number and what strangers print into it.
    """
    before = sys.stdin, sys.stdout, sys.stderr
    absent = [_is_absent(number) for number in range(3)]
    if absent[0]:
        sys.stdin = cast(TextIO, _NoInput())
    else:
        _reconfigure(sys.stdin, errors="replace")
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(number, "w", closefd=False) if absent[number] else getattr(sys, name)
        _reconfigure(stream, errors="backslashreplace")
        output = _Output(stream, _lost(OSError(errno.EBADF, "it is closed")) if absent[number] else None)
        output.patient = name == "stderr"
        setattr(sys, name, output)
    record = logging.getLogRecordFactory()
    logging.setLogRecordFactory(partial(_visible_record, record))
    try:
        yield
    finally:
        logging.setLogRecordFactory(record)
        sys.stdin, sys.stdout, sys.stderr = before


def _visible_record(record: Callable[..., logging.LogRecord], *given: Any, **more: Any) -> logging.LogRecord:
    """What a library tells, which may be names out of strangers' files."""
    made = record(*given, **more)
    try:
        told = made.getMessage()
    except Exception:  # its words and what is to be put into them do not fit, which must not end a command
        told = f"{made.msg} {made.args}"
    made.msg, made.args = visible(told), None
    return made


def _is_absent(number: int) -> bool:
    """Whether a descriptor was closed; then it is open on nothing now."""
    try:
        os.fstat(number)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
        return True
    return False


def _reconfigure(stream: Any, *, errors: str) -> None:
    with suppress(AttributeError, OSError, ValueError):
        stream.reconfigure(errors=errors)


@contextmanager
def unheard() -> Iterator[None]:
    """Work that must go on if what it prints is lost: the command fails when it is done (``lost_output``)."""
    if not isinstance(sys.stdout, _Output):
        yield
        return
    before, sys.stdout.patient = sys.stdout.patient, True
    try:
        yield
    finally:
        sys.stdout.patient = before


def lost_output() -> OutputLost | None:
    """Why standard output did not take everything, if so."""
    if not isinstance(sys.stdout, _Output):
        return None
    with suppress(OutputLost):
        sys.stdout.flush()
    return sys.stdout.failure if sys.stdout.has_lost else None
