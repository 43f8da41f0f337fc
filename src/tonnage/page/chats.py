"""Models that are talked to: each is a ``tonnage serve`` of its own, whose answers are passed on as they come."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress

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
        """By its words: the command, and when it was last asked (``time.monotonic``)."""

    def open(self, model: str, template: str) -> Command:
        """Have a model served with a chat template, in place of the oldest where there are too many."""
        self.close_idle()
        words = ["serve", model, *(["--template", template] if template != "auto" else []), "--port", "0"]
        name = " ".join(words)
        command = self._served.get(name, (None, 0.0))[0]
        if command is None or command.status is not None:
            while len(self._served) >= MOST_MODELS:
                oldest = min(self._served, key=lambda other: self._served[other][1])
                self._served.pop(oldest)[0].end()
            command = self._commands.start(words)
        self._served[name] = (command, time.monotonic())
        return command

    def close_idle(self) -> None:
        """Let go the models that nobody has asked for long, and forget those that have ended."""
        for name, (command, last) in list(self._served.items()):
            if command.status is not None or time.monotonic() - last > IDLE_SECONDS:
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
        for model, (served, _) in self._served.items():
            if served is command:
                self._served[model] = (served, time.monotonic())
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", address[1], limit=LONGEST_HEAD)
        except OSError as error:
            raise user_error("the model's server does not answer", "one that is at work", "load it again") from error
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


def served_at(command: Command) -> tuple[str, int] | None:
    """What a command serves, and at which port; None until it does."""
    match = ADDRESS.search(" ".join(str(command.tell()["output"]).split()))
    return (match[1], int(match[2])) if match else None
