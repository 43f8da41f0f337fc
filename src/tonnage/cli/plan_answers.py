"""What ``tonnage plan`` answers beside a plan: the ways to train a model side by side, and the largest that fits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Column
from rich.text import Text

from tonnage.display.terminal import number, put, say, table
from tonnage.files.visible import as_json_text
from tonnage.planning.words import describe, size, step_time

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.planning.ladder import Cost
    from tonnage.planning.largest import Largest
    from tonnage.planning.plan import Plan
    from tonnage.planning.ways import Compared


def show_ways(ways: Sequence[Compared], console: Console) -> None:
    """Print the ways to train a model beside each other, each in its best layout."""
    shown = table("", *map(number, ("memory", "step", "tokens/s")), "", title="Ways to train it")
    for way in ways:
        plan = way.plan
        if plan is None:
            shown.add_row(way.way.name, "", "", "", Text(way.why_not))
        elif not plan.fits:
            shown.add_row(way.way.name, "", "", "", f"does not fit: {plan.shortfall}")
        else:
            cells = (size(plan.choice.peak_bytes), step_time(plan.choice.seconds.total), f"{_rate(plan):,.0f}")
            shown.add_row(way.way.name, *cells, describe(plan.layout))
    console.print(shown)


def show_ladder(ladder: Sequence[Cost], console: Console) -> None:
    """Print what is given up for memory, in this order, and what each rung would have cost."""
    rungs = Column(no_wrap=True)
    shown = table(rungs, number("memory"), number("step"), "", title="What is given up for memory")
    for cost in ladder:
        if (choice := cost.choice) is None:
            shown.add_row(cost.rung, "", "", "not to be had")
            continue
        room = "chosen: " if cost.chosen else "" if cost.fits else "does not fit: "
        cells = (size(choice.peak_bytes), step_time(choice.seconds.total))
        shown.add_row(cost.rung, *cells, room + describe(choice.layout))
    console.print(shown)


def show_largest(largest: Largest, console: Console, *, in_json: bool = False) -> None:
    """Print the value that was solved for, the plan with it, and why it is no larger."""
    if in_json:
        put(as_json_text(largest_as_json(largest)))
        return
    plan = largest.plan
    say(console, (largest.override, "bold"), " is the largest that fits:")
    say(
        console,
        f"  {size(plan.choice.peak_bytes)}{' a worker' if plan.workers > 1 else ''} at the {plan.choice.peak.name}, of "
        f"{size(plan.budget.usable)} that a plan may take of {plan.budget.what}",
    )
    say(
        console,
        f"  {step_time(plan.choice.seconds.total)} a step, {_rate(plan):,.0f} tokens/s, with {describe(plan.layout)}",
    )
    if largest.next_plan is None:
        say(console, f"  more is not to be had: {largest.whose_limit}")
    else:
        say(console, f"  {largest.key}={largest.next_value} would take {largest.next_plan.shortfall}")


def plan_as_json(plan: Plan, ways: Sequence[Compared], ladder: Sequence[Cost] = ()) -> str:
    """The plan; under ``ways`` what it was held beside, and under ``ladder`` what each rung would have cost,
    where there is any."""
    if not (ways or ladder):
        return plan.to_json()
    beside = {"ways": [_way(one) for one in ways], "ladder": [_rung(cost) for cost in ladder]}
    return json.dumps(asdict(plan) | {key: rows for key, rows in beside.items() if rows}, indent=2)


def _rung(cost: Cost) -> dict[str, Any]:
    row: dict[str, Any] = {"rung": cost.rung, "fits": cost.fits, "chosen": cost.chosen}
    if cost.choice is None:
        return row
    figures = {"peak_bytes": cost.choice.peak_bytes, "step_seconds": cost.choice.seconds.total}
    return row | figures | {"host_bytes": cost.choice.host_bytes, "disk_bytes": cost.choice.disk_bytes}


def _way(compared: Compared) -> dict[str, Any]:
    fields: dict[str, Any] = {"way": compared.way.name, "override": compared.way.override, "fits": compared.fits}
    return fields | (_figures(compared.plan) if compared.plan is not None else {"why_not": compared.why_not})


def largest_as_json(found: Largest) -> str:
    """The value that was solved for, with the figures of its plan and those of the next value."""
    following = None
    if found.next_plan is not None:
        following = {"value": found.next_value} | _figures(found.next_plan)
    fields = {"key": found.key, "value": found.value, "limit": found.limit, "whose_limit": found.whose_limit}
    return json.dumps(fields | _figures(found.plan) | {"next": following}, indent=2)


def _figures(plan: Plan) -> dict[str, Any]:
    """Bytes of a worker, seconds of a step, and how it is cut up."""
    return {
        "peak_bytes": plan.choice.peak_bytes,
        "usable_bytes": plan.budget.usable,
        "step_seconds": plan.choice.seconds.total,
        "tokens_per_second": _rate(plan),
        "layout": asdict(plan.layout),
        "in_words": describe(plan.layout),
    }


def _rate(plan: Plan) -> float:
    return plan.tokens_per_step / plan.choice.seconds.total
