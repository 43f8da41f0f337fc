"""Plans as HTML: bars of bytes by category and instant, for notebooks and for the report of a run.

Colours are written out and stand on light and dark pages alike; text takes that of the page it is on. Whatever a plan
says in words is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from tonnage.planning.space import resting_bytes
from tonnage.planning.words import describe, run_time, size, step_time

if TYPE_CHECKING:
    from tonnage.planning.plan import Choice, Plan

COLOURS = {
    "weights": "#3f74b5",
    "gathered": "#59b3d8",
    "optimizer": "#a2539b",
    "gradients": "#c9a227",
    "activations": "#3c9a5f",
    "in flight": "#277a6b",
    "images": "#b0703c",
    "workspace": "#86bf6b",
    "loss": "#d9594c",
    "save": "#7c6f9f",
    "host": "#5f8a8b",
    "heap": "#8a8f98",
    "runtime": "#a3a8b0",
}
"""Of every category of ``Plan``."""
MEASURED = "#e08a2e"
CELL = "padding: 1px 12px 1px 0; text-align: left; vertical-align: middle; border: 0; background: none"
NUMBER = "padding: 1px 12px 1px 0; text-align: right; white-space: nowrap; vertical-align: middle; border: 0"


def stacked(parts: Mapping[str, float], whole: float, colours: Mapping[str, str] = COLOURS) -> str:
    """Categories side by side, each as wide as its part of the ``whole``."""
    pieces = "".join(
        f'<span style="display: inline-block; height: 14px; width: {100 * value / whole:.3f}%; '
        f'background: {colours[name]}" title="{escape(name)} {size(value)}"></span>'
        for name, value in parts.items()
    )
    return f'<div style="white-space: nowrap; font-size: 0; min-width: 90px">{pieces}</div>'


def legend(parts: Mapping[str, float]) -> str:
    return " ".join(
        f'<span style="white-space: nowrap; margin-right: 10px"><span style="display: inline-block; width: 10px; '
        f'height: 10px; background: {COLOURS[name]}"></span> {escape(name)} {size(value)}</span>'
        for name, value in parts.items()
    )


def instants_as_html(choice: Choice, measured: Sequence[tuple[str, float]] = ()) -> str:
    """What a worker holds at every instant of the run, the peak in bold, and below it what was ``measured`` in its
    phases, if that is known: names and bytes. All bars have one scale."""
    whole = max([choice.peak_bytes, *(value for _, value in measured)]) or 1.0
    rows = []
    for instant in choice.instants:
        parts = choice.parts(instant)
        name = escape(instant.name)
        shown = f"<b>{name}</b>" if instant == choice.peak else name
        rows.append(_row(shown, size(sum(parts.values())), stacked(parts, whole)))
    if measured:
        rows.append(f'<tr><td style="{CELL}; padding-top: 8px; opacity: 0.7" colspan="3">measured, by phase</td></tr>')
        colours = {"measured": MEASURED}
        rows += [
            _row(escape(name), size(value), stacked({"measured": value}, whole, colours)) for name, value in measured
        ]
    every = dict(choice.parts(choice.peak))
    for instant in choice.instants:
        for name, held in choice.parts(instant).items():
            every[name] = max(held, every.get(name, 0.0))
    key = {name: every[name] for name in COLOURS if name in every}
    return (
        f'<div style="font-size: 12px; margin: 4px 0">{legend(key)}</div>'
        f'<table style="border-collapse: collapse; width: 100%; font-size: 13px">{"".join(rows)}</table>'
    )


def measured_phases(plan: Plan, records: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """The most that any worker held in each phase of a run, in the kind of memory that its plan counts, from the
    records of its metrics; empty where no run has ended."""
    told = [record["memory_phases"] for record in records if record.get("memory_phases")]
    kind = "device" if plan.layout.device == "cuda" else "host"
    return [(phase["phase"], float(max(phase[kind]))) for phase in told[-1] if max(phase[kind])] if told else []


def _row(name: str, words: str, bar: str) -> str:
    return (
        f'<tr style="background: none"><td style="{CELL}">{name}</td><td style="{NUMBER}">{words}</td>'
        f'<td style="{CELL}; width: 66%">{bar}</td></tr>'
    )


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """What will be done, in lines of a name and words; a line without a name goes on with the one before."""
    layout, seconds, reasons = plan.layout, plan.choice.seconds, plan.reasons
    per_worker = " a worker" if plan.workers > 1 else ""
    yield "model", f"{plan.model.model_type}, {plan.model.num_parameters:,} parameters, {layout.precision}"
    yield from ((name, reasons[name]) for name in ("trains", "adapter") if reasons.get(name))
    yield from (("weights", note) for note in plan.weights.notes())
    yield (
        "run",
        f"{plan.num_steps:,} steps ({plan.num_packs / plan.data.num_packs:.2f} epochs), "
        f"{plan.tokens_per_step * plan.num_steps:,} tokens",
    )
    yield (
        "step",
        f"{plan.packs_per_step} packs, {plan.tokens_per_step:,} tokens, {layout.micro_batches} micro-batches of "
        f"{layout.micro_batch}{per_worker}, {plan.flops_per_step / 1e12:.3g} TFLOP",
    )
    if layout.spared_tokens >= 0.005:
        spared = layout.spared_tokens
        yield "prefixes", f"{spared:.0%} of the tokens repeat what others of a micro-batch begin with: computed once"
    of_rows = ("prefixes", "rows", "objective.reference", "objective.teacher")
    yield from ((name.removeprefix("objective."), reasons[name]) for name in of_rows if reasons.get(name))
    if why := reasons.get("batch"):
        yield "", why
    yield "layout", f"{plan.workers} worker(s) of {plan.threads_per_worker} threads, {describe(layout)}"
    if compiles := reasons.get("compile"):
        yield "compile", compiles
    yield from ((name, reasons[name]) for name in ("fp8", "kernels") if reasons.get(name))
    yield "machine", plan.machine
    if how := reasons.get("machine"):
        yield "", how
    yield "memory", plan.memory_in_words
    yield from _on_disk(plan, per_worker)
    if host_bytes := plan.choice.host_bytes:
        copies = ", copies for checkpoints included" if layout.saves_beside else ""
        may = "" if plan.budget.host is None else f", of {size(plan.budget.host)}"
        may += f" ({plan.budget.host_what})" if plan.budget.host_what else ""
        yield "host", f"{size(host_bytes)}{per_worker} of its memory{copies}{may}"
    parts = ("compute", "idle", "update", "communication", "host", "disk")
    spent = ", ".join(f"{name} {step_time(value)}" for name in parts if (value := getattr(seconds, name)))
    speed = f", {plan.tokens_per_step / seconds.total:,.0f} tokens/s" if seconds.total else ""
    whole = run_time(3600 * (seconds.total * plan.num_steps / 3600))
    yield "time", f"{step_time(seconds.total)} a step ({spent}){speed}, {whole} in all"
    yield "saves", reasons.get("checkpoint.every", plan.saves)


def _on_disk(plan: Plan, per_worker: str) -> Iterator[tuple[str, str]]:
    """What rests on disks, and how much may; that nothing may, where the config says so."""
    layout, budget, resting = plan.layout, plan.budget, resting_bytes(plan)
    limit = budget.disk_limit(plan.choice)
    if resting:
        beside = layout.optimizer_tier == "disk" or layout.saves_beside
        words = f"{size(resting)}{per_worker}{', copies for checkpoints included' if beside else ''}"
        if limit is not None:
            of_all = f", {size(limit.needed)} of a machine's" if per_worker else ", of"
            words += f"{of_all} {size(limit.most)} ({limit.what})"
        yield "disk", words
    if base := plan.reasons.get("base"):
        may = f", of {size(budget.disk)} (memory.budget.disk)" if budget.disk is not None else ""
        yield "" if resting else "disk", base + may
    if budget.disk == 0:
        yield "disk", "nothing rests there (memory.budget.disk is 0)"


def frontier_as_html(plan: Plan) -> str:
    """Other ways to run the step: what would be faster, and what would need less memory; empty where there is none."""
    if not plan.frontier:
        return ""
    rows = "".join(
        f'<tr style="background: none"><td style="{NUMBER}">{size(choice.peak_bytes)}</td>'
        f'<td style="{NUMBER}">{step_time(choice.seconds.total)}</td>'
        f'<td style="{CELL}">{escape(describe(choice.layout))}'
        f"{'' if plan.budget.holds(choice) else ' (does not fit)'}</td></tr>"
        for choice in plan.frontier
    )
    return f'<table style="border-collapse: collapse; font-size: 13px">{rows}</table>'


def lines_as_html(lines: Iterable[tuple[str, str]]) -> str:
    rows = "".join(
        f'<tr style="background: none"><td style="{CELL}; opacity: 0.7; vertical-align: top">{escape(name)}</td>'
        f'<td style="{CELL}">{escape(words)}</td></tr>'
        for name, words in lines
    )
    return f'<table style="border-collapse: collapse; font-size: 13px">{rows}</table>'


def plan_as_html(plan: Plan) -> str:
    ways = frontier_as_html(plan)
    ways = f'<div style="margin-top: 6px"><b>Other ways</b></div>{ways}' if ways else ""
    return (
        '<div style="font-family: sans-serif; max-width: 820px">'
        f"{lines_as_html([*facts(plan), *(('warning', warning) for warning in plan.warnings)])}"
        f'<div style="margin-top: 6px"><b>Memory of a worker</b></div>{instants_as_html(plan.choice)}{ways}</div>'
    )
