"""Streams and events of the device ``apart``, and whether they make its operations wait for each other as they must.

Every stream has a vector clock: how far each stream was when what it does next may begin. An event carries that of its
stream, and so does what the host waits for. Two operations that touch the same bytes, one of which changes them, are
in order if the later one's clock has the earlier one. What is freed goes back to the stream in which it was allocated:
others must be through with it before that stream allocates again, as of a caching allocator.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Clock = dict[int, int]


class Race(AssertionError):
    """Nothing makes one operation wait for another."""


class Stream:
    """A queue of the device."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.number = len(_streams)
        self.clock: Clock = {}
        self._seen = 0
        self.hazards: list[_Use] = []
        self._tape: deque[Callable[[], Any]] = deque()
        self._put = self._done = 0
        _streams.append(self)

    def begin(self) -> int:
        """The time of an operation that is put into this stream now."""
        self.follow_host()
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def follow_host(self) -> None:
        """What is put here from now on comes after what the host has waited for."""
        if self._seen != len(_waited):
            self._seen = len(_waited)
            _join(self.clock, _host)

    def put(self, work: Callable[[], Any]) -> None:
        """Do something later."""
        self._tape.append(work)
        self._put += 1

    def run(self, end: int | None = None) -> None:
        """Do what was put into this stream, up to a number of things."""
        while self._done < (self._put if end is None else end):
            self._done += 1
            self._tape.popleft()()

    def mark(self) -> int:
        return self._put

    def wait_event(self, event: Event) -> None:
        _join(self.clock, event.clock)
        if self is default:
            event.run()
        else:
            self.put(event.run)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return self._done == self._put


class Event:
    """A place in a stream; before it was recorded, nothing waits for it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}
        self._stream: Stream | None = None
        self._mark = 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()
        self._stream.follow_host()
        self.clock, self._mark = dict(self._stream.clock), self._stream.mark()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def run(self) -> None:
        if self._stream is not None:
            self._stream.run(self._mark)

    def synchronize(self) -> None:
        self.run()
        _join(_host, self.clock)
        _waited.append(None)

    def query(self) -> bool:
        return True


_streams: list[Stream] = []
_host: Clock = {}
"""What the host has waited for; all of its threads, which make each other wait in ways that are not seen here."""
_waited: list[None] = []
"""One for each time that it did."""
default = Stream()
_of_thread = threading.local()


def current_stream(device: Any = None) -> Stream:
    """That of this thread."""
    found: Stream = getattr(_of_thread, "stream", default)
    return found


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """What this thread asks for goes into ``chosen``."""
    before = current_stream()
    _of_thread.stream = chosen or before
    try:
        yield
    finally:
        _of_thread.stream = before


def set_stream(chosen: Stream) -> None:
    _of_thread.stream = chosen


def synchronize(device: Any = None) -> None:
    """The host waits for everything."""
    for one in _streams:
        one.synchronize()


def _join(clock: Clock, other: Clock) -> None:
    for number, time in other.items():
        if clock.get(number, 0) < time:
            clock[number] = time


# Who touched which bytes.


@dataclass(frozen=True)
class _Use:
    stream: int
    time: int
    what: str

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.time


@dataclass
class _Span:
    """Bytes of a piece of memory that were touched together."""

    written: _Use | None = None
    read: dict[int, _Use] = field(default_factory=dict)

    def uses(self) -> list[_Use]:
        return [*self.read.values(), *([self.written] if self.written else [])]


_spans: dict[int, dict[tuple[int, int], _Span]] = {}
_born: dict[int, Stream] = {}


def allocated(address: int) -> None:
    """A piece of the device's memory was taken, in this thread's stream."""
    own = current_stream()
    _born[address] = own
    own.follow_host()
    late = [use for use in own.hazards if not use.is_before(own.clock)]
    own.hazards = []
    if late:
        raise Race(f"memory is taken anew that {late[0].what} of stream {late[0].stream} may still use")


def freed(address: int) -> None:
    """A piece was given back."""
    own = _born.pop(address)
    for span in _spans.pop(address, {}).values():
        own.hazards += [use for use in span.uses() if use.stream != own.number and not use.is_before(own.clock)]


def forget(address: int) -> None:
    """A piece of the host's memory is gone."""
    _spans.pop(address, None)


def touched(what: str, read: Sequence[tuple[int, int, int]], written: Sequence[tuple[int, int, int]]) -> None:
    """An operation, put into this thread's stream now, reads and writes bytes: (address of the piece, first, end).

    Raises:
        Race: it waits for too little.
    """
    own = current_stream()
    use = _Use(own.number, own.begin(), what)
    for address, first, end in read:
        spans = _spans.setdefault(address, {})
        for (start, stop), span in spans.items():
            if start < end and first < stop and span.written:
                _check(use, span.written, own.clock)
        spans.setdefault((first, end), _Span()).read[own.number] = use
    for address, first, end in written:
        spans = _spans.setdefault(address, {})
        for (start, stop), span in list(spans.items()):
            if start < end and first < stop:
                for other in span.uses():
                    _check(use, other, own.clock)
                if first <= start and stop <= end:
                    del spans[start, stop]
        spans[first, end] = _Span(use)


def touched_by_host(what: str, read: Sequence[tuple[int, int, int]], written: Sequence[tuple[int, int, int]]) -> None:
    """The host itself reads and writes bytes at once; what is put into a stream later comes after that.

    Raises:
        Race: it has not waited for what the device does with them.
    """
    for places, changes in ((read, False), (written, True)):
        for address, first, end in places:
            for (start, stop), span in _spans.get(address, {}).items():
                for other in span.uses() if changes else [span.written] if span.written else []:
                    if start < end and first < stop and not other.is_before(_host):
                        raise Race(f"{what} of the host does not wait for {other.what} of stream {other.stream}")


def _check(use: _Use, other: _Use, clock: Clock) -> None:
    if not other.is_before(clock):
        raise Race(f"{use.what} of stream {use.stream} does not wait for {other.what} of stream {other.stream}")
