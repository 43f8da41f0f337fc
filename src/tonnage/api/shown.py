"""A run that is watched to its end: on a terminal as the command shows it, in a notebook as one output that updates,
elsewhere in silence."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tonnage.display.bar import progress_bar
from tonnage.display.progress import RunDisplay
from tonnage.display.terminal import say, terminal

if TYPE_CHECKING:
    from tonnage.api.run import Run
    from tonnage.api.running import Running
    from tonnage.data import Progress

UPDATE_SECONDS = 1.0
"""Between two pictures in a notebook."""


def shown(begin: Callable[[Progress], Running | None], done: Run | None = None) -> Run:
    """Begin a run and wait for its end; ``done`` is the run where nothing was left to begin. Raises as ``train``."""
    console = terminal()
    with progress_bar(console) as progress:
        running = begin(progress)
    if running is None:
        assert done is not None
        return done
    display = _notebook()
    if display is not None or console.is_terminal:
        for line in running.news:
            say(console, line)
    if display is not None:
        output = _Updated(running.run, display)
        run = running.wait(output.poll)
        output.draw()
        return run
    plan, run = running.plan, running.run
    if not console.is_terminal:
        return running.wait()
    num_workers = None if running.directory.plans.exists() else plan.workers
    with RunDisplay(running.directory, plan.num_steps, num_workers=num_workers, console=console) as on_terminal:
        running.wait(on_terminal.poll, on_terminal.tell)
    return run


class _Updated:
    """An output of a notebook that is drawn again and again."""

    def __init__(self, run: Run, display: Callable[..., Any]) -> None:
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
