"""``tonnage plan``: what a run would do, before it does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tonnage.cli.parameters import Overrides
from tonnage.display.bar import progress_bar
from tonnage.display.terminal import number, put, say, table, terminal
from tonnage.errors import UserError, user_error
from tonnage.files.paths import word
from tonnage.files.visible import as_json_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from tonnage.planning.plan import Choice, Plan
    from tonnage.planning.ways import Compared
    from tonnage.rundir.directory import RunDirectory


def plan(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG|MODEL", help="A YAML config, or a model: hub id or directory.", parser=word),
    ] = None,
    overrides: Overrides = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="HARDWARE", help="Plan for other hardware, as 2x8xA100-80GB, 8xH100 or RTX4090:128GB."),
    ] = None,
    zero_table: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="What the papers on ZeRO give beside ours: states of sizes such as 7.5B,1T, largest models.",
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(metavar="AMOUNT", min=0, help="What all of the hardware costs an hour: shows what the run costs."),
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Solve backwards: the largest rank, max_length or micro_batch that fits."),
    ] = None,
    largest_context: Annotated[
        bool,
        typer.Option(
            "--largest-context",
            help="The longest sequence that fits, by way to train and tier, for hardware separated by commas.",
        ),
    ] = False,
    why: Annotated[
        bool, typer.Option("--why", help="Show the ladder: what is given up for memory in which order, and its cost.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model's own Python code run on this machine.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")] = False,
) -> None:
    """Show what CONFIG would do: layout, steps, and where every byte and second goes. A MODEL alone will do, on full
    packs that are supposed, unless data.train names rows."""
    from tonnage.api.said import ENDINGS
    from tonnage.cli.context_table import show_contexts
    from tonnage.cli.plan_answers import plan_as_json, show_ladder, show_largest, show_ways
    from tonnage.cli.zero_tables import show_zero_tables
    from tonnage.config.read import overridden_key
    from tonnage.decide.decision import asked
    from tonnage.decide.largest import largest as solved
    from tonnage.decide.plans import compared, offering_ways, says_what_is_trained, supposed
    from tonnage.planning.machine import parse_hardware

    console = terminal(stderr=json)
    if zero_table is not None:
        show_zero_tables(zero_table, console)
        return
    if config is None:
        raise user_error("nothing to plan", "a config or a model", "tonnage plan CONFIG|MODEL")
    words = [*(overrides or []), *(["trust_remote_code=true"] if trust_remote_code else [])]
    if largest_context:
        show_contexts(config, words, hardware, console, in_json=json)
        return
    machine = None if hardware is None else parse_hardware(hardware)
    is_config = config.endswith(ENDINGS)
    names_rows = any(overridden_key(one) in ("data", "data.train") and "train" in one for one in words)
    ways: tuple[Compared, ...] = ()
    solution = None
    with progress_bar(console) as progress:
        if is_config or names_rows:
            named = [] if is_config else [f"model={config}"]
            question = asked(config if is_config else None, [*named, *words], machine, progress)
        else:
            question = supposed(config, words, machine, progress)
        if largest is not None:
            solution = solved(question, largest, progress)
        elif not is_config and not says_what_is_trained(words):
            ways = compared(question, progress)
    if solution is not None:
        show_largest(solution, console, in_json=json)
        return
    full = ways[0].plan if ways else None
    try:
        chosen = full if full is not None and full.fits else question.plan()
    except UserError as error:
        if not json and any(one.plan is not None for one in ways):
            show_ways(ways, console)
        raise offering_ways(error, ways) from error
    ladder = question.why(chosen) if why else []
    if json:
        put(as_json_text(plan_as_json(chosen, ways, ladder)))
        return
    show_plan(chosen, console, price)
    if why:
        show_ladder(ladder, console)
    if ways:
        show_ways(ways, console)
    show_instants(chosen.choice, console)


def show_plan(plan: Plan, console: Console, price: float | None = None) -> None:
    """Print a plan: what will be done, where the bytes and the seconds go, and what else could be done.

    ``price`` is that of an hour of all of the hardware.
    """
    from tonnage.planning.drawn import facts

    lines = table(title="Plan", show_header=False)
    for name, words in facts(plan):
        lines.add_row(name, Text(words))
        if name == "memory":
            lines.add_row("", _bar(plan.choice, plan.budget.memory))
    hours = plan.choice.seconds.total * plan.num_steps / 3600
    if price is not None:
        epoch = price * hours * plan.data.num_packs / plan.num_packs
        lines.add_row("cost", f"{price * hours:,.2f} in all, {epoch:,.2f} an epoch, at {price:g} an hour")
    console.print(lines)
    for warning in plan.warnings:
        say(console, ("warning", "yellow"), f" {warning}")
    show_frontier(plan, console)


def show_instants(choice: Choice, console: Console) -> None:
    """Print what a worker holds at every instant of the run: a bar for each, in the colours of the plan's."""
    from tonnage.planning.words import size

    bars = Table(title="Memory through the run", title_justify="left", show_header=False, box=None)
    width = min(60, console.width - 44)
    for instant in choice.instants:
        parts = choice.parts(instant)
        name = Text(instant.name, "bold" if instant == choice.peak else "")
        bars.add_row(name, size(sum(parts.values())), _stacked(parts, width / choice.peak_bytes))
    console.print(bars)


def show_frontier(plan: Plan, console: Console) -> None:
    """Print what else could be done: what would be faster, and what would need less memory."""
    from tonnage.planning.words import describe, size, step_time

    if not plan.frontier:
        return
    others = table(number("memory"), number("step"), "", title="Other ways")
    for choice in plan.frontier:
        too_much = "" if plan.budget.holds(choice) else "  does not fit"
        waits = choice.saving.every > 0 and not choice.layout.saves_beside
        more = f"{', training waits for saves' if waits else ''}{too_much}"
        others.add_row(size(choice.peak_bytes), step_time(choice.seconds.total), describe(choice.layout) + more)
    console.print(others)


def show_outcome(run: RunDirectory, plan: Plan, console: Console, since: int = 0) -> None:
    """Print what was planned beside what was measured in the steps after ``since``, once a run has ended, and put both
    into its directory; and what went over the disk beside what the disk can do."""
    from statistics import median

    from tonnage.decide.outcome import measure, timed_steps
    from tonnage.planning.seconds import disk_bytes
    from tonnage.planning.words import size, step_time
    from tonnage.rundir.records import has_traffic

    if (outcome := measure(run, plan, since)) is None:
        return
    planned, measured = outcome["planned"], outcome["measured"]
    steps, seconds = timed_steps(run, plan, since), measured["step_seconds"]
    memory, time = (measured[key] / planned[key] - 1 for key in ("memory_bytes", "step_seconds"))
    console.print(
        f"planned {size(planned['memory_bytes'])} a worker and {step_time(planned['step_seconds'])} a step, measured "
        f"{size(measured['memory_bytes'])} ({memory:+.0%}) and {step_time(seconds)} ({time:+.0%})",
        soft_wrap=True,
    )
    copies = [moved for record in (steps[1:] or steps) if "copied_bytes" in (moved := record.get("host") or {})]
    if copies and plan.choice.seconds.host:
        copied, waited = (median(copy[key] for copy in copies) for key in ("copied_bytes", "waited_seconds"))
        console.print(
            f"host: {size(copied)} copied a step and worker, {step_time(plan.choice.seconds.host)} each way as "
            f"planned; training waited {step_time(waited)} for it",
            soft_wrap=True,
        )
    moves = [moved for record in (steps[1:] or steps) if has_traffic(moved := record.get("disk") or {})]
    if moves and plan.choice.seconds.disk:
        read, written, waited = (
            median(move[key] for move in moves) for key in ("read_bytes", "written_bytes", "waited_seconds")
        )
        rate = disk_bytes(plan.layout, plan.model, plan.states) / plan.choice.seconds.disk
        console.print(
            f"disk: {size(read)} read and {size(written)} written a step and worker, "
            f"{size((read + written) / seconds)} a second of the {size(rate)} that the plan counts on; training waited "
            f"{step_time(waited)} for it",
            soft_wrap=True,
        )


BAR_CELLS = 60
COLOURS = {
    "weights": "blue",
    "gathered": "cyan",
    "optimizer": "magenta",
    "gradients": "yellow",
    "activations": "green",
    "in flight": "dark_green",
    "images": "dark_orange3",
    "workspace": "bright_green",
    "loss": "red",
    "save": "white",
    "host": "grey70",
    "heap": "grey50",
    "runtime": "bright_black",
}


def _bar(choice: Choice, budget_bytes: float) -> Text:
    """The peak as a stacked bar whose whole width is the budget, and a legend."""
    from tonnage.planning.words import size

    parts = choice.parts(choice.peak)
    bar, legend = _stacked(parts, BAR_CELLS / max(budget_bytes, choice.peak_bytes)), Text()
    bar.append("░" * (BAR_CELLS - len(bar)), "bright_black")
    for name, num_bytes in parts.items():
        legend.append("■ ", COLOURS[name])
        legend.append(f"{name} {size(num_bytes)}  ")
    return Text("\n").join((bar, legend))


def _stacked(parts: Mapping[str, float], cells_per_byte: float) -> Text:
    bar, end = Text(), 0.0
    for name, num_bytes in parts.items():
        end += num_bytes
        bar.append("█" * (round(end * cells_per_byte) - len(bar)), COLOURS[name])
    return bar
