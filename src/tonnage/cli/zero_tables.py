"""What the publications on ZeRO give of memory, and ours beside it (``tonnage plan --zero-table``)."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tonnage.planning.published import DGX_2, MASSIVE, TIERED, largest_by_stage
from tonnage.planning.zero_table import STAGES, parse_parameters, table


def show_zero_tables(sizes: str, console: Console) -> None:
    """Print the ZeRO paper's table for some model sizes, and the largest models, our own figures beside them."""
    for text in sizes.split(","):
        shown = Table(title=f"{text.strip()} parameters: GB of states on each device", title_justify="left", box=None)
        shown.add_column("devices", justify="right")
        for stage in STAGES:
            shown.add_column(f"ZeRO {stage}", justify="right")
            shown.add_column("ours", justify="right", style="green")
        for row in table(parse_parameters(text)):
            sizes_in_gb = (value / 1e9 for pair in zip(row.classic, row.ours, strict=True) for value in pair)
            cells = (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in sizes_in_gb)
            shown.add_row(f"{row.devices:,}", *cells)
        console.print(shown)
    show_largest_models(console)


def show_largest_models(console: Console) -> None:
    """Print the largest models that the publications on ZeRO give, as they count them, and ours."""
    title = "Largest model by states, on V100 of 32 GB: table 2 of ZeRO"
    stages = Table(title=title, title_justify="left", box=None)
    for heading in ("model parallel", "devices"):
        stages.add_column(heading, justify="right")
    for stage in STAGES:
        stages.add_column(f"ZeRO {stage}", justify="right")
        stages.add_column("ours", justify="right", style="green")
    for heading in ("measured ZeRO 0", "ZeRO 1"):
        stages.add_column(heading, justify="right")
    for row in largest_by_stage():
        counted = (parameters(value) for pair in zip(row.theirs, row.ours, strict=True) for value in pair)
        stages.add_row(str(row.degree), f"{row.devices:,}", *counted, *map(parameters, row.measured))
    console.print(stages)

    title = "Largest model by states, on one DGX-2 (16 x V100-32GB, host 1.5 TB, 28 TB of NVMe): ZeRO-Infinity"
    tiers = Table(title=title, title_justify="left", box=None)
    for heading in ("what rests where", "run", "counted", "ours"):
        tiers.add_column(heading, justify="right" if heading in ("run", "counted", "ours") else "left")
    for way in TIERED:
        run = "-" if way.published is None else parameters(way.published)
        largest = (parameters(needs.largest(DGX_2)) for needs in (way.theirs, way.ours))
        tiers.add_row(way.name, run, *largest)
    console.print(tiers)

    massive = Table(title="States of massive models: figure 2 of ZeRO-Infinity", title_justify="left", box=None)
    for heading in ("layers", "hidden", "parameters", "TiB of states", "ours"):
        massive.add_column(heading, justify="right")
    for model in MASSIVE:
        sizes = (f"{value / 2**40:,.2f}" for value in (model.their_bytes, model.our_bytes))
        massive.add_row(str(model.layers), f"{model.hidden:,}", parameters(model.parameters), *sizes)
    console.print(massive)


def parameters(number: float) -> str:
    """A number of parameters in words: ``7.64B``, ``1.01T``."""
    size, unit = (number / 1e12, "T") if number >= 0.9995e12 else (number / 1e9, "B")
    return f"{size:.3g}{unit}"
