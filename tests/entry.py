"""The ``tonnage`` command in this process, with a terminal or none."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TextIO, cast

(script,) = entry_points(group="console_scripts", name="tonnage")
_main: Callable[[], None] = script.load()


def main() -> None:
    """What the console script calls: reads ``sys.argv`` and ends in ``SystemExit``."""
    before = signal.getsignal(signal.SIGINT)
    try:
        _main()
    finally:
        signal.signal(signal.SIGINT, before)  # a command that has ended hears of no Ctrl-C; this process goes on


class FakeTerminal(io.StringIO):
    """A terminal that keeps everything that is written to it."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: object
    out: str
    err: str


@contextmanager
def _streams(out: io.StringIO, err: io.StringIO, said: io.StringIO) -> Iterator[None]:
    before = sys.stdin, sys.stdout, sys.stderr, sys.argv
    sys.stdin, sys.stdout, sys.stderr = said, cast(TextIO, out), cast(TextIO, err)
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr, sys.argv = before


def tonnage(*words: str, terminal: bool = False, said: str = "", typed: bool = False) -> Ended:
    """Carry out a command line by the console script's own function; ``said`` is its standard input, which is ``typed``
    or comes from a pipe."""
    kind = FakeTerminal if terminal else io.StringIO
    out, err = kind(), kind()
    with _streams(out, err, (FakeTerminal if typed else io.StringIO)(said)):
        sys.argv = ["tonnage", *words]
        try:
            main()
            status: object = None
        except SystemExit as ended:
            status = ended.code
    return Ended(status, out.getvalue(), err.getvalue())


def refusal(*words: str) -> str:
    """What a command line says that is refused for a mistake of the user's."""
    ended = tonnage(*words)
    assert ended.status == 2, (ended.status, ended.out, ended.err)
    return ended.err
