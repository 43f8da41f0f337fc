"""``checkpoint.every: auto``: little is lost, training hardly waits; and a copy only where there is room for one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.profiles import DATA, MACHINE, MODEL, config, layout
from tonnage.errors import UserError
from tonnage.files.reading import parse_record
from tonnage.planning.layout import Layout
from tonnage.planning.machine import Machine, parse_hardware
from tonnage.planning.plan import SAFETY, Plan
from tonnage.planning.planner import make_plan
from tonnage.planning.profile import ModelProfile
from tonnage.planning.saving import (
    MOST_LOST_SECONDS,
    MOST_WAITING,
    USUAL_SECONDS,
    Resting,
    Saving,
    copy_seconds,
    in_words,
    saving_of,
    steps_between,
    write_seconds,
)
from tonnage.planning.scales import Scales
from tonnage.planning.space import no_room_for_saves

LARGE = replace(MODEL, num_parameters=1_000_000_000, outside_parameters=100_000_000, block_parameters=225_000_000)


ROOMY = replace(MACHINE, device_bytes=96 * 10**9)


def plan(machine: Machine = ROOMY, model: ModelProfile = LARGE, **changes: Any) -> Plan:
    return make_plan(config(**{"steps": 5000} | changes), Scales(model, DATA, machine), threads_per_worker=2)


@settings(max_examples=500, deadline=None)
@given(
    stop=st.floats(1e-4, 3000),
    write=st.floats(0, 3000),
    step=st.floats(1e-3, 4000),
    num_steps=st.integers(1, 10**7),
)
def test_both_bounds_hold_or_the_thirty_minutes_do(stop: float, write: float, step: float, num_steps: int) -> None:
    every = steps_between(stop, stop + write, step, num_steps)
    saving = Saving(every, stop, stop + write)
    whole = num_steps * step
    assert every < num_steps
    if not every:
        # Nothing to save before the end: it comes within the half hour, or only a step later.
        assert whole <= MOST_LOST_SECONDS + step
        return
    assert whole > USUAL_SECONDS
    lost, waits = every * step + stop + write, saving.waiting(step)
    between = MOST_LOST_SECONDS - stop - write - step  # at most, in whole steps
    both_can_be_had = MOST_WAITING * between > stop and between > write
    assert lost <= MOST_LOST_SECONDS or every == 1
    assert waits <= MOST_WAITING * 1.001 or not both_can_be_had
    if waits > MOST_WAITING * 1.001:  # then as seldom as may be
        assert lost + step > MOST_LOST_SECONDS


def test_saves_are_not_more_frequent_than_they_need_to_be() -> None:
    assert steps_between(0.1, 1.0, 1.0, 10**6) == USUAL_SECONDS
    assert steps_between(0.1, 1.0, 1.0, 900) == 0
    assert steps_between(0.1, 1.0, 1.0, 901) == 900
    assert steps_between(25.0, 100.0, 1.0, 10**6) == 25 * 49  # two hundredths
    assert steps_between(100.0, 100.0, 1.0, 10**6) == 1700
    assert steps_between(1.0, 1000.0, 1.0, 10**6) == 800
    assert steps_between(1.0, 1.0, 7200.0, 100) == 1


def copying(layout: Layout, machine: Machine) -> float:
    return copy_seconds(layout, Resting.of(layout, MODEL), machine)


def writing(layout: Layout, machine: Machine) -> float:
    return write_seconds(layout, Resting.of(layout, MODEL), machine)


def test_what_a_save_takes_follows_from_what_rests_where() -> None:
    alone = layout(workers=1, zero=3, micro_batches=1, saves_beside=True)
    state = 12_000_000  # weights, low halves, moments
    fresh = state / (MACHINE.fresh_bytes_per_second * MACHINE.cores)
    assert copying(alone, MACHINE) == pytest.approx(2 * state / MACHINE.memory_bytes_per_second + fresh)
    assert writing(alone, MACHINE) == pytest.approx(state / MACHINE.disk_write_bytes_per_second)
    assert copying(replace(alone, saves_beside=False), MACHINE) == 0
    on_disk = replace(alone, optimizer_tier="disk", saves_beside=False)
    copied = 2 * 10_000_000 / MACHINE.disk_mixed_bytes_per_second
    assert copying(on_disk, MACHINE) == pytest.approx(copied)
    two = replace(alone, workers=2)  # fp32 masters; they share the memory and the disk
    assert writing(two, MACHINE) == pytest.approx(state / MACHINE.disk_write_bytes_per_second)
    assert writing(two, replace(MACHINE, nodes=2)) == writing(two, MACHINE) / 2
    gpu = parse_hardware("A100-80GB")
    assert copying(replace(alone, device="cuda"), gpu) == state / gpu.host_device_bytes_per_second


def test_a_save_waits_for_the_one_before_it() -> None:
    saving = Saving(every=10, stop_seconds=1.0, whole_seconds=31.0)
    assert saving.waiting(10.0) == 1 / 101
    assert saving.waiting(1.0) == 21 / 31  # the disk goes at its own pace
    assert saving.lost_seconds(10.0, 1000) == 131
    assert Saving().waiting(1.0) == 0
    assert Saving().lost_seconds(1.0, 50) == 50


def test_a_short_run_is_saved_at_its_end() -> None:
    made = plan(steps=20)
    assert made.choice.saving == Saving()
    assert made.reasons["checkpoint.every"].startswith("auto: at its end alone: it takes about ")
    assert not made.layout.saves_beside


def test_a_long_run_is_saved_from_a_copy() -> None:
    made = plan()
    saving, seconds = made.choice.saving, made.choice.seconds.total
    assert saving.every == -(-USUAL_SECONDS // seconds)
    assert made.layout.saves_beside
    assert made.choice.peak.bytes["save"] == 12e9
    assert f"every {saving.every:,} steps (about 15 minutes), training waits 0." in made.saves
    assert made.reasons["checkpoint.every"] == f"auto: {made.saves}"
    assert parse_record(made.to_json(), Plan, "plan") == made
    said = plan(checkpoint={"every": saving.every})  # as the run's config has it
    assert said.choice == made.choice
    assert "checkpoint.every" not in said.reasons
    assert said.saves == made.saves


@pytest.mark.slow
def test_saving_takes_nothing_from_training_where_memory_is_short() -> None:
    """What fitted when nothing was saved still fits, in the same layout: training waits for the disk instead."""
    unsaved = plan(checkpoint={"every": 0})
    assert unsaved.choice.peak_bytes < plan().choice.peak_bytes
    tight = replace(MACHINE, device_bytes=round(1.01 * unsaved.choice.peak_bytes / SAFETY))
    made = plan(tight)
    assert made.layout == plan(tight, checkpoint={"every": 0}).layout
    assert not made.layout.saves_beside
    saving, seconds = made.choice.saving, made.choice.seconds.total
    assert saving.every * seconds + saving.whole_seconds <= MOST_LOST_SECONDS
    assert saving.stop_seconds == pytest.approx(12e9 / MACHINE.disk_write_bytes_per_second)
    assert "while they are written: there is no memory for a copy" in made.saves
    assert not plan(tight, checkpoint={"every": 9}).layout.saves_beside
    for budget in (1e9, 6e9, 12e9, 20e9, 40e9):  # whatever there is
        small = replace(MACHINE, device_bytes=round(budget))
        try:
            without = plan(small, checkpoint={"every": 0})
        except UserError:
            continue
        with_saves = plan(small)
        assert with_saves.choice.seconds.total <= without.choice.seconds.total * 1.02
        assert with_saves.layout.moments == without.layout.moments
        assert with_saves.layout.tiers_on_disk == without.layout.tiers_on_disk


def test_where_both_cannot_be_had_the_cost_is_said() -> None:
    slow = replace(MACHINE, disk_write_bytes_per_second=20e6, device_bytes=20 * 10**9)
    made = plan(slow)
    saving, seconds = made.choice.saving, made.choice.seconds.total
    waits = saving.waiting(seconds)
    assert waits > MOST_WAITING
    assert saving.lost_seconds(seconds, made.num_steps) <= MOST_LOST_SECONDS
    assert f"training waits {waits:.1%} of its time" in made.saves
    assert "are lost" in made.saves


def test_a_run_that_could_lose_hours_says_so() -> None:
    (told,) = plan(checkpoint={"every": 0}).warnings
    assert told.startswith("the run is saved at its end alone: if it dies, up to ")
    assert "Set checkpoint.every=auto for 30 minutes at most" in told
    assert "saved every 4,000 steps" in plan(checkpoint={"every": 4000}).warnings[0]
    assert plan().warnings == plan(checkpoint={"every": 10}).warnings == ()


def test_words_for_a_save_after_every_step() -> None:
    assert in_words(Saving(1, 1.0, 1.0), beside=True, step_seconds=7200.0, num_steps=9).startswith(
        "every step (about 2.0 hours), training waits 0.0%"
    )


def test_a_disk_without_room_for_several_keeps_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config(steps=5000, output=str(tmp_path / "run"), checkpoint={"keep": 2})
    made = make_plan(chosen, Scales(LARGE, DATA, MACHINE), threads_per_worker=2)

    def told(checkpoints: float) -> str:
        free = SimpleNamespace(f_bavail=round(12e9 * checkpoints), f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda path: free)
        return no_room_for_saves(chosen, made, 1)

    assert told(3) == ""
    assert told(2.5) == (
        "at its end alone: the disk has no room for 3 checkpoints of 12.00 GB each; make room, or set checkpoint.keep=1"
    )
    assert told(1.5).endswith("; make room")
    assert told(0.5) == ""  # not for one: the run is refused, as ever
    short = make_plan(chosen.model_copy(update={"steps": 20}), Scales(LARGE, DATA, MACHINE), threads_per_worker=2)
    assert no_room_for_saves(chosen, short, 1) == ""


def test_both_ways_to_save_are_found_for_a_layout() -> None:
    alone = layout(workers=1, zero=3, micro_batches=1)
    beside, between = (
        saving_of(7, replace(alone, saves_beside=beside), MODEL, MACHINE, 1.0, 100) for beside in (True, False)
    )
    assert (beside.every, between.every) == (7, 7)
    assert beside.stop_seconds < beside.whole_seconds
    assert between.stop_seconds == between.whole_seconds
    assert saving_of(0, alone, MODEL, MACHINE, 1.0, 100) == Saving()
