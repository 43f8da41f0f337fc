"""``tonnage export``: a run's newest checkpoint as a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.rundir import RunDirectory


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A new directory.")],
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"], typer.Option(help="Type of the weights; auto is the run's precision.")
    ] = "auto",
) -> None:
    """Write a run's model as a plain Hugging Face directory."""
    from rich.console import Console

    from tonnage.rundir import RunDirectory

    console = Console(highlight=False)
    export_checkpoint(RunDirectory(run), Path(directory), console, dtype=dtype)
    console.print(f"Model: [bold]{directory}[/bold]")


def export_checkpoint(run: RunDirectory, directory: Path, console: Console, *, dtype: str = "auto") -> None:
    """Export the newest complete checkpoint of ``run`` to ``directory``, with a progress bar.

    Raises:
        UserError: no such run, no complete checkpoint, or ``directory`` is not empty.
    """
    import torch

    from tonnage.checkpoint.export import export as write_model
    from tonnage.checkpoint.save import complete_checkpoints
    from tonnage.cli.decide import progress_bar
    from tonnage.config import read_config
    from tonnage.errors import Problem, UserError
    from tonnage.model.files import find_model, read_model_config
    from tonnage.plan.plan import Plan
    from tonnage.rundir import read_json

    if not run.is_run():
        raise UserError(Problem(found="no run", needed="a run directory", where=str(run.path)))
    checkpoints = complete_checkpoints(run.checkpoints)
    if not checkpoints:
        raise UserError(
            Problem(
                found="no complete checkpoint",
                needed="a run that has saved at least once",
                change="let it train to its end, or set checkpoint.every",
                where=str(run.checkpoints),
            )
        )
    config, plan = read_config(run.config, [], check_files=False), Plan.read(run.plan)
    files = find_model(config.model, random_weights=True)
    model_config = read_model_config(files, trust_remote_code=config.trust_remote_code)
    model_config.vocab_size = plan.model.vocab_size
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    with progress_bar(console) as progress:
        write_model(
            checkpoints[-1],
            directory,
            config=model_config,
            tokenizer=run.tokenizer,
            stop_tokens=read_json(run.data)["stop_tokens"],
            dtype=dtypes[config.precision if dtype == "auto" else dtype],
            progress=lambda done, total: progress("export", done, total),
        )
