"""A socket first, the server behind it: that a port is taken is known before a model is loaded."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from tonnage.errors import user_error

PATIENCE_SECONDS = 3
"""How long answers may go on after Ctrl-C."""


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens at ``host`` and ``port``.

    Raises:
        UserError: there is no such address here, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # the second of what can be no name, such as 127.0.0..1
        reason = error.strerror if isinstance(error, OSError) else "no name of a machine"
        raise user_error(f"--host {host[:100]} ({reason})", "an address of this machine", "--host 127.0.0.1") from error
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            raise user_error(
                f"{host[:100]}:{port} cannot be listened at ({error.strerror})",
                "an address of this machine and a port that is free",
                "--port 0 takes a free one",
            ) from error
        yield listener


def in_address(host: str) -> str:
    """A host as addresses of pages have it: in brackets if it is a number with colons (IPv6)."""
    return f"[{host}]" if ":" in host else host


def run(app: Starlette, listening: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=PATIENCE_SECONDS,
        server_header=False,
        date_header=False,
    )
    _Server(config).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Sleeps until a signal ends it. uvicorn's own wakes ten times a second to see whether there was one, which takes
    a three-hundredth of a core from whatever trains beside it."""

    _ending: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def main_loop(self) -> None:
        """Until a signal has come."""
        ended = asyncio.Event()
        self._ending = asyncio.get_running_loop(), ended
        if not await self.on_tick(0):
            await ended.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What a signal does: it may come before the loop is at work."""
        super().handle_exit(sig, frame)
        if self._ending is not None:
            loop, ended = self._ending
            loop.call_soon_threadsafe(ended.set)
