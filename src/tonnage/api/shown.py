"""A run that is watched to its end: on a terminal as the command shows it, in a notebook as one output that updates,
elsewhere in silence."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from tonnage.display.progress import RunDisplay
from tonnage.display.terminal import say, terminal

if TYPE_CHECKING:
    from tonnage.planning.plan import Plan
    from tonnage.rundir.directory import RunDirectory

UPDATE_SECONDS = 1.0
"""Between two pictures in a notebook."""


class Watched(Protocol):
    """A run at work: ``Running``."""

    directory: RunDirectory
    plan: Plan
    news: tuple[str, ...]

    @property
    def run(self) -> object:
        """What a notebook shows."""

    def wait(self, poll: Callable[[], None] | None = None, tell: Callable[[str], None] = ...) -> object:
        """Wait for its end."""


def show(running: Watched) -> None:
    """Wait for the end of a run. Raises as ``train``."""
    console, display = terminal(), _notebook()
    if display is not None or console.is_terminal:
        for line in running.news:
            say(console, line)
    if display is not None:
        output = _Updated(running.run, display)
        running.wait(output.poll)
        output.draw()
    elif console.is_terminal:
        plan, num_workers = running.plan, None if running.directory.plans.exists() else running.plan.workers
        with RunDisplay(running.directory, plan.num_steps, num_workers=num_workers, console=console) as on_terminal:
            running.wait(on_terminal.poll, on_terminal.tell)
    else:
        running.wait()


class _Updated:
    """An output of a notebook that is drawn again and again."""

    def __init__(self, run: object, display: Callable[..., Any]) -> None:
        self._run = run
        self._handle = display(run, display_id=True)
        self._last = time.monotonic()

    def poll(self) -> None:
        """Draw it, unless that was a moment ago."""
        if time.monotonic() - self._last > UPDATE_SECONDS:
            self.draw()

    def draw(self) -> None:
        """Draw what there is now."""
        if self._handle is not None:
            self._handle.update(self._run)
        self._last = time.monotonic()


def _notebook() -> Callable[..., Any] | None:
    """What displays an object in the notebook in which this is; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if not hasattr(shell, "kernel"):
        return None
    display: Callable[..., Any] = import_module("IPython.display").display
    return display
