"""The largest rank, length or micro-batch with which a run still fits (``tonnage plan --largest``).

The planner is asked on the config's own terms: nothing more is given up for memory than it says. Another rank or length
is another model to weigh, which takes a second or more. So lengths are first searched with the model as weighed for the
config's length, as bytes grow in a line with the tokens of a row, and then around the result with models weighed anew.
The search for a rank begins on a line through the smallest and the largest.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from tonnage.config import Adapter, Config
from tonnage.data import Progress, silent
from tonnage.errors import UserError, user_error
from tonnage.planning.batch import resolved
from tonnage.planning.largest import Largest, last_that_fits
from tonnage.planning.plan import Plan
from tonnage.planning.ways import LORA, LORA_NF4, Way, smallest_change, without_sacrifices

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from tonnage.decide.plans import PlanQuestion

KEYS = {"rank": "adapter.rank", "max_length": "data.max_length", "micro_batch": "memory.micro_batch"}
"""What can be asked for, and the keys of the config that are meant."""
LENGTHS = 64
"""Lengths are multiples of it."""
RANKS = 8
"""Ranks are multiples of it, where the smallest matrix that is adapted has room for several such ranks."""
MOST_POSITIONS = 1 << 20
"""Of a model that does not say how many it has."""
PATIENCE_SECONDS = 2.0
"""After which ``progress`` hears of a search."""


@dataclass(frozen=True)
class _Values:
    """The values that a key may have: a step, twice that, and so on."""

    key: str
    step: int
    number: int
    whose_limit: str
    falls: tuple[int, ...] = ()
    """Where less is needed than for the value before it, counted in steps."""

    def at(self, config: Config, index: int) -> Config:
        section, name = self.key.split(".")
        return config.with_keys(section, {name: index * self.step})


@dataclass
class _Search:
    """Plans of values, counted in steps, each made once; ``progress`` hears of it where that takes long."""

    what: str
    made: Callable[[int], Plan]
    """The plan of a value, whether it fits or not."""
    progress: Progress
    plans: dict[int, Plan] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def plan(self, index: int) -> Plan:
        if index not in self.plans:
            if time.monotonic() - self.began > PATIENCE_SECONDS:
                self.progress(f"looking for the largest {self.what}", len(self.plans), len(self.plans) + 1)
            self.plans[index] = self.made(index)
        return self.plans[index]

    def fits(self, index: int) -> bool:
        return self.plan(index).fits


def largest(question: PlanQuestion, word: str, progress: Progress = silent) -> Largest:
    """The largest value of what ``word`` means (rank, max_length or micro_batch) for which a plan fits.

    Raises:
        UserError: not a key that is known, one that the config has no use for, or not even its smallest value fits.
    """
    key = KEYS.get(word, word)
    if key not in KEYS.values():
        needed = f"a key that is solved for: {', '.join(KEYS)}"
        raise user_error(f"--largest {word}", needed, "tonnage plan --help")
    settled, _ = question.settled(force=True)
    config, planned = without_sacrifices(settled, question.device), question.planned
    match key:
        case "adapter.rank":
            values = _ranks(question.model_config, config)
        case "data.max_length":
            values = _lengths(question.model_config, config)
            planned = partial(_weighed_anew, question)
        case _:
            values = _micro_batches(planned(config, True).packs_per_step, config)
    search = _Search(key, lambda index: planned(values.at(config, index), True), progress)
    match key:
        case "adapter.rank":
            index = last_that_fits(values.number, search.fits, guess=_on_a_line(values, config, planned, search))
        case "data.max_length":
            weighed = config.data.max_length
            cheap = _Search(key, lambda index: question.at_length(values.at(config, index), True, weighed), progress)
            guess = last_that_fits(values.number, cheap.fits, falls=values.falls)
            index = last_that_fits(values.number, search.fits, guess=max(1, guess))
        case _:
            index = last_that_fits(values.number, search.fits, falls=values.falls)
    if not index:
        raise _nothing_fits(values, settled, search, planned, question.device)
    following = index + 1 if index < values.number else None
    solution = Largest(
        key=key,
        value=index * values.step,
        plan=search.plan(index),
        limit=values.number * values.step,
        whose_limit=values.whose_limit,
        next_value=None if following is None else following * values.step,
        next_plan=None if following is None else search.plan(following),
        evaluations=len(search.plans),
    )
    progress("", 1, 1)
    return solution


def _ranks(model_config: PreTrainedConfig, config: Config) -> _Values:
    import torch

    from tonnage.model.adapters import find_targets
    from tonnage.model.anatomy import dissect
    from tonnage.model.build import build_on_meta

    if isinstance(config.adapter, Adapter) and config.adapter.kind == "oft":
        raise user_error(
            where="adapter.kind",
            found="--largest rank, and adapter.kind is oft, whose rotations have no rank",
            needed="low-rank additions",
            change="adapter.kind=lora, or another key that is solved for",
        )
    if not isinstance(config.adapter, Adapter):
        raise user_error(
            where="adapter.rank",
            found="--largest rank, and all of the model's weights are trained",
            needed="an adapter, whose rank may grow",
            change=f"{LORA.override}, or {LORA_NF4.override} for one on weights in 4 bits",
        )
    model = build_on_meta(copy.deepcopy(model_config), torch.float32)
    largest = max(find_targets(model, dissect(model), config.adapter.targets), key=lambda target: min(target.shape))
    limit = min(largest.shape)  # more than that adds to no layer
    step = RANKS if limit >= 4 * RANKS else 1
    rows, columns = largest.shape
    owner = f"{largest.path.rpartition('.')[2]} is a matrix of {rows:,} x {columns:,}"
    return _Values("adapter.rank", step, limit // step, owner)


def _on_a_line(values: _Values, config: Config, planned: Callable[[Config, bool], Plan], search: _Search) -> int | None:
    """The value at which the smallest plan fills the budget, if memory grows in a line from the smallest value to the
    largest; None if it does not grow."""
    if values.number == 1 or search.fits(values.number):
        return values.number
    nothing = config.with_keys("memory.budget", {"device": 1})  # then no plan fits, and the smallest is told
    few = planned(values.at(nothing, 1), True).choice.peak_bytes
    many, room = search.plan(values.number).choice.peak_bytes, search.plan(values.number).budget.usable
    if many <= few:
        return None
    return min(values.number - 1, max(1, 1 + math.floor((room - few) / (many - few) * (values.number - 1))))


def _lengths(model_config: PreTrainedConfig, config: Config) -> _Values:
    from tonnage.model.files import positions_of

    positions, batch = positions_of(model_config), config.batch
    limit, owner = positions or MOST_POSITIONS, "the model's positions" if positions else "the model does not say more"
    if batch != "auto" and batch.tokens is not None and batch.tokens < limit:
        limit, owner = batch.tokens, "batch.tokens, in which a step has one pack at least"
    number = limit // LENGTHS
    if not number:
        raise user_error(
            where="data.max_length",
            found=f"--largest max_length, and a limit of {limit} tokens: {owner}",
            needed=f"room for {LENGTHS}, of which lengths are multiples",
            change=f"data.max_length={limit}, without --largest",
        )
    values = _Values("data.max_length", LENGTHS, number, owner)

    def passes(index: int) -> int:
        at, _ = resolved(values.at(config, index), None)
        return math.ceil(at.packs_per_step / config.pack_groups)

    single = next((index for index in range(1, number + 1) if passes(index) == 1), number)
    return replace(values, falls=(single, number))


def _weighed_anew(question: PlanQuestion, config: Config, anyway: bool) -> Plan:
    return question.at_length(config, anyway, config.data.max_length)


def _micro_batches(packs_per_step: int, config: Config) -> _Values:
    number = math.ceil(packs_per_step / config.pack_groups)
    whose = "the packs of a step" + (" that a worker takes" if config.pack_groups > 1 else "")
    # Of the last value, gradients wait for no sum of several passes.
    return _Values("memory.micro_batch", 1, number, whose, falls=(number,))


def _nothing_fits(
    values: _Values, settled: Config, search: _Search, planned: Callable[[Config, bool], Plan], device: str
) -> UserError:
    """What the smallest value takes, which does not fit either, and what would help."""
    smallest, least = values.at(settled, 1), search.plan(1)

    def all_planned(config: Config, anyway: bool) -> list[Plan]:
        return [planned(config, anyway)]

    change = ""
    if settled.adapter == "none" and not settled.train:
        fitting = (way for way in (LORA, LORA_NF4) if _fits(way.taken(smallest), planned, device))
        change = next((way.override for way in fitting), "")
    as_it_is = Way("", settled.adapter if isinstance(settled.adapter, Adapter) else None)
    return user_error(
        where=values.key,
        found=f"{least.shortfall} with {values.key}={values.step}, the smallest value",
        needed="a value for which a plan fits without giving up more for memory than the config asks for",
        change=change or smallest_change(smallest, [as_it_is], all_planned, device),
    )


def _fits(config: Config, planned: Callable[[Config, bool], Plan], device: str) -> bool:
    try:
        return planned(without_sacrifices(config, device), True).fits
    except UserError:
        return False
