"""``tonnage eval``: loss, perplexity and exact match of a run or a model on a file."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tonnage.files.paths import word


def eval_(
    model: Annotated[
        str,
        typer.Argument(metavar="RUN|MODEL", help="A run directory, a model directory or a hub id.", parser=word),
    ],
    data: Annotated[
        list[str],
        typer.Option("--data", metavar="FILE", help="Rows to evaluate on; may be given more than once.", parser=word),
    ],
    format: Annotated[str, typer.Option(help="Format of the rows; auto finds out.")] = "auto",
    template: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Chat template; auto is the tokenizer's own.", parser=word)
    ] = "auto",
    max_length: Annotated[int, typer.Option(help="Tokens in a pack.", min=2)] = 2048,
    exact_match: Annotated[
        int, typer.Option(help="Generate answers to this many rows and count the exact ones; 0 is none.", min=0)
    ] = 100,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 128,
    precision: Annotated[
        Literal["auto", "bf16", "fp32"], typer.Option(help="auto is the type of the weights.")
    ] = "auto",
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Let the model's own Python code run; a run's config says it too."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
) -> None:
    """Loss, perplexity and exact match on the rows of a file."""
    import math

    import torch
    from rich.table import Table

    from tonnage.cli.bar import progress_bar
    from tonnage.cli.terminal import put, terminal, to_json
    from tonnage.data import DataOptions, Source, prepare
    from tonnage.decide.models import code_allowed
    from tonnage.host.threads import usable_cores
    from tonnage.inference.generate import exact_match as count_exact
    from tonnage.inference.generate import resolve_model
    from tonnage.kernels.threads import use_threads
    from tonnage.model.files import check_fit, find_model, read_model_config, read_tokenizer
    from tonnage.model.matching import ANY, check_weights
    from tonnage.parallel.parallelize import Precision
    from tonnage.parallel.world import join_world
    from tonnage.training.batch import Deal, round_to
    from tonnage.training.building import assemble_model
    from tonnage.training.evaluate import evaluate
    from tonnage.training.pipeline import Pipeline
    from tonnage.training.weigh import weigh

    console = terminal(stderr=json)
    trusted = code_allowed(model, trust_remote_code)
    directory = str(resolve_model(model, trust_remote_code=trusted))
    files = find_model(directory)
    config = read_model_config(files, trust_remote_code=trusted)
    tokenizer = read_tokenizer(files, trust_remote_code=trusted)
    weights = check_weights(files, config, allow_unexpected=ANY)
    if weights.left_out:
        console.print(f"{len(weights.left_out):,} tensors that the model has no place for are left out.")
    positions = getattr(config, "max_position_embeddings", None) or max_length
    max_length = min(max_length, positions)
    check_fit(config, tokenizer, max_length)
    use_threads(usable_cores())
    with progress_bar(console) as progress:
        options = DataOptions(
            train=tuple(Source(path, format=format) for path in data),
            max_length=max_length,
            template=template,
            pack=not weigh(config, document_tokens=2, recomputes=("none",)).documents_meet,
        )
        prepared = prepare(options, tokenizer, progress=progress)
        with join_world() as world:
            compute = precision if precision != "auto" else ("fp32" if config.dtype == torch.float32 else "bf16")
            dtypes = Precision.of(compute, world.data_size)
            assembled = assemble_model(files, config, world, dtypes, allow_unexpected=ANY)
            loss = evaluate(
                Pipeline({0: assembled.loss_model}, world, dtypes.compute),
                prepared.train,
                Deal(1, 1, rank=0, world_size=1, round_to=round_to(max_length, world.device, dtypes.compute)),
                world,
                progress=lambda done, total: progress("evaluate", done, total),
            )
        figures: dict[str, float | int] = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "supervised_tokens": prepared.train.supervised_tokens,
        }
        if exact_match:
            right, asked = count_exact(
                directory,
                data,
                limit=exact_match,
                max_new_tokens=max_new_tokens,
                format=format,
                template=template,
                trust_remote_code=trusted,
                progress=lambda done, total: progress("generate", done, total),
            )
            figures |= {"exact_match": right / asked if asked else float("nan"), "answers": asked}
    if json:
        put(to_json(figures))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
    console.print(table)
