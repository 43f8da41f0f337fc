"""``tonnage bench``: how fast this machine trains a known shape, as a row of ``benchmarks/cpu.md`` to send."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tonnage.display.bar import progress_bar
from tonnage.display.terminal import put, terminal, to_json
from tonnage.errors import refusals
from tonnage.files.paths import path_word

DISTURBED = 0.05
"""Share of the processors from which on others, who have it, should be told of."""


def bench(
    shape: Annotated[str, typer.Option(metavar="NAME", help="A model's shape; its weights are drawn.")] = "pythia-70m",
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="bf16 or fp32 (all weights), lora, nf4 (LoRA over 4 bits), long (a document of 8,192 tokens a step).",
        ),
    ] = "bf16",
    steps: Annotated[int, typer.Option(min=1, help="Steps to time, before as many that are recorded.")] = 2,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures as JSON, too.", parser=path_word)
    ] = None,
) -> None:
    """Measure how fast this machine trains a known shape, in about a minute, and print a row to send.

    Of the floor: which part of a step its matrix products alone would take, at a rate that is measured here as well.
    """
    from tonnage.cli.new_file import check_new, write_new
    from tonnage.cli.profile import take_steps
    from tonnage.decide.decision import decide
    from tonnage.doctor.hardware import Neighbours, look
    from tonnage.prove.bench import markdown, result_of, row_of, write_run_of
    from tonnage.rundir.directory import RunDirectory

    if output is not None:
        check_new(output)
    console = terminal(stderr=True)
    with (
        refusals("what is measured could not be written", Path(tempfile.gettempdir())),
        tempfile.TemporaryDirectory() as folder,
        progress_bar(console) as progress,
    ):
        config = write_run_of(Path(folder), shape, method, steps)
        decision = decide(str(config), progress=progress)
        neighbours = Neighbours()
        figures = take_steps(RunDirectory(Path(folder) / "run"), decision, steps, progress)
        result = result_of(shape, method, decision.plan, figures, look(), neighbours.share())
    if output is not None:
        write_new(output, to_json(result, indent=1) + "\n")
    put(markdown([row_of(result)]))
    if (share := result["share_of_cpu_that_others_had"]) > DISTURBED:
        console.print(f"Others had {share:.0%} of the processors meanwhile: end them, and measure again.")
