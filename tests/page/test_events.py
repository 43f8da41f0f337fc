"""Whoever watches costs little: one look serves all, what it tells is encoded once, and dear looks are rare."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from page.conftest import record_step
from tonnage.errors import user_error
from tonnage.page import app, events
from tonnage.page.events import STILL_HERE, Channel, event
from tonnage.page.watched import Watched
from tonnage.rundir.directory import RunDirectory

NUM_WATCHERS = 8


@pytest.mark.slow
def test_who_comes_at_once_hears_the_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "RUN_SECONDS", 0.05)
    looks: list[str] = []
    look = Watched.look

    def counted(self: Watched, name: str) -> Any:
        looks.append(name)
        return look(self, name)

    monkeypatch.setattr(Watched, "look", counted)

    async def watch() -> list[list[bytes]]:
        page = app.Page(folder)
        request = Request({"type": "http", "query_string": b"run=stopped", "headers": []})
        responses = await asyncio.gather(*(page.run_live(request) for _ in range(NUM_WATCHERS)))
        streams = [
            cast(AsyncIterator[bytes], cast(StreamingResponse, response).body_iterator) for response in responses
        ]
        first = [await anext(stream) for stream in streams]
        record_step(RunDirectory(folder / "stopped"), 23)
        second = [await anext(stream) for stream in streams]
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        return [first, second]

    began = time.monotonic()
    first, second = asyncio.run(watch())
    assert {json.loads(content[6:])["steps"] for content in first} == {22}
    assert json.loads(second[0][6:])["curves"]["x"]["step"] == [23]
    assert all(content is second[0] for content in second)
    assert len(looks) <= NUM_WATCHERS + (time.monotonic() - began) / 0.05


def heard(channel: Channel, seconds: float) -> list[bytes]:
    """What a reader of a channel hears in a while, after its first event."""
    contents: list[bytes] = []

    async def read() -> None:
        async for content in channel.events("first"):
            contents.append(content)

    async def for_a_while() -> None:
        reading = asyncio.create_task(read())
        await asyncio.sleep(seconds)
        reading.cancel()

    asyncio.run(for_a_while())
    return contents[1:]


def test_silence_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heard(Channel(lambda: None, 0.01), 0.1) == []
    monkeypatch.setattr(events, "SILENCE_SECONDS", 0.02)
    assert set(heard(Channel(lambda: None, 0.01), 0.3)) == {STILL_HERE}


def test_a_look_that_fails_lets_readers_go() -> None:
    """They ask again, and are told why; the next one is watched for as before."""
    failures = [user_error("no run", "a run")]

    def look() -> str:
        if failures:
            raise failures.pop()
        return "news"

    channel = Channel(look, 0.01)

    async def read(number: int) -> list[bytes]:
        contents: list[bytes] = []
        async for content in channel.events("first"):
            contents.append(content)
            if len(contents) == number:
                break
        return contents

    async def twice() -> list[list[bytes]]:
        return [await asyncio.wait_for(read(2), 10) for _ in range(2)]

    assert asyncio.run(twice()) == [[event("first")], [event("first"), event("news")]]


def test_dear_looks_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """News are as old as the look is dear, up to ``OLDEST_SECONDS``."""

    def look() -> Any:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return "news"

    monkeypatch.setattr(events, "SHARE", 1 / 100)
    assert len(heard(Channel(look, 0.01), 0.6)) == 1
    monkeypatch.setattr(events, "OLDEST_SECONDS", 0.05)
    assert len(heard(Channel(look, 0.01), 0.6)) > 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_sleeps_ends_at_once(number: signal.Signals) -> None:
    script = (
        "from starlette.applications import Starlette\n"
        "from tonnage.serving.listen import listen, run\n"
        "with listen('127.0.0.1', 0) as socket:\n"
        "    print('begun', flush=True)\n"
        "    run(Starlette(), socket)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(number)
        process.wait(timeout=60)
        assert time.monotonic() - began < 2
        assert process.returncode == -number
