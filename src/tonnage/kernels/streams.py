"""Work of a device that goes on beside other work of it, in streams; and numbers that come from a device without a wait
for what was put into its queue after them."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class Stream:
    """A queue of a device. What is put into one is done in order; streams do not wait for each other unless told to.

    ``with stream:`` puts what this thread asks of the device into it. Others wait for what is in these streams, so
    a GPU begins it before what is outside of them. A CPU does everything at once, in whatever stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._of = device, getattr(torch, device.type)
        options = {"priority": -1} if device.type == "cuda" else {}
        self._stream = self._of.Stream() if device.type == "cpu" else self._of.Stream(device, **options)
        self._inside: list[Any] = []

    def __enter__(self) -> None:
        if self._device.type != "cpu":  # a new thread's is the first GPU: it would return to it, and take memory there
            self._of.set_device(self._device)
        self._inside.append(self._of.stream(self._stream))
        self._inside[-1].__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside.pop().__exit__(kind, error, traceback)

    def mark(self) -> Any:
        """The end of what is in the stream now: for ``wait``."""
        event = self._of.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: Any) -> None:
        """What is put into this stream from now on begins when ``mark``, of another stream, is passed."""
        self._stream.wait_event(mark)

    def join(self, mark: Any) -> None:
        """What this thread asks for outside of these streams from now on begins when ``mark`` is passed."""
        self._of.current_stream(self._device).wait_event(mark)

    def follow(self) -> None:
        """What is put into this stream from now on begins when all is done that this thread asked for outside of it."""
        self._stream.wait_stream(self._of.current_stream(self._device))

    def finish(self) -> None:
        """Let this thread wait until all that is in the stream is done."""
        self.mark().synchronize()


class Reading:
    """Numbers of a device on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._there: Any = None
        self._values = values.detach().to("cpu", non_blocking=True)  # into locked memory
        if values.device.type != "cpu":
            self._there = getattr(torch, values.device.type).Event()
            self._there.record()

    def numbers(self) -> list[float]:
        """Wait for them, and for nothing that the device was asked for since."""
        if self._there is not None:
            self._there.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers
