"""What a plan is searched in, and how one way of it is refined: what follows from a layout once it is known to fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tonnage.config import Config
from tonnage.config.rules import TIER_KEYS
from tonnage.offload.residency import OPTIMIZER
from tonnage.planning.axes import divisions, layouts
from tonnage.planning.catalogue import COMPILE_SECONDS
from tonnage.planning.largest import last_that_fits
from tonnage.planning.layout import MOST_AHEAD, Layout
from tonnage.planning.plan import Budget, Choice, Steps
from tonnage.planning.saving import saving_of
from tonnage.planning.scales import Scales, work_of
from tonnage.planning.seconds import pack_costs, stages_of
from tonnage.planning.states import states

FULL = 0.9
"""Part of what a plan may take that state which could rest on disk fills up: the page cache is worth memory too."""


@dataclass(frozen=True)
class Search:
    """The config whose open keys are searched, the scales on which every way is weighed, and what there is for it."""

    config: Config
    """With its batch written out."""
    scales: Scales
    budget: Budget | None = None
    """None is as if there were no end of everything."""
    before: Layout | None = None
    """Of a run that goes on: what is ``auto`` stays as it was."""

    @cached_property
    def steps(self) -> Steps:
        config, model, machine = self.config, self.scales.model, self.scales.machine
        padded = model.arrangement == "padded"
        share = config.data.share_prefixes and model.shares_prefixes and machine.kind == "cpu" and not padded
        num_packs = packs_of_run(config, self.scales.data.num_packs)
        return Steps(num_packs, min(config.packs_per_step, num_packs), share, padded, model.chunk, pack_costs(model))

    @property
    def tiles_are_open(self) -> bool:
        """Whether large weights may come in tiles, in which likeliest tokens are not looked for."""
        return self.config.memory.tiles == "auto" and self.config.objective.goes_with_tiles

    @property
    def rows_may_divide(self) -> bool:
        """Whether MLPs may go through rows in tiles of tokens, as some of the model's can and the config allows."""
        config, model = self.config, self.scales.model
        apart = config.parallel.schedule == "zero_bubble" and config.parallel.pipeline != 1
        is_open = config.memory.sequence_tiles == "auto" and config.memory.tiles in ("auto", 1) and not apart
        return is_open and self.scales.tiled is not None and bool(model.tokenwise_blocks)

    @property
    def num_steps(self) -> int:
        return math.ceil(self.steps.num_packs / self.steps.packs)

    def weigh(self, layout: Layout) -> Choice:
        """What a layout takes; a pipeline's is cut as it is best."""
        scales = self.scales
        if layout.pipeline > 1:
            model, work, per_worker = (
                scales.model_of(layout),
                work_of(layout, scales.data),
                self.config.stages_per_worker,
            )
            layout = replace(layout, stages=stages_of(layout, model, work, scales.machine, per_worker))
        return scales.held(layout, scales.timed(layout))

    def weigh_anew(self, choice: Choice, layout: Layout) -> Choice:
        """Another layout in place of a choice's, saved as often."""
        anew, every, model = self.weigh(layout), choice.saving.every, self.scales.model_of(layout)
        saving = saving_of(every, layout, model, self.scales.machine, anew.seconds.total, every + 1)
        return replace(anew, saving=saving)

    def holds(self, choice: Choice) -> bool:
        return self.budget is None or self.budget.holds(choice)


def packs_of_run(config: Config, packs_of_data: int) -> int:
    """Packs that are trained in all steps or epochs."""
    if config.steps is not None:
        return config.steps * config.packs_per_step
    assert config.epochs is not None
    return max(1, round(config.epochs * packs_of_data))


def candidates(search: Search, *, last_resort: bool | None = False) -> list[Choice]:
    """Every way that the config allows, weighed and timed, whether it fits or not; each in every way to save it.

    Where workers divide the model, which can be in many ways, states rest elsewhere only where these would not fit the
    budget otherwise, and not on disk: the ways of which some rest there are the ``last_resort``, asked for by
    themselves. With None it is every way.
    """
    config, scales, before = search.config, search.scales, search.before
    choices: list[Choice] = []
    for axes in divisions(config, search.steps.packs, scales.models, scales.machine, before):
        model, roomy = scales.models[axes.tensor], set[Layout]()
        prunes = axes.together > 1 and last_resort is not None
        if last_resort and not prunes:
            continue
        sized = config.with_keys("parallel", axes._asdict())
        of_all = (search.steps, scales.sizes, scales.machine, before, scales.model.attention, scales.model.num_blocks)
        for layout in layouts(sized, *of_all):
            if prunes and (bool(layout.tiers_on_disk) is not last_resort or _in_memory(layout) in roomy):
                continue
            if layout.moments == "int8" and not model.keeps_blocks:
                continue
            if layout.recompute not in model.blocks:  # it would change gradients
                continue
            in_ways = refined(search.weigh(layout), search)
            resident = all(getattr(layout, key) == "device" for key in TIER_KEYS)
            if search.budget is not None and resident and all(map(search.holds, in_ways)):
                roomy.add(_in_memory(layout))
            choices += in_ways
    return choices


def _in_memory(layout: Layout) -> Layout:
    """A layout as it would be with all states on the device: no slower, if there is room. Whether blocks are compiled
    follows from that."""
    on_device: dict[str, Any] = dict.fromkeys((*TIER_KEYS, "update_tier"), "device")
    return replace(layout, **on_device, optimizer_resident=0, compiled=False)


def refined(choice: Choice, search: Search) -> list[Choice]:
    """A choice with what follows from it: how early blocks are gathered, whether they are compiled, how it is saved."""
    return saved(compiled_where_worth(gathered_ahead(choice, search), search), search)


def gathered_ahead(choice: Choice, search: Search) -> Choice:
    """A choice whose blocks are gathered as early as may be, if that fits. Steps are timed alike."""
    if not choice.layout.may_gather_ahead:
        return choice
    ahead = search.scales.held(replace(choice.layout, blocks_ahead=MOST_AHEAD), choice.seconds)
    return ahead if search.holds(ahead) else choice


def compiled_where_worth(choice: Choice, search: Search) -> Choice:
    """A choice whose blocks are compiled only if the config says so, or the run is long enough to gain by it."""
    if not choice.layout.compiled or search.config.compile == "on":
        return choice
    layout = replace(choice.layout, compiled=False)
    seconds = search.scales.timed(layout)
    gained = search.num_steps * (seconds.total - choice.seconds.total)
    return choice if gained > COMPILE_SECONDS else replace(choice, layout=layout, seconds=seconds)


def saved(choice: Choice, search: Search) -> list[Choice]:
    """A choice whose run is saved at its end alone, or with each of the ways to save it before."""
    scales, every, choices = search.scales, search.config.checkpoint.every, []
    for beside in (True, False):
        layout = replace(choice.layout, saves_beside=beside)
        model, seconds = scales.model_of(layout), choice.seconds.total
        saving = saving_of(every, layout, model, scales.machine, seconds, search.num_steps)
        if not saving.every:
            return [choice]
        held = choice if layout == choice.layout else scales.held(layout, choice.seconds)
        choices.append(replace(held, saving=saving))
    return choices


def fewest_blocks_recomputed(fitting: Sequence[Choice], search: Search) -> list[Choice]:
    """Beside the choices, those that recompute all blocks with as few of them recomputed as fit; not those that fit
    with none, nor a pipeline's."""
    memory = search.config.memory
    if search.before is not None or not memory.recompute == memory.recompute_blocks == "auto":
        return list(fitting)
    some, fits = list(fitting), {choice.layout for choice in fitting}
    for choice in fitting:
        whole = choice.layout.recompute == "full" and choice.layout.pipeline == 1
        if not whole or replace(choice.layout, recompute="none", activation_tier="device") in fits:
            continue
        layout = with_fewest_blocks(choice, search)
        if layout.recomputed is not None:
            some.append(search.weigh_anew(choice, layout))
    return some


def with_fewest_blocks(choice: Choice, search: Search) -> Layout:
    """The layout of a choice that fits and recomputes all blocks, with as few of them recomputed as fit.

    With every block that keeps its activations a step is faster and holds more. So the fewest that fit are also the
    fastest, and are found by bisection. The guess: as many are kept as the room that all of them recomputed leaves
    has space for.
    """
    layout, model, budget = choice.layout, search.scales.model_of(choice.layout), search.budget
    blocks = model.num_blocks
    assert budget is not None

    def keeps(number: int) -> Layout:
        return replace(layout, recomputed=(blocks - number, blocks) if number else None)

    def fits(number: int) -> bool:
        return search.holds(search.scales.held(keeps(number), choice.seconds))

    keeping, given_up = (model.blocks[kind].saved(layout.row_tokens) for kind in ("none", "full"))
    times = 1 if choice.heap_bytes == 0 else 2  # the heap keeps as much again
    guess = int((budget.usable - choice.peak_bytes) / (times * max(1.0, keeping - given_up)))
    return keeps(last_that_fits(blocks - 1, fits, guess=max(1, min(guess, blocks - 1))))


def more_state_resident(fitting: Sequence[Choice], search: Search) -> list[Choice]:
    """The choices, with as much of the state that they have elsewhere on their devices as there is room for."""
    memory = search.config.memory
    if not memory.optimizer_tier == memory.optimizer_resident == "auto":
        return list(fitting)
    return [filled(choice, search) for choice in fitting]


def filled(choice: Choice, search: Search) -> Choice:
    """A choice with as much of the state that it has elsewhere on its device as the budget leaves room for."""
    assert search.budget is not None
    layout, room = choice.layout, round(FULL * search.budget.usable - choice.peak_bytes)
    if layout.optimizer_tier == "device" or layout.update_tier == "host" or layout.optimizer_resident:
        return choice
    if room < (tile := OPTIMIZER[layout.optimizer_tier].unit_bytes):
        return choice
    resident = min(room, states(layout, search.scales.model_of(layout)).optimizer) // tile * tile
    return search.weigh_anew(choice, replace(layout, optimizer_resident=resident))


def less_on_disk(choice: Choice, search: Search) -> Choice:
    """A choice for which disks alone have too little room, with as much of its state in memory as there is room for:
    that need not be on disk."""
    memory, budget = search.config.memory, search.budget
    if budget is None or not memory.optimizer_tier == memory.optimizer_resident == "auto" or budget.disk_holds(choice):
        return choice
    fits_else = choice.peak_bytes <= budget.usable and budget.host_holds(choice)
    return filled(choice, search) if fits_else else choice


def refine(fitting: Sequence[Choice], search: Search) -> list[Choice]:
    """The choices that fit, with what there is room for besides, before one of them is chosen."""
    return more_state_resident(fewest_blocks_recomputed(fitting, search), search)
