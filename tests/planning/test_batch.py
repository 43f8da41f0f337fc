"""``batch: auto``: the most packs that leave twenty steps in an epoch; and what is said of runs of few steps."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.profiles import DATA, MACHINE, MODEL, config
from tonnage.config import Batch, Config
from tonnage.files.reading import parse_record
from tonnage.planning.batch import ENOUGH_STEPS, FEW_STEPS, MOST_TOKENS, resolved
from tonnage.planning.plan import Plan
from tonnage.planning.planner import make_plan
from tonnage.planning.scales import Scales


def asked(max_length: int = 1000, *, pack: bool = True, **keys: Any) -> Config:
    return config(data={"train": "rows.jsonl", "max_length": max_length, "pack": pack}, batch="auto", **keys)


@pytest.mark.parametrize(
    ("num_packs", "keys", "packs", "why"),
    [
        (100, {}, 5, "5 packs, the most for 20 steps in an epoch"),
        (119, {}, 5, "the most for 20 steps"),
        (5000, {}, 65, "65 packs, the most for 65,536 tokens"),
        (4, {}, 1, "one pack, the least: the data have 4"),
        (19, {"launch": {"workers": 3}}, 3, "one pack for each of 3 workers, the least: the data have 19"),
        (160, {"launch": {"workers": 3}}, 6, "6 packs, the most for 20 steps in an epoch by the 3 workers"),
        (160, {"launch": {"workers": 4}, "parallel": {"tensor": 2}}, 8, "8 packs"),
        (160, {"launch": {"workers": 4}, "parallel": {"tensor": "auto"}}, 8, "8 packs"),
        (5000, {"max_length": 100_000}, 1, "one pack, the least"),
        (5000, {"max_length": 100_000, "launch": {"workers": 8}}, 8, "one pack for each of 8 workers, the least"),
        (100, {"pack": False}, 5, "5 conversations, the most for 20 steps"),
        (None, {}, 65, "65 packs, the most for 65,536 tokens"),
        (None, {"launch": {"workers": 8}}, 64, "64 packs"),
    ],
)
def test_the_most_packs_for_twenty_steps(num_packs: int | None, keys: dict[str, Any], packs: int, why: str) -> None:
    open_config = asked(**keys)
    found, told = resolved(open_config, num_packs)
    assert found.packs_per_step == packs
    assert why in told
    assert told.startswith("auto: ")
    assert found == open_config.model_copy(update={"batch": found.batch})
    if open_config.data.pack:
        assert found.batch == Batch(tokens=packs * open_config.data.max_length)
    else:
        assert found.batch == Batch(sequences=packs)
    assert resolved(found, 7) == (found, "")  # never again


@settings(max_examples=300, deadline=None)
@given(
    num_packs=st.integers(1, 10**7),
    workers=st.integers(1, 64),
    max_length=st.integers(2, 10**6),
    pack=st.booleans(),
)
def test_bounds_of_the_batch(num_packs: int, workers: int, max_length: int, pack: bool) -> None:
    packs = resolved(asked(max_length, pack=pack, launch={"workers": workers}), num_packs)[0].packs_per_step
    assert packs % workers == 0
    assert packs >= workers
    larger = packs + workers

    def too_large(packs: int) -> bool:
        return packs * max_length > MOST_TOKENS or num_packs / packs < 20

    assert packs == workers or not too_large(packs)
    assert too_large(larger)


def test_an_elastic_run_says_that_some_sizes_are_uneven() -> None:
    ray = {"with": "ray", "workers": [2, 4], "address": "auto"}
    found, why = resolved(asked(launch=ray), 200)
    assert found.packs_per_step == 8
    assert "with fewer than 4 workers some take one more" in why


def plan(num_packs: int = 100, **keys: Any) -> Plan:
    data = replace(DATA, num_packs=num_packs, num_tokens=900 * num_packs, supervised_tokens=300 * num_packs)
    return make_plan(config(**keys), Scales(MODEL, data, MACHINE), threads_per_worker=1)


def test_a_plan_says_what_was_open() -> None:
    made = plan(batch="auto", epochs=1.0)
    assert (made.packs_per_step, made.num_steps) == (5, 20)
    assert made.reasons["batch"] == "auto: 5 packs, the most for 20 steps in an epoch"
    assert made.warnings == ()
    assert "batch" not in plan().reasons
    assert parse_record(made.to_json(), Plan, "plan") == made


FEW: list[tuple[int, dict[str, Any]]] = [
    (1, {"batch": {"tokens": 65_536}, "epochs": 2.0}),
    (5, {"batch": {"sequences": 64}, "epochs": 1.0}),
    (4, {"batch": {"tokens": 32_000}}),
    (4, {"batch": {"tokens": 32_000}, "epochs": 30.0}),
    (4, {"batch": "auto", "epochs": 1.0}),
    (4, {"batch": "auto", "epochs": 0.25}),
    (100, {"batch": {"sequences": 64}, "epochs": 1.0}),
    (100, {"batch": {"sequences": 64}, "epochs": 1.0, "launch": {"workers": 3}}),
    (100, {"batch": {"sequences": 12}, "epochs": 1.0, "launch": {"workers": 12}}),
    (100, {"batch": {"sequences": 12}, "epochs": 0.3}),
    (100, {"batch": {"sequences": 4}, "steps": 3}),
    (1000, {"batch": {"sequences": 200}, "epochs": 0.01}),
]


@pytest.mark.parametrize(("num_packs", "keys"), FEW)
def test_few_steps_are_a_warning_whose_advice_works(num_packs: int, keys: dict[str, Any]) -> None:
    made = plan(num_packs, **keys)
    assert made.num_steps < FEW_STEPS
    (told,) = [warning for warning in made.warnings if "in the whole run" in warning]
    assert told.startswith(f"{made.num_steps} step")
    advised = 0
    for way in told.split(", or "):
        changes: dict[str, Any] = {}
        for key, value in re.findall(r"(batch\.\w+|epochs|steps)=([\d.e+]+)", way):
            name, _, unit = key.partition(".")
            changes[name] = {unit: int(value)} if unit else float(value) if name == "epochs" else int(value)
        if not changes:
            continue
        advised += 1
        again = plan(num_packs, **keys | changes)
        steps = re.search(r"for (\d+) steps", way)
        assert again.num_steps >= (FEW_STEPS if steps else ENOUGH_STEPS), way
        assert steps is None or again.num_steps == int(steps[1])
        assert not any("in the whole run" in warning for warning in again.warnings)
        assert "batch" not in changes or not any("is to hold" in warning for warning in again.warnings), way
    assert advised


def test_enough_steps_need_no_warning() -> None:
    assert plan(steps=FEW_STEPS).warnings == ()
    assert plan(batch={"sequences": 10}, epochs=1.0).warnings == ()


def test_a_step_that_holds_all_data_says_so() -> None:
    many = plan(4, batch={"sequences": 64}, steps=20).warnings
    assert many == ("a step is to hold 64 packs, and the data have 4: each step sees them 16 times",)
    once = plan(5, batch={"sequences": 64}, epochs=1.0).warnings[0]
    assert once.endswith("the data have 5: each step takes all of them")
    thrice = plan(4, batch={"tokens": 32_000}, epochs=3.0).warnings[0]
    assert thrice.endswith("each step sees them 3 times")
    assert plan(64, batch={"sequences": 64}, steps=20).warnings == ()


def test_a_warm_up_that_no_step_comes_after_is_said() -> None:
    made = plan(batch={"sequences": 5}, epochs=1.0, optimizer={"warmup": 30.0})
    assert made.warnings[0].startswith("a warm-up of 30 steps in a run of 20: the learning rate never reaches")
    assert plan(batch={"sequences": 5}, epochs=1.0, optimizer={"warmup": 19.0}).warnings == ()
    assert math.isclose(plan(batch={"sequences": 5}, epochs=1.0).warmup_steps, 1)
