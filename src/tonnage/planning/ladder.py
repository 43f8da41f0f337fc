"""The order in which things are given up for memory (``tonnage plan --why`` shows it).

    climb      weigh what the config allows until something fits: whole, with rows in tiles, with what several workers
               divide on disk, with large weights in tiles
    choose     the first rung on which something fits, or a lower one that is so much faster that it is worth it

The rungs of ``LADDER`` are data: how many of exact moments and of state in memory are given up, and who updates. Tiles,
of rows and of weights, are no lines of it: each number of them is a search of its own, which ``climb`` makes where it
comes to that and ``costs`` adds as rungs. Axes and recompute are no rungs at all: on each the fastest way counts.

A rung is what a way to run the step gives up, and where its state is updated. Of as many things that are given up the
fastest way counts, but the host updates only where that is ``worth`` it. Moments of less than fp32 and what rests on
disk are taken only where nothing else fits: the first rounds, the second wears a drive. But moments in 8 bits that stay
on a GPU come before exact ones that travel where a step is much faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tonnage.planning.layout import MOST_AHEAD
from tonnage.planning.machine import Machine
from tonnage.planning.plan import Budget, Choice
from tonnage.planning.search import Search, candidates, less_on_disk, refine

WORTH_ROUNDING = 1.25
"""So many times as fast a step with 8-bit moments that stay on the device must be, or exact ones travel."""
WORTH_MOVING = 1.25
"""So many times as fast a step must be for the host to make its update, where nobody has measured how fast it does
that."""
TILES = (2, 4, 8, 16, 32, 64)
"""Numbers of tiles worth trying where weights, or rows in MLPs, do not fit whole."""
OF_ROWS = ("activations", "workspace")
"""What of an instant's bytes grows with rows, and may come in tiles of the sequence."""
NEARLY = 1.002
"""What takes so much longer at most counts as equally fast; then less memory decides."""


@dataclass(frozen=True)
class Rung:
    """What is given up, and where parameters are updated."""

    name: str
    given_up: int
    """How many of exact moments, and of state, gradients and parameters in memory."""
    updates: Literal["device", "host"] = "device"
    stays: bool | None = None
    """Whether the state rests on the device, and nothing on disk; None where it may or may not."""
    worth: float = 0.0
    """How many times as fast it must be as those rungs above it that give up as much."""
    worth_rounding: float = math.inf
    """How many times as fast it must be as those above it that give up less. It replaces these only where the state of
    all of them travels."""

    def has(self, choice: Choice) -> bool:
        """Whether a choice is on this rung."""
        layout = choice.layout
        stays = layout.optimizer_tier == "device" and not layout.tiers_on_disk
        return (
            given_up(choice) == self.given_up
            and layout.update_tier == self.updates
            and (self.stays is None or self.stays == stays)
        )

    def must_gain(self, above: Sequence[Choice], machine: Machine) -> float:
        """How many times as fast as those ``above`` a choice on this rung must be to be taken."""
        if given_up(above[0]) == self.given_up:
            return 1.0 if self.worth and machine.host_parameters_per_second else self.worth
        travels = all(choice.layout.optimizer_tier == "host" for choice in above)
        return self.worth_rounding if travels else math.inf


LADDER = (
    Rung("exact, all state on the device", 0, stays=True),
    Rung("exact, state travels from the host's memory", 0, stays=False),
    Rung("exact, the host updates what rests there", 0, updates="host", worth=WORTH_MOVING),
    Rung("rounded moments that stay on the device", 1, stays=True, worth_rounding=WORTH_ROUNDING),
    Rung("rounded moments, or one kind of state on disk", 1, stays=False),
    Rung("the same, updated by the host", 1, updates="host", worth=WORTH_MOVING),
    Rung("two of: rounded moments, three kinds on disk", 2),
    Rung("the same, updated by the host", 2, updates="host", worth=WORTH_MOVING),
    Rung("three of them", 3),
    Rung("three of them, updated by the host", 3, updates="host", worth=WORTH_MOVING),
    Rung("all four", 4),
    Rung("all four, updated by the host", 4, updates="host", worth=WORTH_MOVING),
)
"""From the first to the last resort, of weights that come whole; then once more with large weights in tiles."""


def given_up(choice: Choice) -> int:
    """How much is given up for memory: exact moments, and every kind of state that rests on disk."""
    return (choice.layout.moments != "fp32") + len(choice.layout.tiers_on_disk)


def rung_of(choice: Choice) -> int:
    """The number of the rung that a choice is on."""
    return next(number for number, rung in enumerate(LADDER) if rung.has(choice))


def climb(search: Search) -> list[Choice]:
    """The ways that the config allows, weighed: more of them as long as nothing fits.

    MLPs go through rows in as few tiles as help, where nothing would be given up then. Where workers divide the model,
    what rests on disk comes last; where nothing fits whole, large weights come in as few tiles as help.
    """
    choices = [less_on_disk(choice, search) for choice in candidates(search)]
    if not _holds_all(choices, search):
        choices += rows_divided(choices, search)
    if not any(map(search.holds, choices)):
        choices += [less_on_disk(choice, search) for choice in candidates(search, last_resort=True)]
    if not search.tiles_are_open or search.before is not None or any(map(search.holds, choices)):
        return choices
    in_most = in_tiles(search, TILES[-1])
    if not any(map(search.holds, in_most)):
        return choices + in_most
    return next(tiled for number in TILES if any(map(search.holds, tiled := in_tiles(search, number))))


def _holds_all(choices: Sequence[Choice], search: Search) -> bool:
    """Whether one of them fits that gives nothing up."""
    return any(given_up(choice) == 0 and search.holds(choice) for choice in choices)


def rows_divided(choices: Sequence[Choice], search: Search) -> list[Choice]:
    """Ways with MLPs over rows in as few tiles as it takes for one to fit that gives nothing up or, where none does but
    nothing fits otherwise, for any to fit; nothing if that does not help either. What they leave has to fit without
    what grows with rows, or none of them is weighed."""
    if not search.rows_may_divide or search.before is not None:
        return []
    fits_at_all = any(map(search.holds, choices))
    left = [choice for choice in choices if given_up(choice) == 0 or not fits_at_all]
    if not any(search.holds(_without_rows(choice)) for choice in left):
        return []
    in_most = in_row_tiles(search, TILES[-1])
    if _holds_all(in_most, search):
        return next(divided for number in TILES if _holds_all(divided := in_row_tiles(search, number), search))
    if fits_at_all or not any(map(search.holds, in_most)):
        return []
    return next(divided for number in TILES if any(map(search.holds, divided := in_row_tiles(search, number))))


def _without_rows(choice: Choice) -> Choice:
    """A choice as if nothing grew with its rows."""
    instants = (
        replace(instant, bytes={name: size for name, size in instant.bytes.items() if name not in OF_ROWS})
        for instant in choice.instants
    )
    return replace(choice, instants=tuple(instants))


def in_row_tiles(search: Search, number: int) -> list[Choice]:
    """Every way that the config allows, but for those that are a last resort, with MLPs over rows in so many tiles."""
    return _cut(search, sequence_tiles=number, tiles=1)


def in_tiles(search: Search, number: int) -> list[Choice]:
    """Every way that the config allows with the largest weight in so many tiles. That costs time."""
    return _cut(search, tiles=number)


def _cut(search: Search, **memory: int) -> list[Choice]:
    cut = replace(search, config=search.config.with_keys("memory", memory))
    return [less_on_disk(choice, search) for choice in candidates(cut)]


def choose(fitting: Sequence[Choice], machine: Machine) -> Choice:
    """Of choices that fit, the fastest on the rung that the ladder comes to; of those as fast, the one with the fewest
    detours, then the smallest."""
    rungs = list(map(rung_of, fitting))
    pool: list[Choice] = []
    taken: set[int] = set()
    for number, rung in enumerate(LADDER):
        on_rung = [choice for choice, at in zip(fitting, rungs, strict=True) if at == number]
        if on_rung and (not pool or _fastest(pool) > rung.must_gain(pool, machine) * _fastest([*pool, *on_rung])):
            taken.add(number)
            pool += on_rung
    pool = [choice for choice, at in zip(fitting, rungs, strict=True) if at in taken]  # in the order of the search
    fastest = _fastest(pool)
    return min(
        (choice for choice in pool if choice.seconds_with_saves <= NEARLY * fastest),
        key=lambda choice: (_detours(choice), choice.peak_bytes),
    )


def _fastest(choices: Sequence[Choice]) -> float:
    return min(choice.seconds_with_saves for choice in choices)


def _detours(choice: Choice) -> int:
    """What is done for memory to what a step computes, and between steps."""
    layout, saving = choice.layout, choice.saving
    between_steps = saving.every > 0 and not layout.saves_beside
    on_host = [layout.activation_tier, layout.gradient_tier, layout.parameter_tier].count("host")
    gathers_late = layout.device != "cpu" and layout.shards > 1 and layout.blocks_ahead < MOST_AHEAD
    return (layout.recompute != "none") + on_host + between_steps + gathers_late


def nearest(choices: Sequence[Choice], budget: Budget) -> Choice:
    """Of ways that all need too much, the one that needs least: of the host, where devices have room, and of the disks,
    where hosts have it too."""
    if on_device := [choice for choice in choices if choice.peak_bytes <= budget.usable]:
        if on_host := [choice for choice in on_device if budget.host_holds(choice)]:
            return min(on_host, key=lambda choice: (choice.disk_bytes + choice.packed_bytes, choice.peak_bytes))
        return min(on_device, key=lambda choice: (choice.host_bytes, choice.peak_bytes))
    return min(choices, key=lambda choice: choice.peak_bytes)


def frontier(choices: Sequence[Choice], chosen: Choice, most: int = 4) -> tuple[Choice, ...]:
    """The ways of which none is both faster and smaller: some that need more than ``chosen``, and some less."""
    edge: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.seconds_with_saves, choice.peak_bytes)):
        if not edge or choice.peak_bytes < 0.97 * edge[-1].peak_bytes:
            edge.append(choice)
    larger = [choice for choice in edge if choice.peak_bytes > chosen.peak_bytes * 1.01]
    smaller = [choice for choice in edge if choice.peak_bytes < chosen.peak_bytes * 0.99]
    return (*larger[-most // 2 :], *smaller[:most])


@dataclass(frozen=True)
class Cost:
    """What a rung would have cost."""

    rung: str
    choice: Choice | None
    """The best on it or, where none fits, the smallest; None where the config or the machine leaves it nothing."""
    fits: bool = False
    chosen: bool = False


def costs(search: Search, chosen: Choice) -> list[Cost]:
    """What every rung would have cost, with weights that come whole and, last, in tiles."""
    assert search.budget is not None
    every = [less_on_disk(choice, search) for choice in candidates(search, last_resort=None)]
    rungs, taken, of_rows = list(map(rung_of, every)), rung_of(chosen), chosen.layout.sequence_tiles
    rows = [
        _cost(rung.name, [choice for choice, at in zip(every, rungs, strict=True) if at == number], search)
        for number, rung in enumerate(LADDER)
    ]
    if search.rows_may_divide:
        taken = len(rows) if of_rows > 1 else taken
        divided = in_row_tiles(search, of_rows) if of_rows > 1 else rows_divided(every, search)
        number = divided[0].layout.sequence_tiles if divided else TILES[-1]
        rows.append(_cost(f"MLPs over rows in {number} tiles", divided, search))
    if search.tiles_are_open:
        taken = len(rows) if chosen.layout.tiles > 1 else taken
        tiled = {number: in_tiles(search, number) for number in TILES}
        helps = next((number for number in TILES if any(map(search.holds, tiled[number]))), TILES[-1])
        rows.append(_cost(f"large weights in {helps} tiles", tiled[helps], search))
    return [replace(row, chosen=number == taken) for number, row in enumerate(rows)]


def _cost(name: str, choices: Sequence[Choice], search: Search) -> Cost:
    assert search.budget is not None
    if fitting := list(filter(search.holds, choices)):
        return Cost(name, choose(refine(fitting, search), search.scales.machine), fits=True)
    return Cost(name, nearest(choices, search.budget) if choices else None)
