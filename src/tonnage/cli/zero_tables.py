"""What the publications on ZeRO give of memory, and ours beside it (``tonnage plan --zero-table``)."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from tonnage.display.terminal import number
from tonnage.planning.published import DGX_2, MASSIVE, TIERED, largest_by_stage
from tonnage.planning.zero_table import STAGES, parse_parameters, table


def show_zero_tables(sizes: str, console: Console) -> None:
    """Print the ZeRO paper's table for some model sizes, and the largest models, our own figures beside them."""
    for text in sizes.split(","):
        shown = _by_stage(f"{text.strip()} parameters: GB of states on each device", ["devices"])
        for row in table(parse_parameters(text)):
            sizes_in_gb = (value / 1e9 for pair in zip(row.classic, row.ours, strict=True) for value in pair)
            cells = (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in sizes_in_gb)
            shown.add_row(f"{row.devices:,}", *cells)
        console.print(shown)
    show_largest_models(console)


def show_largest_models(console: Console) -> None:
    """Print the largest models that the publications on ZeRO give, as they count them, and ours."""
    title = "Largest model by states, on V100 of 32 GB: table 2 of ZeRO"
    stages = _by_stage(title, ["model parallel", "devices"], ["measured ZeRO 0", "ZeRO 1"])
    for row in largest_by_stage():
        counted = (parameters(value) for pair in zip(row.theirs, row.ours, strict=True) for value in pair)
        stages.add_row(str(row.degree), f"{row.devices:,}", *counted, *map(parameters, row.measured))
    console.print(stages)

    title = "Largest model by states, on one DGX-2 (16 x V100-32GB, host 1.5 TB, 28 TB of NVMe): ZeRO-Infinity"
    tiers = _titled(title, "what rests where", *map(number, ("run", "counted", "ours")))
    for way in TIERED:
        run = "-" if way.published is None else parameters(way.published)
        largest = (parameters(needs.largest(DGX_2)) for needs in (way.theirs, way.ours))
        tiers.add_row(way.name, run, *largest)
    console.print(tiers)

    headings = ("layers", "hidden", "parameters", "TiB of states", "ours")
    massive = _titled("States of massive models: figure 2 of ZeRO-Infinity", *map(number, headings))
    for model in MASSIVE:
        sizes = (f"{value / 2**40:,.2f}" for value in (model.their_bytes, model.our_bytes))
        massive.add_row(str(model.layers), f"{model.hidden:,}", parameters(model.parameters), *sizes)
    console.print(massive)


def _by_stage(title: str, before: Sequence[str], after: Sequence[str] = ()) -> Table:
    """A table with two columns for each stage of ZeRO: theirs and ours."""
    columns = [*map(number, before)]
    for stage in STAGES:
        columns += [number(f"ZeRO {stage}"), Column("ours", justify="right", style="green")]
    return _titled(title, *columns, *map(number, after))


def _titled(title: str, *columns: Column | str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=None)


def parameters(count: float) -> str:
    """A number of parameters in words: ``7.64B``, ``1.01T``."""
    size, unit = (count / 1e12, "T") if count >= 0.9995e12 else (count / 1e9, "B")
    return f"{size:.3g}{unit}"
