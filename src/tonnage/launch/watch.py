"""Workers at work, wherever they are, and how somebody waits for their end."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Protocol

from tonnage.errors import OutputLost

DONE = 0
STOPPED = 3
WATCH_SECONDS = 0.1
ONE_REQUEST_SECONDS = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""That launchers and workers act on, and the forkserver does not."""


class AtWork(Protocol):
    """Workers that were started, for whoever looks at them again and again."""

    waits_for: str = ""
    """Why no worker runs, as of the last look; empty while they do."""

    def look(self) -> int | None:
        """None while any is at work; then 0 if all are done, or 3 if they stopped as asked, with everything saved.

        Raises ``UserError`` or ``WorkerFailed`` with the first failure, and ``KeyboardInterrupt`` if a stop was asked
        for and they ended before they could save.
        """

    def ask_to_stop(self, who: str) -> None:
        """Have all save and end, because of ``who``: the name of a signal or a command. Once is enough."""

    def kill(self) -> None:
        """End all at once; nothing is saved."""


def watch(
    at_work: AtWork,
    requests: Sequence[int],
    still_works: Callable[[], bool],
    *,
    until: Callable[[], bool] = lambda: False,
    poll: Callable[[], None] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> bool:
    """Wait while any is at work, or until ``until`` says enough and nobody asks for a stop; whether any is.

    ``requests`` are the signals that came: one asks the workers to stop, a second ends them, which raises
    ``KeyboardInterrupt``. ``still_works`` and ``poll`` are called about ten times a second, ``tell`` when there is
    something else that they wait for.
    """
    waited_for = ""
    while (works := still_works()) and (requests or not until()):
        if len(requests) > 1:
            at_work.kill()
            raise KeyboardInterrupt
        if requests:
            at_work.ask_to_stop(signal_name(requests[0]))
        if waited_for != at_work.waits_for:
            waited_for = at_work.waits_for
            tell(waited_for)
        if poll is not None:
            try:
                poll()
            except (OSError, OutputLost):  # the terminal is gone; the workers need it no more than before
                poll = None
        time.sleep(WATCH_SECONDS)
    return works


def to_their_end(
    workers: AbstractContextManager[AtWork],
    poll: Callable[[], None] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> int:
    """Start workers and wait until all have ended, passing on what asks this process to stop.

    Returns 0 when done, 3 when stopped as asked with everything saved. Raises as ``AtWork.look``. What the context of
    the workers ends is ended, whichever way this ends.
    """
    status: int | None = None
    with stop_requests() as requests, workers as at_work:

        def still_works() -> bool:
            nonlocal status
            status = at_work.look()
            return status is None

        watch(at_work, requests, still_works, poll=poll, tell=tell)
    assert status is not None
    return status


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """A list that grows by one for every signal asking this process to stop.

    What comes within half a second counts once: a wrapper passes Ctrl-C on to a process that had it already.
    Handlers can be set in the main thread only; elsewhere the list stays empty and signals are the caller's.
    """
    requests: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    last = -math.inf

    def note(number: int, _: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last > ONE_REQUEST_SECONDS:
            requests.append(number)
            last = time.monotonic()

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    heeded = [number for number in STOP_SIGNALS if before[number] is not signal.SIG_IGN]  # nohup ignores SIGHUP
    for number in heeded:
        signal.signal(number, note)
    try:
        yield requests
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
