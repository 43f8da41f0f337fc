"""News for those who watch, as server-sent events: one look at the files for all of them, and the same bytes to each.

A ``Channel`` has whoever watches the same thing. While there is anybody, it looks every so often, and sends what its
``look`` answers to all; who cannot keep up hears the newest alone. A look that takes the processor long is had more
seldom, for what trains needs the processor, too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from anyio import to_thread

WAITING = 16
"""Events that wait for a slow reader, beyond which the oldest are lost."""
SILENCE_SECONDS = 15.0
"""After which readers hear a comment, so that they and we know that the other is there."""
SHARE = 1 / 1000
"""Of a core that looks of a channel may take, unless that makes news older than ``OLDEST_SECONDS``."""
OLDEST_SECONDS = 10.0
STILL_HERE = b": still here\n\n"


class Channel:
    def __init__(self, look: Callable[[], Any], seconds: float) -> None:
        """``look``: called in a thread; what it returns is sent unless it is None. ``seconds``: between two calls."""
        self._look, self._seconds = look, seconds
        self._readers: set[asyncio.Queue[bytes]] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_watched(self) -> bool:
        return bool(self._readers)

    async def events(self, first: Any) -> AsyncIterator[bytes]:
        """What a new reader hears: ``first``, and then all news."""
        queue = asyncio.Queue[bytes](WAITING)
        self._readers.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        try:
            yield event(first)
            while content := await queue.get():
                yield content
        finally:
            self._readers.discard(queue)
            if not self._readers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _watch(self) -> None:
        pause, silence = self._seconds, 0.0
        while True:
            await asyncio.sleep(pause)
            silence += pause
            try:
                news, taken = await to_thread.run_sync(self._timed_look)
            except Exception:  # as of a run that is gone: all are let go, and who asks again is told why
                self._task = None
                self._send(b"")
                return
            pause = max(self._seconds, min(taken / SHARE, OLDEST_SECONDS))
            if news is None and silence < SILENCE_SECONDS:
                continue
            silence = 0.0
            self._send(event(news) if news is not None else STILL_HERE)

    def _send(self, content: bytes) -> None:
        for queue in self._readers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(content)

    def _timed_look(self) -> tuple[Any, float]:
        """What is new, and the processor's time that the look has taken, in seconds."""
        began = time.thread_time()
        return self._look(), time.thread_time() - began


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
