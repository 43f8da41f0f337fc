"""The longest sequences that fit, as a table (``tonnage plan MODEL --largest-context``)."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column

from tonnage.api.said import ENDINGS
from tonnage.decide.largest_context import INPUT_TIERS, MOST, Contexts, as_json, largest_contexts, rounded
from tonnage.display.bar import progress_bar
from tonnage.display.terminal import number, put_json, say, table
from tonnage.errors import user_error

DEFAULT_HARDWARE = "RTX4090:128GB,A100-80GB,8xH100"
INPUTS = {"device": "on the GPU", "host": "on the host"}


def show_contexts(model: str, words: Sequence[str], hardware: str | None, console: Console, *, in_json: bool) -> None:
    """Find and print the table for a model on hardware whose names are separated by commas. Raises ``UserError``."""
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
        put_json(as_json(contexts))
        return
    show_table(contexts, console)


def show_table(contexts: Contexts, console: Console) -> None:
    title = "Longest sequence that fits, in tokens, by where inputs of blocks rest"
    ways = dict.fromkeys(cell.way for cell in contexts.cells)
    columns = (number(f"{way}\n{INPUTS[tier]}") for way in ways for tier in INPUT_TIERS)
    shown = table(Column(no_wrap=True), *columns, title=title)
    for line in lines(contexts):
        shown.add_row(*line)
    console.print(shown)
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
