"""``tonnage profile``: where the time of a step goes, by cause: bars here, a picture and a trace in a folder."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from tonnage.cli.parameters import ConfigFile
from tonnage.display.bar import progress_bar
from tonnage.display.terminal import number, put_json, table, terminal
from tonnage.errors import UserError, refusals, user_error
from tonnage.files.paths import path_word

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.data import Progress
    from tonnage.decide.decision import Decision
    from tonnage.rundir.directory import RunDirectory

COLOURS = {
    "matrix products": ("blue", "#3b6fd4"),
    "attention": ("cyan", "#2aa5b8"),
    "head and loss": ("red", "#cf4b4b"),
    "norms, sums and copies": ("green", "#4b9e5f"),
    "clip and update": ("magenta", "#a457b8"),
    "communication": ("yellow", "#c99b26"),
    "waiting for other stages": ("bright_yellow", "#e3cf8a"),
    "waiting for the disk": ("white", "#8c8c8c"),
    "between operations": ("bright_black", "#5c5c5c"),
}
"""On a terminal and in the picture."""
WAITS = ("communication", "waiting for other stages")
SHOWN_OPERATIONS, SHOWN_WORKERS = 8, 16
PROFILE = re.compile(r"profile\.(json|svg)|trace-[0-9]+\.json\.gz")
"""Files of a profile."""


def profile(
    config: ConfigFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Change keys of the config, as memory.micro_batch=2."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to record, after as many that are only timed.")] = 3,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A folder for picture, trace and figures; by default OUTPUT-profile.", parser=path_word
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Take a few real steps of a run and show where their time goes, against what products alone would take."""
    from tonnage.config import read_config
    from tonnage.decide.decision import decide
    from tonnage.files.places import check_vacant, check_writable
    from tonnage.files.writing import made, write_json, write_whole
    from tonnage.rundir.directory import RunDirectory

    console = terminal(stderr=as_json)
    folder = output or Path(f"{read_config(config, overrides or []).output}-profile")
    with refusals("the profile could not be written", folder):
        check_vacant(
            folder, "a new or empty directory, or an earlier profile's", "name another: --output", is_own=_is_own
        )
        check_writable(folder)
    with progress_bar(console) as progress:
        decision = decide(config, overrides or [], progress)
    if decision.plan.num_steps < (needed := 2 * steps + 1):
        observed = f"{decision.plan.num_steps} steps in the run"
        raise user_error(observed, f"{needed}: one to warm up, {steps} to time, {steps} to record", "--steps 1")
    with (
        refusals("the profile could not be written", folder),
        made(folder),
        tempfile.TemporaryDirectory(dir=folder) as inner,
    ):
        run = RunDirectory(Path(inner) / "run")
        with progress_bar(console) as progress:
            figures = take_steps(run, decision, steps, progress)
        for rank in range(decision.plan.workers):
            shutil.move(run.path / f"trace-{rank}.json.gz", folder / f"trace-{rank}.json.gz")
        write_json(folder / "profile.json", figures)
        write_whole(folder / "profile.svg", picture(figures))
    if as_json:
        put_json(figures)
        return
    show_profile(figures, console)
    console.print(
        f"Picture: {folder / 'profile.svg'}    figures: {folder / 'profile.json'}    "
        f"trace: {folder / 'trace-0.json.gz'} (for https://ui.perfetto.dev)",
        soft_wrap=True,
    )


def _is_own(path: Path) -> bool:
    """Whether a file belongs to an earlier profile: by its name, and by the figures beside it."""
    from tonnage.files.reading import read_object

    if not PROFILE.fullmatch(path.name):
        return False
    try:
        return "causes" in read_object(path.with_name("profile.json"), dict)
    except UserError:
        return False


def take_steps(run: RunDirectory, decision: Decision, steps: int, progress: Progress) -> dict[str, Any]:
    """Take the steps of a profile in a run directory that is not there yet; returns the figures of all workers."""
    from tonnage.decide.written import write_run
    from tonnage.launch.local import run_workers

    plan, total = decision.plan, 2 * steps + 1
    write_run(run, decision)
    command = [sys.executable, "-m", "tonnage.training.profiling", str(run.path), str(steps)]
    doing = f"{total} steps of {plan.tokens_per_step:,} tokens on {plan.workers} worker(s)"

    def show() -> None:
        taken = sum("loss" in record for record in run.read_metrics())
        progress(doing, min(taken, total - 1), total)  # it is over when the figures are there

    run_workers(run, plan.workers, plan.threads_per_worker, poll=show, command=command)
    progress(doing, total, total)
    return merge([json.loads((run.path / f"profile-{rank}.json").read_text()) for rank in range(plan.workers)])


def merge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One account of all ranks: means of what differs between them, the sum of their peaks, the operations of the
    first, and under ``by_worker`` the time of each."""
    merged = {**ranks[0], "workers": len(ranks)}
    names = ("step_seconds", "causes")
    merged["by_worker"] = [{name: rank[name] for name in names} for rank in ranks]
    for name in ("step_seconds", "recorded_step_seconds"):
        merged[name] = sum(rank[name] for rank in ranks) / len(ranks)
    merged["peak_bytes"] = {kind: sum(rank["peak_bytes"][kind] for rank in ranks) for kind in ("host", "device")}
    causes = ranks[0]["causes"]
    merged["causes"] = {cause: sum(rank["causes"][cause] for rank in ranks) / len(ranks) for cause in causes}
    rate = sum(rank["product_flops_per_second"] for rank in ranks) / len(ranks)
    merged["product_flops_per_second"], merged["floor_seconds"] = rate, ranks[0]["flops"] / rate
    return merged


def show_profile(figures: dict[str, Any], console: Console, width: int = 40) -> None:
    """Print the causes as bars, the longest operations, and the floor."""
    seconds, causes = figures["step_seconds"], figures["causes"]
    largest = max(causes.values())
    title = f"A step: {seconds:.3g} s, {figures['tokens']:,.0f} tokens, {figures['tokens'] / seconds:,.0f} tokens/s"
    bars = table("", number(), number(), "", title=title, show_header=False)
    for cause, spent in causes.items():
        if spent > 0.0005 * seconds:
            bar = Text("█" * max(1, round(width * spent / largest)), COLOURS[cause][0])
            bars.add_row(cause, f"{1000 * spent:,.0f} ms", f"{spent / seconds:.0%}", bar)
    console.print(bars)
    longest = table(title="Longest operations", show_header=False)
    for operation in figures["operations"][:SHOWN_OPERATIONS]:
        longest.add_row(
            operation["name"][:60],
            f"{1000 * operation['seconds']:,.0f} ms",
            f"{operation['calls']:,.0f} calls",
            operation["cause"],
        )
    console.print(longest)
    if figures["workers"] > 1:
        show_workers(figures["by_worker"], console)
    console.print(floor_line(figures), soft_wrap=True)


def show_workers(workers: list[dict[str, Any]], console: Console) -> None:
    """Print how much of a step each worker computes, and how long it waits for the others."""
    shares = table(*map(number, ("worker", "computes", *WAITS)), title="Of a step, each worker")
    for rank, worker in enumerate(workers[:SHOWN_WORKERS]):
        waits = [worker["causes"][cause] / worker["step_seconds"] for cause in WAITS]
        shares.add_row(str(rank), f"{1 - sum(waits):.0%}", *(f"{share:.0%}" for share in waits))
    console.print(shares)
    if len(workers) > SHOWN_WORKERS:
        console.print(f"... and {len(workers) - SHOWN_WORKERS} more, in profile.json")


def floor_line(figures: dict[str, Any]) -> str:
    """What the products of a step would take alone, and what part of the step that is."""
    floor, seconds = figures["floor_seconds"], figures["step_seconds"]
    return (
        f"Floor: {figures['flops'] / 1e12:.3g} TFLOP at {figures['product_flops_per_second'] / 1e12:.3g} TFLOP/s (one "
        f"large product, measured here) take {floor:.3g} s: {floor / seconds:.0%} of a step"
    )


def picture(figures: dict[str, Any]) -> str:
    """The causes as one SVG bar over the floor, with a legend."""
    seconds, wide, left = figures["step_seconds"], 720.0, 20.0
    parts, at = [], left
    legend_top = 118
    causes = {cause: spent for cause, spent in figures["causes"].items() if spent > 0.0005 * seconds}
    for index, (cause, spent) in enumerate(causes.items()):
        width, colour = wide * spent / seconds, COLOURS[cause][1]
        label = escape(f"{cause}: {1000 * spent:,.0f} ms, {spent / seconds:.0%}")
        parts.append(
            f'<rect x="{at:.1f}" y="40" width="{width:.1f}" height="34" fill="{colour}"><title>{label}</title></rect>'
        )
        x, y = left + 360 * (index % 2), legend_top + 22 * (index // 2)
        parts.append(f'<rect x="{x}" y="{y - 11}" width="13" height="13" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{y}">{label}</text>')
        at += width
    floor = wide * min(1.0, figures["floor_seconds"] / seconds)
    height = legend_top + 22 * ((len(causes) + 1) // 2)
    title = escape(f"A step of {figures['tokens']:,.0f} tokens: {seconds:.3g} s")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide + 2 * left:.0f}" height="{height}" '
        f'font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n<text x="{left}" y="26" font-size="15">{title}</text>\n'
        + "\n".join(parts)
        + f'\n<rect x="{left}" y="78" width="{floor:.1f}" height="7" fill="black"/>'
        f'<text x="{left + floor + 8:.1f}" y="87" font-size="11">{escape("products alone")}</text>\n</svg>\n'
    )
