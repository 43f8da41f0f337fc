"""Which models are let go for others: never one in the middle of an answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tonnage.errors import UserError
from tonnage.page import chats as module
from tonnage.page.chats import Chats
from tonnage.page.commands import Command, Commands


class Served:
    """A command, as one of ``Commands``, whose server is a test's."""

    def __init__(self, id: str, words: Sequence[str], port: int) -> None:
        self.id, self.words, self.port = id, tuple(words), port
        self.status: int | None = None

    def tell(self) -> dict[str, Any]:
        return {"output": f"Serving {self.words[1]} at http://localhost:{self.port}/v1"}

    def end(self) -> None:
        self.status = -15


class Begun:
    """Commands that all are served at one port."""

    def __init__(self, port: int) -> None:
        self.port, self.numbers = port, itertools.count()
        self.all: dict[str, Served] = {}

    def start(self, words: Sequence[str]) -> Served:
        name = str(next(self.numbers))
        return self.all.setdefault(name, Served(name, words, self.port))

    def get(self, name: str) -> Served:
        return self.all[name]


class Talk:
    """Models of a server whose answers come to their end when ``goes_on`` is set."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        await writer.drain()
        await self.goes_on.wait()
        writer.write(b"the end")
        await writer.drain()
        writer.close()

    async def begin(self) -> Chats:
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        return Chats(cast(Commands, Begun(server.sockets[0].getsockname()[1])))


async def whole(chats: Chats, command: Command) -> list[bytes]:
    return [piece async for piece in chats.ask(command.id, b"{}")]


def test_the_model_that_was_not_asked_for_longest_is_let_go() -> None:
    async def talk() -> None:
        talk = Talk()
        talk.goes_on.set()
        chats = await talk.begin()
        first, second = (chats.open(model, "auto") for model in ("first", "second"))
        assert await whole(chats, first) == [b"200", b"the end"]
        third = chats.open("third", "auto")
        assert [one.status for one in (first, second, third)] == [None, -15, None]
        assert chats.open("first", "auto") is first

    asyncio.run(talk())


def test_a_model_in_the_middle_of_an_answer_is_not_let_go() -> None:
    async def talk() -> None:
        talk = Talk()
        chats = await talk.begin()
        first, second = (chats.open(model, "auto") for model in ("first", "second"))
        answer = chats.ask(first.id, b"{}")
        assert await anext(answer) == b"200"
        chats.open("second", "auto")
        third = chats.open("third", "auto")
        assert [one.status for one in (first, second, third)] == [None, -15, None]
        other = chats.ask(third.id, b"{}")
        assert await anext(other) == b"200"
        with pytest.raises(UserError, match="2 models in the middle of an answer"):
            chats.open("fourth", "auto")
        talk.goes_on.set()
        assert [piece async for piece in answer] == [b"the end"]
        chats.open("fourth", "auto")
        assert [one.status for one in (first, third)] == [-15, None]
        await other.aclose()  # type: ignore[attr-defined]  # as Starlette does where the browser goes away
        chats.open("fourth", "auto")
        chats.open("fifth", "auto")
        assert third.status == -15

    asyncio.run(talk())


def test_a_long_answer_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", -1.0)

    async def talk() -> None:
        talk = Talk()
        chats = await talk.begin()
        first = chats.open("first", "auto")
        answer = chats.ask(first.id, b"{}")
        assert await anext(answer) == b"200"
        chats.close_idle()
        assert first.status is None
        talk.goes_on.set()
        assert [piece async for piece in answer] == [b"the end"]
        chats.close_idle()
        assert first.status == -15

    asyncio.run(talk())
