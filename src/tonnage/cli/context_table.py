"""The longest sequences that fit, as a table (``tonnage plan MODEL --largest-context``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tonnage.decide.largest_context import INPUT_TIERS, MOST, Contexts, as_json, largest_contexts, rounded

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_HARDWARE = "RTX4090:128GB,A100-80GB,8xH100"
INPUTS = {"device": "on the GPU", "host": "on the host"}


def show_contexts(model: str, words: Sequence[str], hardware: str | None, console: Console, *, in_json: bool) -> None:
    """Find and print the table for a model on hardware whose names are separated by commas. Raises ``UserError``."""
    from tonnage.api.said import ENDINGS
    from tonnage.display.bar import progress_bar
    from tonnage.display.terminal import put
    from tonnage.errors import user_error
    from tonnage.files.visible import as_json_text

    if model.endswith(ENDINGS):
        raise user_error(
            where="--largest-context",
            found=f"a config ({model})",
            needed="a model: the table is of full packs, and varies what a config says",
            change="tonnage plan MODEL --largest-context, or for the config: --largest max_length",
        )
    names = [name.strip() for name in (hardware or DEFAULT_HARDWARE).split(",")]
    with progress_bar(console) as progress:
        contexts = largest_contexts(model, words, names, progress)
    if in_json:
        import json

        put(as_json_text(json.dumps(as_json(contexts), indent=2)))
        return
    show_table(contexts, console)


def show_table(contexts: Contexts, console: Console) -> None:
    """Print the table."""
    from rich.table import Table

    from tonnage.display.terminal import say

    title = "Longest sequence that fits, in tokens, by where inputs of blocks rest"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for way in dict.fromkeys(cell.way for cell in contexts.cells):
        for tier in INPUT_TIERS:
            table.add_column(f"{way}\n{INPUTS[tier]}", justify="right")
    for line in lines(contexts):
        table.add_row(*line)
    console.print(table)
    if any(cell.is_open for cell in contexts.cells):
        say(console, f">= {rounded(MOST)}: longer ones were not tried")
    positions = contexts.positions
    if positions is not None and any(cell.tokens > positions for cell in contexts.cells):
        say(console, f"the model has {positions:,} positions; rope gives it more: rope='{{type: yarn, factor: 4}}'")


def lines(contexts: Contexts) -> list[list[str]]:
    """Cells of the table as text: hardware, then the ways, each with inputs of blocks on the device and on the host."""
    by_place = {(cell.hardware, cell.way, cell.inputs): cell for cell in contexts.cells}
    ways = dict.fromkeys(cell.way for cell in contexts.cells)
    shown = []
    for hardware in dict.fromkeys(cell.hardware for cell in contexts.cells):
        cells = [by_place[hardware, way, tier] for way in ways for tier in INPUT_TIERS]
        shown.append([hardware, *((">= " if cell.is_open else "") + rounded(cell.tokens) for cell in cells)])
    return shown
