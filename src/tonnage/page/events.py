"""News for those who watch, as server-sent events: one look at the files for all of them.

A ``Channel`` has whoever watches the same thing. While there is anybody, it looks every so often, and sends what its
``look`` answers to all; who cannot keep up hears the newest alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from anyio import to_thread

WAITING = 16
"""Events that wait for a slow reader, beyond which the oldest are lost."""
SILENCE_SECONDS = 15.0
"""After which a reader hears a comment, so that it and we know that the other is there."""


class Channel:
    """Those who watch one thing."""

    def __init__(self, look: Callable[[], Any], seconds: float) -> None:
        """``look``: called in a thread; what it returns is sent unless it is None. ``seconds``: between two calls."""
        self._look, self._seconds = look, seconds
        self._readers: set[asyncio.Queue[str]] = set()
        self._task: asyncio.Task[None] | None = None

    async def events(self, first: Any) -> AsyncIterator[str]:
        """What a new reader hears: ``first``, and then all news."""
        queue = asyncio.Queue[str](WAITING)
        self._readers.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        try:
            yield event(first)
            while True:
                try:
                    yield await asyncio.wait_for(queue.get(), SILENCE_SECONDS)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self._readers.discard(queue)
            if not self._readers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            news = await to_thread.run_sync(self._look)
            if news is None:
                continue
            text = event(news)
            for queue in self._readers:
                if queue.full():
                    queue.get_nowait()
                queue.put_nowait(text)


def event(value: Any) -> str:
    """A value as it is sent."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
