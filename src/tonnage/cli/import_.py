"""``tonnage import``: a configuration of DeepSpeed, Accelerate, transformers or TRL becomes ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.files.paths import path_word

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.migration import Import

WAS_NOT_WHOLE = 2
LONGEST_VALUE = 40
WIDTH_OF_FILES = 140


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="DeepSpeed JSON, Accelerate YAML, a command line, or arguments as YAML or JSON; several are combined.",
            parser=path_word,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="CONFIG", help="Write the config here, not to standard output.", parser=path_word
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the config and its account as JSON and nothing else.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 2 if a key is unknown or asks for what tonnage cannot do.")
    ] = False,
) -> None:
    """Turn configurations of DeepSpeed, Accelerate, transformers or TRL into one of ours, and account for every key."""
    from tonnage.cli.terminal import put, put_json, say, terminal
    from tonnage.errors import Problem, UserError
    from tonnage.files.writing import write_whole
    from tonnage.migration import import_files

    found = import_files(files)
    if output is not None:
        try:
            write_whole(output, found.text, new=True)
        except FileExistsError:
            problem = Problem("is there already", "a new file", "name another, or remove it", str(output))
            raise UserError(problem) from None
        except FileNotFoundError:
            problem = Problem(
                f"no directory {output.parent}", "a new file in a directory that is there", where=str(output)
            )
            raise UserError(problem) from None
    if json:
        put_json(found.to_json())
    else:
        if output is None:
            put(found.text, end="", flush=True)
        console = terminal(stderr=True)
        if not console.is_terminal:
            console.width = WIDTH_OF_FILES
        show_account(found, console)
        if output is not None:
            say(console, f"Config: {output}")
    if strict and not found.is_whole:
        raise typer.Exit(WAS_NOT_WHOLE)


def show_account(found: Import, console: Console) -> None:
    """Print what became of every key, and what is still to be said."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from tonnage.files.visible import visible
    from tonnage.migration.keys import VERDICTS

    several = len(found.files) > 1
    for verdict in VERDICTS:
        entries = found.of(verdict)
        if not entries:
            continue
        title = f"{verdict.capitalize()} ({len(entries)})"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("key", "value", *(["becomes"] if verdict == "mapped" else []), "why"):
            table.add_column(heading, overflow="fold")
        place = ""
        for entry in entries:
            if several and entry.given.where != place:
                place = entry.given.where
                table.add_row(Text(visible(place), style="italic"))
            cells = [entry.given.shown, entry.given.shown_value]
            if verdict == "mapped":
                cells.append("\n".join(key if value is None else f"{key}: {_plain(value)}" for key, value in entry.to))
            table.add_row(*(Text(visible(cell)) for cell in (*cells, entry.note)))
        console.print(table)
    lists = {
        "From defaults of the other program": [f"{i.key}: {_plain(i.value)}  ({i.because})" for i in found.implied],
        "Conflicts": [f"{'; '.join(conflict.said)}. Taken: {conflict.taken}" for conflict in found.conflicts],
        "Differences": list(found.notes),
        "Needed": [": ".join(part for part in (need.key, need.sentence) if part) for need in found.needs],
    }
    for title, lines in lists.items():
        if lines:
            console.print(Text(title, style="italic"))
            for line in lines:
                console.print(Text(visible(f"  {line}")), soft_wrap=not console.is_terminal)
    counts = ", ".join(f"{len(found.of(verdict))} {verdict}" for verdict in VERDICTS)
    console.print(f"{len(found.entries)} keys: {counts}")


def _plain(value: object) -> str:
    from tonnage.config.keys import as_written

    written = as_written(value)
    return written if len(written) <= LONGEST_VALUE else written[: LONGEST_VALUE - 3] + "..."
