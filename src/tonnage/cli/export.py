"""``tonnage export``: a run's newest checkpoint as a model directory, for transformers or another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tonnage.cli.parameters import RunPath
from tonnage.display.bar import progress_bar
from tonnage.display.terminal import say, terminal
from tonnage.files.paths import word


def export(
    run: RunPath,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A new directory.", parser=word)],
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"], typer.Option(help="Type of the weights; auto is the run's precision.")
    ] = "auto",
    shard_size: Annotated[
        str, typer.Option(help="Largest size of a weight file; about twice of it is the memory that is needed.")
    ] = "4GB",
    step: Annotated[int | None, typer.Option("--from", help="An earlier checkpoint than the newest.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run that trains an adapter: the whole model, additions added.")
    ] = False,
    target: Annotated[
        Literal["transformers", "vllm", "ollama", "gguf", "mlx"],
        typer.Option("--for", help="The program that is to read it; its command is printed."),
    ] = "transformers",
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Of a run with quantize_aware: weights as torchao quantises them.")
    ] = False,
    converter: Annotated[
        str | None,
        typer.Option(metavar="DIR|FILE", help="llama.cpp's convert_hf_to_gguf.py, or its folder.", parser=word),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Compare its logits with the run's before it is there.")
    ] = True,
    push: Annotated[
        str | None, typer.Option(metavar="REPO", help="Also put it on the Hugging Face hub, as owner/name.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --push: a repository that everybody can read.")
    ] = False,
) -> None:
    """Write a run's model as a plain Hugging Face directory, or as another program reads it."""
    from tonnage.checkpoint.export import parse_size
    from tonnage.checkpoint.push import push as push_export
    from tonnage.decide.exports import export_checkpoint
    from tonnage.decide.handing import Wishes, serving
    from tonnage.rundir.directory import RunDirectory

    console = terminal()
    with progress_bar(console) as progress:
        notes = export_checkpoint(
            RunDirectory(run),
            Path(directory).absolute(),  # beside which it is written at first, also where that is called "."
            progress,
            Wishes(dtype, parse_size(shard_size), merge, target, converter, compare, quantized),
            step=step,
            check_content=True,
        )
    for note in notes:
        console.print(note, soft_wrap=True)
    say(console, "Model: ", (directory, "bold"))
    for line in serving(RunDirectory(run), directory, target, dtype, merge=merge):
        say(console, "Serve it: ", (line, "bold"))
    if push is not None:
        say(console, f"Pushed to {push_export(Path(directory), push, private=not public)}")
