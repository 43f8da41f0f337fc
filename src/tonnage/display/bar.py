"""A progress bar for whatever tells (what, done, total): there while something is under way, gone at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.data import Progress


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """The function to tell; nothing is shown where there is no terminal, or nothing under way."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("", total=None)

    def show(doing: str, done: int, total: int) -> None:
        bar.update(task, description=doing, completed=done, total=total)
        if done < total:
            bar.start()
        elif bar.live.is_started:
            bar.stop()

    try:
        yield show
    finally:
        if bar.live.is_started:  # or rich before 14.3 ends what was never there with an empty line
            bar.stop()
