"""Disk that a run needs, counted before it starts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planning.profiles import DATA, MACHINE, MODEL, config
from tonnage.errors import UserError
from tonnage.offload.residency import OPTIMIZER
from tonnage.planning.planner import make_plan
from tonnage.planning.profile import Frozen
from tonnage.planning.scales import Scales
from tonnage.planning.space import (
    check_space,
    checkpoint_bytes,
    offload_directories,
    packed_base,
    packed_directory,
    resting_bytes,
)
from tonnage.planning.states import held_states, states
from tonnage.rundir.weights import WeightFacts

ALL = {"optimizer_tier": "disk", "gradient_tier": "disk", "parameter_tier": "disk"}


def test_what_rests_on_disk_is_counted() -> None:
    made = [
        make_plan(
            config(memory=memory | {"micro_batch": 4}, checkpoint={"every": every}),
            Scales(MODEL, DATA, MACHINE),
            threads_per_worker=1,
        )
        for memory, every in (({}, 0), (ALL, 0), (ALL, 5))
    ]
    assert [resting_bytes(plan) for plan in made] == [
        0,
        2 * 10_000_000 + 2_000_000 + 4_000_000,
        2 * 10_000_000 + 2 * 2_000_000 + 4_000_000,
    ]
    assert checkpoint_bytes(made[0]) == 12_000_000


def test_matrices_that_muon_updates_have_one_moment_in_a_checkpoint() -> None:
    model = replace(MODEL, matrix_share=0.75)  # of the 800,000 parameters in blocks
    chosen = config(optimizer={"kind": "muon"}, memory={"moments": "fp32"})
    plan = make_plan(chosen, Scales(model, DATA, MACHINE), threads_per_worker=1)
    assert checkpoint_bytes(plan) == 600_000 * (4 + 4) + 400_000 * (4 + 8)


def test_what_rests_on_disk_is_partly_in_memory() -> None:
    outside, block = 2 * 50304 * 2048, 50_358_272
    model = replace(
        MODEL, num_parameters=1_011_781_632, outside_parameters=outside, num_blocks=16, block_parameters=block
    )
    here, there = (
        make_plan(
            config(memory=memory | {"micro_batch": 99}), Scales(model, DATA, MACHINE), threads_per_worker=1, force=True
        )
        for memory in (dict.fromkeys(ALL, "device") | {"moments": "fp32"}, ALL | {"moments": "fp32"})
    )
    assert held_states(here.layout, model) == states(here.layout, model)
    assert states(here.layout, model).optimizer == 10_117_816_320
    held = held_states(there.layout, model)
    assert held.weights == pytest.approx(2 * (outside + 2 * block), rel=1e-5)
    assert held.gradients == 2 * outside
    assert held.optimizer == OPTIMIZER["disk"].slots * OPTIMIZER["disk"].unit_bytes
    assert there.layout.tiers_on_disk == [f"memory.{key}" for key in ALL]
    assert here.layout.tiers_on_disk == []


def test_a_disk_too_small_is_refused_with_all_that_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ALL | {"offload_dirs": [str(tmp_path / "a"), str(tmp_path / "b")]}
    chosen = config(memory=memory, output=str(tmp_path / "run"), checkpoint={"every": 1, "keep": 2})
    plan = make_plan(chosen, Scales(MODEL, DATA, MACHINE), threads_per_worker=1)
    needed = 3 * 12_000_000 + 28_000_000

    def with_free(free: int) -> Any:
        return lambda path: SimpleNamespace(f_bavail=free, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", with_free(needed))
    check_space(chosen, plan)
    monkeypatch.setattr(os, "statvfs", with_free(needed - 1))
    with pytest.raises(
        UserError, match=r"(?s)0\.06 GB: 3 more checkpoint.*0\.01 GB that rest in 2 place.*offload_dirs"
    ):
        check_space(chosen, plan)
    check_space(chosen, plan, checkpoints_there=1)


def test_a_packed_base_is_counted_once_until_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path))
    chosen = config(
        adapter={"rank": 4, "quantize": "nf4"},
        memory={"parameter_tier": "disk"},
        output=str(tmp_path / "run"),
        checkpoint={"every": 0},
    )
    frozen = Frozen(990_000, 90_000, 45_000, 2 * 90_000 + 520_000, 2 * 90_000, 26_000, head=True, embedding=True)
    plan = make_plan(chosen, Scales(replace(MODEL, frozen=frozen), DATA, MACHINE), threads_per_worker=1)
    plan = replace(plan, weights=WeightFacts(base_digest="a", base_stamp="b"))
    assert resting_bytes(plan) == 0
    assert packed_base(chosen, plan) == (520_000, 520_000)
    needed = checkpoint_bytes(plan) + 520_000
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=needed - 1, f_frsize=1))
    with pytest.raises(UserError, match=r"0\.00 GB for the packed base \(TONNAGE_CACHE\)"):
        check_space(chosen, plan, workers=2)
    place = packed_directory(chosen, plan)
    assert place is not None
    place.mkdir(parents=True)
    assert packed_base(chosen, plan) == (520_000, 0)
    check_space(chosen, plan, workers=2)
    others = [WeightFacts(base_digest="c", base_stamp="b"), WeightFacts(base_digest="a", base_stamp="d")]
    assert all(packed_directory(chosen, replace(plan, weights=one)) != place for one in others)
    assert packed_directory(config(adapter={"quantize": "int8"}), plan) != place


def test_every_rank_has_its_own_place(tmp_path: Path) -> None:
    chosen = config(output=str(tmp_path / "run"))
    assert offload_directories(chosen, 1) == [tmp_path / "run" / "offload" / "rank-1"]
    given = config(output=str(tmp_path / "run"), memory={"offload_dirs": ["/x", "/y"]})
    first, second = offload_directories(given, 3)
    assert (first.name, first.parents[1], second.parents[1]) == ("rank-3", Path("/x"), Path("/y"))
