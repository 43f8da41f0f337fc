"""``tonnage import``: a configuration of another program becomes ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tonnage.display.terminal import put, put_json, say, terminal
from tonnage.files.paths import path_word, word
from tonnage.files.visible import shortened, visible

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.migration import Entry, Import

WAS_NOT_WHOLE = 2
LONGEST_VALUE = 40
MOST_NAMES = 8
"""Of keys that are lost, in one sentence."""
WIDTH_OF_FILES = 140


def import_(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|COMMAND...",
            help="YAML of Axolotl, LLaMA-Factory, torchtune, ms-swift, TRL or Accelerate, DeepSpeed JSON, a saved "
            "command line, or one in quotes; several are combined.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="CONFIG", help="Write the config here, not to standard output.", parser=path_word
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Write the config although keys that decide what is computed are not in it."),
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many workers there are, where no file says it.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the config and its account as JSON and nothing else.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 2 if any key is unknown or asks for what tonnage cannot do.")
    ] = False,
) -> None:
    """Turn a configuration of Axolotl, LLaMA-Factory, torchtune, ms-swift, TRL or DeepSpeed into one of ours.

    Every key is accounted for. Where one that decides what is computed cannot be carried over, nothing is written and
    the exit status is 2, unless --partial says otherwise.
    """
    from tonnage.cli.new_file import write_new
    from tonnage.migration import import_files

    imported = import_files([source if len(source.split()) > 1 else word(source) for source in files], workers=workers)
    is_written = partial or not imported.lost
    if output is not None and is_written:
        write_new(output, imported.text)
    console = terminal(stderr=True)
    if json:
        put_json(imported.to_json())
    else:
        if output is None and is_written:
            put(imported.text, end="", flush=True)
        if not console.is_terminal:
            console.width = WIDTH_OF_FILES
        show_account(imported, console)
    if not is_written:
        names = ", ".join(_as_said(entry) for entry in imported.lost[:MOST_NAMES])
        names += f" and {len(imported.lost) - MOST_NAMES} more" if len(imported.lost) > MOST_NAMES else ""
        say(console, f"Not written: without {names} it is another run. --partial writes the rest.")
    elif output is not None and not json:
        say(console, f"Config: {output}")
    if is_written and strict and not imported.is_whole:
        say(console, "Keys are unknown or not supported (--strict).")
    if not is_written or (strict and not imported.is_whole):
        raise typer.Exit(WAS_NOT_WHOLE)


def show_account(imported: Import, console: Console) -> None:
    """Print what became of every key, and what is still to be said."""
    from rich import box

    from tonnage.migration.keys import VERDICTS

    defaults = f", with the defaults of {imported.version}" if imported.version else ""
    console.print(Text(f"A configuration of {imported.program}{defaults}"))
    several = len(imported.files) > 1
    for verdict in VERDICTS:
        entries = imported.of(verdict)
        if not entries:
            continue
        title = f"{verdict.capitalize()} ({len(entries)})"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("key", "value", *(["becomes"] if verdict == "mapped" else []), "why"):
            table.add_column(heading, overflow="fold")
        place = ""
        for entry in entries:
            if several and entry.setting.where != place:
                place = entry.setting.where
                table.add_row(Text(visible(place), style="italic"))
            cells = [entry.setting.shown, entry.setting.shown_value]
            if verdict == "mapped":
                cells.append("\n".join(key if value is None else f"{key}: {_plain(value)}" for key, value in entry.to))
            table.add_row(*(Text(visible(cell)) for cell in (*cells, entry.note)))
        console.print(table)
    lists = {
        "From defaults of the other program": [f"{i.key}: {_plain(i.value)}  ({i.because})" for i in imported.implied],
        "Conflicts": [f"{'; '.join(conflict.said)}. Taken: {conflict.taken}" for conflict in imported.conflicts],
        "Differences": list(imported.notes),
        "Needed": [": ".join(part for part in (need.key, need.sentence) if part) for need in imported.needs],
    }
    for title, lines in lists.items():
        if lines:
            console.print(Text(title, style="italic"))
            for line in lines:
                console.print(Text(visible(f"  {line}")), soft_wrap=not console.is_terminal)
    counts = ", ".join(f"{len(imported.of(verdict))} {verdict}" for verdict in VERDICTS)
    console.print(f"{len(imported.entries)} keys: {counts}")


def _as_said(entry: Entry) -> str:
    """A key as it was written; of a program that is started, its name as well."""
    setting = entry.setting
    return f"{setting.shown} {setting.shown_value}" if setting.name in ("script", "trl") else setting.shown


def _plain(value: object) -> str:
    from tonnage.config.keys import as_written

    return shortened(as_written(value), LONGEST_VALUE)
