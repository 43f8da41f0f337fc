"""What ``tonnage plan --json`` and ``tonnage inspect --json`` answer, as the page draws it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tonnage.data.account import Account
from tonnage.data.telling import lengths_of, remarks
from tonnage.errors import user_error
from tonnage.files.reading import parse_record
from tonnage.planning.catalogue import DEVICES
from tonnage.planning.drawn import COLOURS, facts
from tonnage.planning.layout import Layout
from tonnage.planning.plan import Plan
from tonnage.planning.words import describe
from tonnage.report.gathered import account_table


def hardware() -> list[str]:
    """Names of all devices of the catalogue."""
    families = [device.family for device in DEVICES]
    return [
        device.family if families.count(device.family) == 1 else f"{device.family}-{device.gigabytes}GB"
        for device in DEVICES
    ]


def planned(answer: bytes) -> dict[str, Any]:
    """A plan, as it is drawn. Raises ``UserError`` where there is none."""
    plan = parse_record(answer, Plan, "tonnage plan --json")
    beside = json.loads(answer)
    return {
        "facts": [list(line) for line in facts(plan)],
        "warnings": list(plan.warnings),
        "fits": plan.fits,
        "usable_bytes": plan.budget.usable,
        "memory_bytes": plan.budget.memory,
        "budget": plan.budget.what,
        "instants": [
            {"name": instant.name, "parts": plan.choice.parts(instant), "peak": instant == plan.choice.peak}
            for instant in plan.choice.instants
        ],
        "colours": dict(COLOURS),
        "choices": [
            {
                "peak_bytes": choice.peak_bytes,
                "step_seconds": choice.seconds.total,
                "in_words": describe(choice.layout),
                "fits": plan.budget.holds(choice),
                "words": pins(choice.layout),
            }
            for choice in (plan.choice, *plan.frontier)
        ],
        "tokens_per_step": plan.tokens_per_step,
        "ways": beside.get("ways", []),
    }


def pins(layout: Layout) -> list[str]:
    """Overrides that leave the planner nothing of a layout's memory to choose."""
    return [f"{key}={value}" for key, value in _pins(layout)]


def _pins(layout: Layout) -> Iterator[tuple[str, object]]:
    yield "memory.micro_batch", layout.micro_batch
    yield "memory.recompute", layout.recompute
    if layout.recomputed is not None and layout.recompute == "full":
        yield "memory.recompute_blocks", layout.recomputed[0]
    if layout.recompute == "full":
        yield "memory.activation_tier", layout.activation_tier
    yield "memory.moments", layout.moments
    for key in ("optimizer_tier", "gradient_tier", "parameter_tier"):
        yield f"memory.{key}", getattr(layout, key)
    if layout.optimizer_tier != "device" and layout.optimizer_resident:
        yield "memory.optimizer_resident", layout.optimizer_resident
    yield "memory.tiles", layout.tiles
    if layout.data_workers > 1:
        yield "memory.zero", layout.zero
    if layout.tensor > 1 or layout.pipeline > 1:
        yield "parallel.tensor", layout.tensor
        yield "parallel.pipeline", layout.pipeline


def inspected(answer: bytes) -> dict[str, Any]:
    """Data, as they are shown: account, lengths and documents. Raises ``UserError`` where there are none."""
    try:
        value = json.loads(answer)
        content = json.dumps(value["account"])
    except (ValueError, KeyError, TypeError) as error:
        raise user_error("no account of the data", "what tonnage inspect --json prints") from error
    account = parse_record(content, Account, "tonnage inspect --json")
    sources, lines = account_table(account)
    return {
        "sources": sources,
        "lines": [asdict(line) for line in lines],
        "remarks": [line if isinstance(line, str) else line[0] for line in remarks(account)],
        "lengths": list(lengths_of(account).items()),
        "max_length": account.train.max_length if account.train is not None else None,
        "documents": value.get("documents", []),
        "problems": value.get("problems", []),
    }
