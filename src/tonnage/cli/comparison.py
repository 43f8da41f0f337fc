"""What a run made of the rows it was evaluated on, as a table; and the status of a run that fails its gate."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tonnage.display.terminal import number, table

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.report.comparison import Comparison
    from tonnage.rundir.directory import RunDirectory

FAILED_GATE = 4
"""Exit status of a run that went to its end, was exported, and is not within ``evaluate.gate``."""


def conclude(run: RunDirectory, console: Console) -> None:
    """Show how a run that is exported was evaluated, and leave that in its directory; a run that fails its gate ends
    the program."""
    from tonnage.decide.exports import step_of_export
    from tonnage.report.comparison import leave_comparison

    comparison = leave_comparison(run, step_of_export(run))
    show(comparison, console)
    if not comparison.passed:
        sys.exit(FAILED_GATE)


def show(comparison: Comparison, console: Console) -> None:
    from tonnage.report.comparison import NOTHING
    from tonnage.rundir.figures import METHODS

    if comparison.after is None:
        console.print(NOTHING, soft_wrap=True)
    else:
        numbers = map(number, ("before", f"step {comparison.step:,}", "95% interval"))
        figures = table("rows", "figure", *numbers)
        for line in comparison.lines():
            figures.add_row(*line.cells)
        console.print(figures)
        console.print(METHODS, style="dim", soft_wrap=True)
    for gate in comparison.gate:
        value = "nothing told it" if gate.value is None else f"it is {gate.value:.4f}"
        verdict = "holds" if gate.holds else "FAILS"
        console.print(f"gate: {gate.figure} {gate.bound} {verdict}: {value}", soft_wrap=True)
