"""``tonnage export``: a run's newest checkpoint as a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tonnage.files.paths import word

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.rundir.directory import RunDirectory


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.", parser=word)],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A new directory.", parser=word)],
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"], typer.Option(help="Type of the weights; auto is the run's precision.")
    ] = "auto",
    shard_size: Annotated[
        str, typer.Option(help="Largest size of a weight file; about twice of it is the memory that is needed.")
    ] = "4GB",
    step: Annotated[int | None, typer.Option("--from", help="An earlier checkpoint than the newest.")] = None,
    push: Annotated[
        str | None, typer.Option(metavar="REPO", help="Also put it on the Hugging Face hub, as owner/name.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --push: a repository that everybody can read.")
    ] = False,
) -> None:
    """Write a run's model as a plain Hugging Face directory."""
    from tonnage.checkpoint.export import parse_size
    from tonnage.checkpoint.push import push as push_export
    from tonnage.cli.terminal import say, terminal
    from tonnage.rundir.directory import RunDirectory

    console = terminal()
    export_checkpoint(
        RunDirectory(run),
        Path(directory).absolute(),  # beside which it is written at first, also where that is called "."
        console,
        dtype=dtype,
        shard_bytes=parse_size(shard_size),
        step=step,
        check_content=True,
    )
    say(console, "Model: ", (directory, "bold"))
    if push is not None:
        say(console, f"Pushed to {push_export(Path(directory), push, private=not public)}")


def export_checkpoint(
    run: RunDirectory,
    directory: Path,
    console: Console,
    *,
    dtype: str = "auto",
    shard_bytes: int = 4 * 10**9,
    step: int | None = None,
    check_content: bool = False,
) -> None:
    """Export the newest complete checkpoint of ``run``, or that of ``step``, to ``directory``, with a progress bar.

    ``check_content``: whether the checkpoint's hashes are recomputed first; one that was just written has no need.

    Raises:
        UserError: no such run, no complete checkpoint, a damaged one, or ``directory`` is not empty.
    """
    import torch

    from tonnage.checkpoint.card import DataForm, model_card
    from tonnage.checkpoint.export import export as write_model
    from tonnage.checkpoint.resume import choose, damaged
    from tonnage.checkpoint.verify import verify
    from tonnage.cli.decide import progress_bar
    from tonnage.config import read_config
    from tonnage.errors import Problem, UserError
    from tonnage.files.reading import read_record
    from tonnage.model.files import read_model
    from tonnage.planning.plan import Plan

    if not run.is_run():
        raise UserError(Problem(found="no run", needed="a run directory", where=str(run.path)))
    checkpoint = choose(run.checkpoints, step)
    if check_content:
        with progress_bar(console) as progress:
            problems = verify(checkpoint, lambda done, total: progress("verify", done, total))
        if problems:
            raise damaged(checkpoint, *problems)
    config, plan = read_config(run.config, [], check_files=False), Plan.read(run.plan)
    files, model_config = read_model(
        config.model,
        revision=config.revision,
        random_weights=True,
        trust_remote_code=config.trust_remote_code,
        untied=plan.weights.untied,
    )
    model_config.vocab_size = plan.model.vocab_size
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    chosen = config.precision if dtype == "auto" else dtype
    with progress_bar(console) as progress:
        notes = write_model(
            checkpoint,
            directory,
            config=model_config,
            tokenizer=run.tokenizer,
            stop_tokens=read_record(run.data, DataForm).stop_tokens,
            dtype=dtypes[chosen],
            origin=files.directory,
            shard_bytes=shard_bytes,
            card=model_card(run, checkpoint, dtype=chosen),
            progress=lambda done, total: progress("export", done, total),
        )
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)
