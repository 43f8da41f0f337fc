"""Commands of the command line, carried out for the page: what it starts is what anybody could type.

Each is a process of its own, without a terminal, whose output goes into files. What trains goes on when the page ends;
whatever else was begun for the page ends with it.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tonnage.errors import user_error
from tonnage.host.parent import end_with
from tonnage.page.folder import read_end

GOES_ON = ("train", "stop")
"""Commands that are not ended with the page."""
OUTPUT_BYTES = 64 << 10
"""Of what a command prints, those at its end that are shown."""
RESULT_BYTES = 64 << 20
MOST_AT_ONCE = 8
MOST_KEPT = 100
"""Commands that have ended and are still told of."""
PATIENCE_SECONDS = 3.0


@dataclass
class Command:
    id: str
    words: tuple[str, ...]
    """Those behind ``tonnage``."""
    process: subprocess.Popen[bytes]
    output: Path
    """What it prints for people."""
    result: Path
    """What it prints to standard output."""
    began: float = field(default_factory=time.time)

    @property
    def line(self) -> str:
        """As it would be typed."""
        return shlex.join(["tonnage", *self.words])

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.process.poll()

    def tell(self) -> dict[str, Any]:
        output = read_end(self.output, OUTPUT_BYTES).decode(errors="replace")
        return {
            "command": self.id,
            "kind": self.words[0],
            "line": self.line,
            "status": self.status,
            "began": self.began,
            "output": output,
        }

    def end(self) -> None:
        """End it, and whatever it started."""
        if self.status is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGTERM)


class Commands:
    """The commands that were begun for a page."""

    def __init__(self, folder: Path) -> None:
        """``folder``: where they are carried out, against which their paths are read."""
        self.folder = folder
        self._commands: dict[str, Command] = {}
        self._files = Path(tempfile.mkdtemp(prefix="tonnage-page-"))

    def start(self, words: Sequence[str], *, in_place_of: str = "") -> Command:
        """Begin ``tonnage WORDS``. ``in_place_of``: a command whose answer nobody waits for any more.

        Raises:
            UserError: too many are at work already.
        """
        if in_place_of in self._commands:
            self._commands[in_place_of].end()
        at_work = [command for command in self._commands.values() if command.status is None]
        if len(at_work) >= MOST_AT_ONCE + (in_place_of in self._commands):
            raise user_error(f"{len(at_work)} commands at work", f"at most {MOST_AT_ONCE}", "wait for one to end")
        self._forget()
        name, page = secrets.token_hex(8), os.getpid()
        output, result = (self._files / f"{name}.{kind}" for kind in ("output", "result"))
        ends_with_us = words[0] not in GOES_ON
        with output.open("wb") as printed, result.open("wb") as answered:
            process = subprocess.Popen(
                [sys.executable, "-m", "tonnage", *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=answered if "--json" in words else printed,
                stderr=printed,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "100", "NO_COLOR": "1"},
                start_new_session=True,
                preexec_fn=(lambda: end_with(page)) if ends_with_us else None,
            )
        command = self._commands[name] = Command(name, tuple(words), process, output, result)
        return command

    def get(self, name: str) -> Command:
        """A command that was begun. Raises ``UserError`` where there is none of that name."""
        if name not in self._commands:
            raise user_error("no such command", "one that this page began", "begin it again")
        return self._commands[name]

    def result(self, name: str) -> bytes:
        """What a command with ``--json`` answered. Raises ``UserError``."""
        return read_end(self.get(name).result, RESULT_BYTES)

    def tell(self) -> list[dict[str, Any]]:
        newest = sorted(self._commands.values(), key=lambda command: -command.began)
        return [{key: value for key, value in command.tell().items() if key != "output"} for command in newest]

    def close(self) -> None:
        """End those that do not go on."""
        ending = [command for command in self._commands.values() if command.words[0] not in GOES_ON]
        for command in ending:
            command.end()
        deadline = time.monotonic() + PATIENCE_SECONDS
        for command in ending:
            with suppress(subprocess.TimeoutExpired):
                command.process.wait(max(0.0, deadline - time.monotonic()))
        if all(command.status is not None for command in self._commands.values()):
            shutil.rmtree(self._files, ignore_errors=True)  # else what goes on prints into files there

    def _forget(self) -> None:
        ended = [command for command in self._commands.values() if command.status is not None]
        for command in ended[: max(0, len(ended) - MOST_KEPT)]:
            del self._commands[command.id]
            for path in (command.output, command.result):
                path.unlink(missing_ok=True)
