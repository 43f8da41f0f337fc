"""The ladder: on which rung a way to run the step is, which rung is chosen, and what every rung would have cost."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from planning.profiles import DATA, MACHINE, MODEL, config, machine
from tonnage.config.check import contradictions
from tonnage.planning.axes import settings
from tonnage.planning.budgets import budget_of
from tonnage.planning.ladder import LADDER, choose, costs, given_up, rung_of
from tonnage.planning.machine import parse_hardware
from tonnage.planning.plan import SAFETY, Choice
from tonnage.planning.planner import explain, make_plan
from tonnage.planning.refusal import relaxations
from tonnage.planning.rules import OF_MACHINE, setting_of
from tonnage.planning.scales import Scales
from tonnage.planning.search import Search, candidates

DISK = {"optimizer_tier": "disk", "gradient_tier": "disk", "parameter_tier": "disk"}
ROWS: list[dict[str, Any]] = [
    {},
    {"optimizer_tier": "host"},
    {"optimizer_tier": "host", "gradient_tier": "host", "parameter_tier": "host", "update_tier": "host"},
    {"moments": "int8"},
    {"optimizer_tier": "disk"},
    {"optimizer_tier": "disk", "gradient_tier": "host", "update_tier": "host"},
    {"optimizer_tier": "disk", "moments": "int8"},
    {"optimizer_tier": "disk", "gradient_tier": "disk", "update_tier": "host"},
    DISK,
    {"optimizer_tier": "disk", "gradient_tier": "disk", "moments": "int8", "update_tier": "host"},
    DISK | {"moments": "int8"},
    DISK | {"moments": "int8", "update_tier": "host"},
]
"""Of every rung a way that is on it."""


@pytest.fixture(scope="module")
def plain() -> Choice:
    """A way with all on the device, exact."""
    ways = candidates(Search(config(checkpoint={"every": 0}), Scales(MODEL, DATA, MACHINE)))
    return next(way for way in ways if rung_of(way) == 0)


def way(plain: Choice, row: int, seconds: float) -> Choice:
    """One that is on a rung, and takes so long."""
    layout = replace(plain.layout, **ROWS[row])
    return replace(plain, layout=layout, seconds=replace(plain.seconds, total=seconds))


def test_every_way_is_on_one_rung(plain: Choice) -> None:
    assert [rung_of(way(plain, row, 1.0)) for row in range(len(ROWS))] == list(range(len(LADDER)))
    for here in (MACHINE, parse_hardware("A100-80GB")):
        for choice in candidates(Search(config(), Scales(MODEL, DATA, here))):
            assert sum(rung.has(choice) for rung in LADDER) == 1


GAINS = {(0, 1): 1.0, (0, 2): 1.25, (1, 2): 1.25, (1, 3): 1.25, (2, 3): 1.25}
GAINS |= {(3, 4): 1.0, (3, 5): 1.25, (4, 5): 1.25, (6, 7): 1.25, (8, 9): 1.25, (10, 11): 1.25}
"""How many times as fast a way on the second rung must be to be taken before one on the first; never, of the others."""


@pytest.mark.parametrize(("higher", "lower"), [(a, b) for a in range(len(LADDER)) for b in range(a + 1, len(LADDER))])
def test_a_lower_rung_is_taken_where_it_is_worth_it(plain: Choice, higher: int, lower: int) -> None:
    gain = GAINS.get((higher, lower), math.inf)
    first = way(plain, higher, 1.0)
    for faster in (1.01, 1.2, 1.3, 100.0):
        second = way(plain, lower, 1.0 / faster)
        chosen = choose([second, first], MACHINE)
        assert (chosen is second) == (faster > gain), (LADDER[higher].name, LADDER[lower].name, faster)
    assert choose([way(plain, lower, 9.0)], MACHINE), "where nothing above it fits"


def test_a_host_whose_updates_were_measured_is_believed(plain: Choice) -> None:
    measured = replace(parse_hardware("A100-80GB"), host_parameters_per_second={"fp32": 1e9})
    assert choose([way(plain, 0, 1.0), way(plain, 2, 0.9)], measured).layout.update_tier == "host"


@pytest.mark.slow
def test_with_less_memory_plans_come_down_the_ladder_and_costs_are_those_of_plans() -> None:
    asked, scales = config(checkpoint={"every": 0}), Scales(MODEL, DATA, MACHINE)
    rungs = []
    for memory_bytes in (10e9, 650e6, 615e6, 605e6, 600e6):
        here = replace(scales, machine=machine(memory_bytes / SAFETY))
        plan = make_plan(asked, here, threads_per_worker=1, force=True)
        rows = explain(asked, here, plan.choice)
        assert [row.rung for row in rows[: len(LADDER)]] == [rung.name for rung in LADDER]
        (row,) = (row for row in rows if row.chosen)
        if plan.fits and plan.layout.tiles == 1:
            assert row.fits
            assert row.choice is not None
            assert row.choice.peak_bytes == plan.choice.peak_bytes
            assert not any(rows[number].fits for number in range(rung_of(plan.choice)) if LADDER[number].given_up == 0)
            rungs.append(given_up(plan.choice))
    assert rungs == sorted(rungs)
    assert len(set(rungs)) > 1


def test_a_rung_that_cannot_be_had_has_no_cost() -> None:
    asked = config(memory={"moments": "fp32", "budget": {"disk": 0}, "tiles": 1})
    search = Search(asked, Scales(MODEL, DATA, MACHINE), budget_of(asked, MACHINE))
    plan = make_plan(asked, search.scales, threads_per_worker=1)
    rows = costs(search, plan.choice)
    assert [row.choice is not None for row in rows] == [True] + [False] * (len(LADDER) - 1)


@pytest.mark.parametrize("hardware", ["cpu:2c:24GB", "A100-80GB", "2xA100-80GB"])
@pytest.mark.parametrize("others", [{}, {"adapter": {"rank": 4}}, {"compile": "on"}, {"memory": {"tiles": 4}}])
def test_the_search_tries_what_a_config_may_say(hardware: str, others: dict[str, Any]) -> None:
    """The same rules refuse a config and keep the search."""
    here, memory = parse_hardware(hardware), others.get("memory", {})
    launch = {"workers": here.num_devices}
    open_config = config(**others | {"launch": launch})
    tried = {at[:7] for at in settings(open_config, here, None)}
    tiers = ("device", "disk") if here.kind == "cpu" else ("device", "host", "disk")
    zeros = (3,) if here.num_devices == 1 else (0, 1, 2, 3)
    kinds, inputs = ("none", "selective", "full"), ("device",) if here.kind == "cpu" else ("device", "host")
    keys = ("zero", "recompute", "activation_tier", "moments", "optimizer_tier", "gradient_tier", "parameter_tier")
    for values in product(zeros, kinds, inputs, ("fp32",), tiers, tiers, tiers):
        said = config(**others | {"launch": launch, "memory": memory | dict(zip(keys, values, strict=True))})
        at = setting_of(said, here)
        is_refused = any(contradictions(said)) or any(rule.is_broken(at) for rule in OF_MACHINE)
        assert is_refused == (values not in tried), values


def test_relaxations_are_one_key_each_then_all() -> None:
    said = config(memory={"recompute": "none", "zero": 3, "tiles": 1})
    relaxed = list(relaxations(said))
    one = ["memory.recompute=auto", "memory.zero=auto", "memory.tiles=auto"]
    assert [words for words, _ in relaxed] == [*one, " ".join(one)]
    assert [(made.memory.recompute, made.memory.zero) for _, made in relaxed][::3] == [("auto", 3), ("auto", "auto")]
    assert list(relaxations(config())) == []
