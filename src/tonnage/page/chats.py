"""Models that are talked to: each is a ``tonnage serve`` of its own, whose answers are passed on as they come."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

from tonnage.errors import user_error
from tonnage.page.commands import Command, Commands

ADDRESS = re.compile(r"Serving (.+) at http://localhost:(\d+)/v1")
MOST_MODELS = 2
"""That are held in memory at once."""
IDLE_SECONDS = 900.0
"""After the last question, a model is let go."""
ANSWER_SECONDS = 600.0
LONGEST_HEAD = 64 << 10


class Chats:
    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._served: dict[str, tuple[Command, float]] = {}
        """By its words: the command, and when it was last asked, or ended an answer (``time.monotonic``)."""
        self._answering = Counter[str]()
        """By the id of a command: its answers that are still being written."""

    def open(self, model: str, template: str) -> Command:
        """Have a model served with a chat template, in place of the oldest where there are too many.

        Raises:
            UserError: all of those are in the middle of an answer, or too many commands are at work.
        """
        self.close_idle()
        words = ["serve", model, *(["--template", template] if template != "auto" else []), "--port", "0"]
        name = " ".join(words)
        command = self._served.get(name, (None, 0.0))[0]
        if command is None or command.status is not None:
            while len(self._served) >= MOST_MODELS:
                self._let_go_oldest()
            command = self._commands.start(words)
        self._served[name] = (command, time.monotonic())
        return command

    def close_idle(self) -> None:
        """Let go the models that nobody has asked for long, and forget those that have ended."""
        for name, (command, last) in list(self._served.items()):
            is_idle = time.monotonic() - last > IDLE_SECONDS and not self._answering[command.id]
            if command.status is not None or is_idle:
                command.end()
                del self._served[name]

    async def ask(self, name: str, body: bytes) -> AsyncIterator[bytes]:
        """The answer of the server of a command to a question, in pieces: first its status, then the content.

        Raises:
            UserError: the command serves nothing (yet), or its server does not answer.
        """
        command = self._commands.get(name)
        address = served_at(command)
        if command.words[0] != "serve" or command.status is not None or address is None:
            raise user_error("no model is served by this command", "one that is loaded", "load it again")
        with self._writing(command):
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", address[1], limit=LONGEST_HEAD)
            except OSError as error:
                needed, change = "one that is at work", "load it again"
                raise user_error("the model's server does not answer", needed, change) from error
            try:
                head = (
                    f"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                )
                writer.write(head.encode() + body)
                await writer.drain()
                answered = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), ANSWER_SECONDS)
                yield answered.split(b" ", 2)[1]
                while piece := await asyncio.wait_for(reader.read(1 << 16), ANSWER_SECONDS):
                    yield piece
            except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError) as error:
                raise user_error("the model's server broke off", "an answer", "load it again") from error
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()

    @contextmanager
    def _writing(self, command: Command) -> Iterator[None]:
        """While a command's model writes an answer: it is not let go."""
        self._answering[command.id] += 1
        self._note_time(command)
        try:
            yield
        finally:
            self._answering[command.id] -= 1
            self._note_time(command)

    def _note_time(self, command: Command) -> None:
        for name, (served, _) in self._served.items():
            if served is command:
                self._served[name] = (served, time.monotonic())

    def _let_go_oldest(self) -> None:
        """Let go the model that nobody has asked for the longest time. Raises ``UserError`` where all are writing."""
        resting = [name for name, (command, _) in self._served.items() if not self._answering[command.id]]
        if not resting:
            observed = f"{len(self._served)} models in the middle of an answer"
            change = "wait for an answer to end, or stop it, and load it again"
            raise user_error(observed, f"room for one more: at most {MOST_MODELS} are held at once", change)
        oldest = min(resting, key=lambda name: self._served[name][1])
        self._served.pop(oldest)[0].end()


def served_at(command: Command) -> tuple[str, int] | None:
    """What a command serves, and at which port; None until it does."""
    match = ADDRESS.search(" ".join(str(command.tell()["output"]).split()))
    return (match[1], int(match[2])) if match else None
