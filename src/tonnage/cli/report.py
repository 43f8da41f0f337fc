"""``tonnage report``: runs on one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tonnage.display.terminal import say, terminal
from tonnage.files.paths import path_word, word


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories.", parser=word)],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write it, by default into the one run.", parser=path_word),
    ] = None,
) -> None:
    """Show a run on one HTML page that needs nothing else: curves, data, plan, config. Several are compared."""
    from tonnage.report.page import write_report

    path = write_report(runs, output)
    say(terminal(), "Report: ", (str(path), "bold"))
