"""``tonnage inspect``: the data exactly as the model will see it, and the account of it."""

from __future__ import annotations

from typing import Annotated

import typer

from tonnage.cli.parameters import ConfigFile, Overrides
from tonnage.display.bar import progress_bar
from tonnage.display.terminal import put_json, terminal


def inspect(
    config: ConfigFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="How many rows to show, token by token.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print the same as JSON and nothing else.")] = False,
) -> None:
    """Show the data of CONFIG as the model will see them: account, lengths, and rows with their mask in colour."""
    from tonnage.cli.data_report import documents_as_json, show_account, show_documents, show_lengths
    from tonnage.config import read_config
    from tonnage.data import DataError
    from tonnage.decide.models import find
    from tonnage.decide.rows import prepare_data

    console = terminal(stderr=json)
    resolved = read_config(config, overrides or [])
    try:
        with progress_bar(console) as progress:
            prepared = prepare_data(resolved, find(resolved), progress)
    except DataError as error:
        if json:
            put_json({"account": error.account.to_json(), "problems": [str(problem) for problem in error.problems]})
        else:
            show_account(error.account, console)
            show_lengths(error.account, console)
        raise
    if json:
        shown = documents_as_json(prepared, rows, resolved.seed)
        account, stop_tokens = prepared.account.to_json(), list(prepared.stop_tokens)
        put_json({"account": account, "stop_tokens": stop_tokens, "documents": shown})
        return
    show_account(prepared.account, console)
    show_lengths(prepared.account, console)
    show_documents(prepared, rows, resolved.seed, console)
