"""The longest sequence that fits, for a model on several kinds of hardware (``tonnage plan MODEL --largest-context``).

A table: rows are hardware and numbers of GPUs, columns ways to train and where inputs of blocks rest. Every cell is the
planner's answer to ``--largest max_length`` with one pack for every worker and pass, blocks recomputed whole, without
regard to how many positions the model has (``rope`` gives it more). Moments stay fp32.

The model is weighed once for a cell, in rows of ``WEIGHED`` tokens, as what a step holds grows in a line with the
tokens of a row; what fits is rounded down to ``STEP``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tonnage.config.read import overridden_key
from tonnage.config.schema import Parallel
from tonnage.data import Progress, silent
from tonnage.decide.plans import says_what_is_trained, supposed
from tonnage.errors import UserError, user_error
from tonnage.planning.largest import last_that_fits
from tonnage.planning.machine import Machine, parse_hardware
from tonnage.planning.plan import Plan
from tonnage.planning.ways import WAYS, Way, without_sacrifices
from tonnage.planning.words import describe

if TYPE_CHECKING:
    from tonnage.decide.plans import PlanQuestion

STEP, MOST = 1024, 1 << 24
"""Lengths are multiples of the one and at most the other."""
WEIGHED = 8192
"""Tokens of the rows with which a model is weighed."""
INPUT_TIERS = ("device", "host")
"""Where inputs of blocks wait for their backward pass."""
KEYS = (
    "data.max_length",
    "batch",
    "memory.activation_tier",
    "memory.micro_batch",
    "memory.recompute",
    "launch.workers",
)
"""What a table sets itself."""
DIVIDED = {"context": "auto"}
"""Axes along which the workers of several GPUs divide a sequence, where the planner has them."""


@dataclass(frozen=True)
class Cell:
    """The longest sequence of a way to train, on some hardware."""

    hardware: str
    num_devices: int
    way: str
    inputs: str
    """Where inputs of blocks rest."""
    tokens: int
    """0 where not even ``STEP`` fit."""
    plan: Plan | None = None
    """With that length."""
    why_not: str = ""
    """Why there is no plan at all."""

    @property
    def is_open(self) -> bool:
        """Whether more would fit than was tried."""
        return self.tokens >= MOST


@dataclass(frozen=True)
class Contexts:
    """The table for a model."""

    model: str
    positions: int | None
    """That it has, as its config.json says and the words change them."""
    cells: tuple[Cell, ...]


def largest_contexts(
    model: str, words: Sequence[str], hardware: Sequence[str], progress: Progress = silent
) -> Contexts:
    """The longest sequences of a model: ``words`` are overrides for all cells, ``hardware`` names as ``--hardware``
    takes them; with several GPUs, fewer of them are rows too.

    Raises:
        UserError: no such model or hardware, or words that say what the table varies.
    """
    from tonnage.model.files import positions_of

    taken = [key for word in words if (key := overridden_key(word)).startswith(KEYS)]
    if taken or says_what_is_trained(words):
        raise user_error(
            where="--largest-context",
            found=f"{', '.join(taken) or 'adapter or train'} on the command line, which the table varies itself",
            needed="words for what all of its cells have in common, such as precision or memory.budget.host",
            change="leave it out, or ask for one length: --largest max_length",
        )
    machines = [machine for name in hardware for machine in _machines(name)]
    cells: list[Cell] = []
    positions = None
    total = len(machines) * len(INPUT_TIERS) * len(WAYS)
    for named, machine in machines:
        for tier in INPUT_TIERS:
            question = supposed(model, [*words, *_words(machine, tier)], machine)
            positions = positions_of(question.model_config)
            for way in WAYS:
                progress("looking for the longest sequences", len(cells), total)
                cells.append(_cell(question, way, Cell(named, machine.num_devices, way.name, tier, 0)))
    progress("", 1, 1)
    return Contexts(model, positions, tuple(cells))


def _machines(name: str) -> Iterator[tuple[str, Machine]]:
    """Hardware of a name, with one GPU, two, four and so on up to what it has. Raises ``UserError``."""
    whole = parse_hardware(name)
    if whole.kind == "cpu" or whole.nodes > 1:
        yield name, whole
        return
    many = whole.devices_per_node
    _, colon, memory = name.partition(":")
    for number in dict.fromkeys([*(1 << power for power in range(many.bit_length())), many]):
        shown = f"{f'{number}x' if number > 1 else ''}{whole.name}{colon}{memory}"
        yield shown, parse_hardware(shown)


def _words(machine: Machine, tier: str) -> list[str]:
    """What a cell says besides: one pack for a worker, or for all where they can divide it; whole blocks recomputed."""
    workers = machine.num_devices if machine.kind == "cuda" else machine.nodes
    axes = [f"parallel.{axis}={value}" for axis, value in DIVIDED.items() if axis in Parallel.model_fields]
    axes = axes if workers > 1 else []
    return [
        f"data.max_length={WEIGHED}",
        f"batch.sequences={1 if axes else workers}",
        "memory.micro_batch=1",
        "memory.recompute=full",
        f"memory.activation_tier={tier}",
        *axes,
    ]


def _cell(question: PlanQuestion, way: Way, cell: Cell) -> Cell:
    """The cell with the longest sequence, if there is one."""
    config = without_sacrifices(way.taken(question.config), question.device)
    plans: dict[int, Plan] = {}

    def fits(index: int) -> bool:
        longer = config.with_keys("data", {"max_length": index * STEP})
        plans[index] = question.at_length(longer, True, WEIGHED)
        return plans[index].fits

    try:
        index = last_that_fits(MOST // STEP, fits)
    except UserError as error:
        return replace(cell, why_not=error.problems[0].found)
    return replace(cell, tokens=index * STEP, plan=plans[max(index, 1)])


def rounded(tokens: int) -> str:
    """A number of tokens as tables show it: in thousands or millions, rounded down."""
    if tokens >= 1_000_000:
        return f"{math.floor(tokens / 100_000) / 10:g}M"
    return f"{tokens // 1000}K" if tokens else "-"


def as_json(contexts: Contexts) -> dict[str, Any]:
    """The table as plain values: a record for each cell."""
    return {
        "model": contexts.model,
        "positions": contexts.positions,
        "most": MOST,
        "cells": [
            {
                "hardware": cell.hardware,
                "num_devices": cell.num_devices,
                "way": cell.way,
                "block_inputs": cell.inputs,
                "tokens": cell.tokens,
                **({"why_not": cell.why_not} if cell.plan is None else _figures(cell.plan)),
            }
            for cell in contexts.cells
        ],
    }


def _figures(plan: Plan) -> dict[str, Any]:
    choice = plan.choice
    figures = {"peak_bytes": choice.peak_bytes, "host_bytes": choice.host_bytes, "disk_bytes": choice.disk_bytes}
    return figures | {"step_seconds": choice.seconds.total, "in_words": describe(plan.layout)}
