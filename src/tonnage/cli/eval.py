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
    from rich.table import Table

    from tonnage.host.allocators import choose_allocators

    choose_allocators()
    from tonnage.decide.evaluation import evaluate_model
    from tonnage.display.bar import progress_bar
    from tonnage.display.terminal import put, terminal, to_json

    console = terminal(stderr=json)
    with progress_bar(console) as progress:
        found = evaluate_model(
            model,
            data,
            progress,
            format=format,
            template=template,
            max_length=max_length,
            answers=exact_match,
            max_new_tokens=max_new_tokens,
            precision=precision,
            trust_remote_code=trust_remote_code,
            tell=console.print,
        )
    if json:
        put(to_json(found.figures()))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in found.figures().items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
    console.print(table)
