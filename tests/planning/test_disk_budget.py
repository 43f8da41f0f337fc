"""How much may rest on the disks of a machine: what a config says, and what is free."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planning.profiles import DATA, MACHINE, MODEL, config, machine
from tonnage.config import read_config
from tonnage.errors import UserError
from tonnage.files.reading import parse_record
from tonnage.planning import scales
from tonnage.planning.budgets import Free
from tonnage.planning.drawn import facts
from tonnage.planning.plan import Plan
from tonnage.planning.planner import make_plan
from tonnage.planning.profile import Frozen
from tonnage.planning.scales import Scales
from tonnage.planning.space import free_for_states, resting_bytes

LARGE = replace(MODEL, num_parameters=1_000_000_000, outside_parameters=100_000_000, block_parameters=450_000_000)
SMALL: dict[str, Any] = {"micro_batch": 1, "recompute": "full"}


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter weighs nothing here: it would outweigh the model."""
    monkeypatch.setitem(scales.RUNTIME_BYTES, "cpu", 0.0)


def plan(
    memory_bytes: float = 8e9, *, free: float | None = None, assumed: bool = False, nodes: int = 1, **changes: Any
) -> Plan:
    """One that keeps nothing for checkpoints; of a model whose states, 14 GB exactly or 6 rounded, do not fit."""
    asked = config(**{"checkpoint": {"every": 0}} | changes)
    here = replace(machine(memory_bytes), nodes=nodes)
    return make_plan(
        asked, Scales(LARGE, DATA, here), threads_per_worker=1, free=Free(disk=free, disks_are_assumed=assumed)
    )


def refused(**asked: Any) -> str:
    """What refuses a plan, whose advice for ``memory`` is tried by the caller."""
    with pytest.raises(UserError) as caught:
        plan(**asked)
    (problem,) = caught.value.problems
    return f"{problem}\n{problem.change}"


def test_plans_keep_to_a_budget_of_disk_and_to_what_is_free() -> None:
    roomy = plan()
    most = roomy.choice.disk_bytes
    assert most == resting_bytes(roomy) > 10e9
    assert roomy.budget.disk is None
    seen = set()
    for part in (1.0, 0.9, 0.4):
        for said, free in (({"budget": {"disk": round(part * most)}}, None), ({}, part * most)):
            made = plan(free=free, memory=said)
            assert resting_bytes(made) == made.choice.disk_bytes <= part * most
            seen.add((part, made.layout))
            assert parse_record(made.to_json(), Plan, "") == made
    assert len(seen) == 3, "a budget and as much free space are one plan"
    assert {(part, layout.moments) for part, layout in seen} == {(1.0, "fp32"), (0.9, "int8"), (0.4, "int8")}
    with pytest.raises(UserError, match=r"5\.88 GB \(memory\.budget\.disk\)"):
        plan(memory={"budget": {"disk": round(0.3 * most)}})
    with pytest.raises(UserError, match=r"5\.88 GB \(free there\)"):
        plan(free=0.3 * most)


def test_state_stays_in_memory_where_disks_are_small() -> None:
    """Of what rests on disk, twice as much is needed: it is copied for a checkpoint. What stays is not."""
    exact = {"moments": "fp32", "gradient_tier": "device", "parameter_tier": "device"}
    roomy = plan(12e9, memory=exact)
    resident = roomy.layout.optimizer_resident
    assert resident > 1e9
    assert roomy.choice.disk_bytes == 20e9 - resident
    tight = plan(12e9, memory=exact | {"budget": {"disk": 20_000_000_000 - resident}})
    assert tight.layout == roomy.layout
    with pytest.raises(UserError, match=r"the least that the config allows\n.*\(memory\.budget\.disk\)"):
        plan(12e9, memory=exact | {"budget": {"disk": 20_000_000_000 - resident - 1}})


def test_the_smaller_of_a_budget_and_what_is_free_counts() -> None:
    most = plan().choice.disk_bytes
    budget = {"disk": round(2 * most)}
    assert plan(free=0.5 * most, memory={"budget": budget}).layout == plan(free=0.5 * most).layout
    keys = SMALL | {"moments": "fp32", "optimizer_tier": "disk"}
    said = refused(free=5e9, memory=keys | {"budget": budget})
    assert "20 GB for what rests there" in said
    assert "5 GB (free there)" in said


def test_advice_where_disks_are_too_small_works() -> None:
    keys = SMALL | {"moments": "fp32", "optimizer_tier": "disk"}
    said = refused(memory=keys | {"budget": {"disk": "10GB"}})
    assert said.endswith("\nmemory.moments=auto")
    made = plan(memory=keys | {"moments": "auto", "budget": {"disk": "10GB"}})
    assert made.choice.disk_bytes <= 10e9
    said = refused(memory=SMALL | {"budget": {"disk": "1GB"}})
    assert said.endswith("\nmemory.budget.disk=auto")
    assert plan(memory=SMALL).fits
    said = refused(free=1e6, memory=SMALL)
    assert "make room there, or name larger disks in memory.offload_dirs" in said
    assert "--force" not in said, "whoever starts workers looks at the disks once more"


def test_what_nobody_has_looked_at_is_not_called_free() -> None:
    said = refused(free=1e6, assumed=True, memory=SMALL)
    assert "1 MB (assumed of such a machine)" in said
    key, _, number = said.splitlines()[-1].partition(",")[0].partition("=")
    assert key == "memory.budget.disk"
    assert plan(memory=SMALL | {"budget": {"disk": int(number)}}).fits


def test_nothing_rests_on_disk_where_nothing_may() -> None:
    none = {"budget": {"disk": 0}}
    made = plan(40e9, memory=none)
    assert made.layout.tiers_on_disk == []
    assert dict(facts(made))["disk"] == "nothing rests there (memory.budget.disk is 0)"
    assert "disk" not in dict(facts(plan(40e9)))
    assert refused(memory=none).endswith("\nmemory.budget.disk=auto")
    assert plan().layout.tiers_on_disk


@pytest.mark.parametrize("key", ["optimizer_tier", "gradient_tier", "parameter_tier"])
def test_what_must_rest_on_disk_is_refused_where_nothing_may(tmp_path: Path, key: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: a/b\ndata: {{train: a/rows}}\nmemory: {{{key}: disk, budget: {{disk: 0GB}}}}\n")
    with pytest.raises(UserError, match=rf"memory\.budget\.disk is 0, and memory\.{key} is disk") as caught:
        read_config(str(path), [])
    for change in caught.value.problems[0].change.split(", or "):
        read_config(str(path), change.split())


def test_workers_share_the_disks_of_their_machine() -> None:
    keys: dict[str, Any] = {"launch": {"workers": 2}, "memory": SMALL | {"moments": "fp32", "optimizer_tier": "disk"}}
    two, apart = plan(24e9, **keys), plan(24e9, nodes=2, **keys)
    assert two.choice.disk_bytes == 2 * resting_bytes(two)
    assert apart.choice.disk_bytes == resting_bytes(apart) == resting_bytes(two)
    budget = {"budget": {"disk": int(1.5 * resting_bytes(two))}}
    keys["memory"] |= budget
    assert plan(24e9, nodes=2, **keys).fits
    said = refused(memory_bytes=24e9, **keys)
    assert f"{2 * resting_bytes(two) / 1e9:.3g} GB for what rests there" in said


def test_a_packed_base_counts_once_and_only_against_what_is_said() -> None:
    """It is in the cache, which may be on another disk, and may be there already."""
    frozen = Frozen(990_000, 90_000, 45_000, 2 * 90_000 + 520_000, 2 * 90_000, 26_000, head=True, embedding=True)
    model = replace(MODEL, frozen=frozen)
    asked = {"adapter": {"rank": 4, "quantize": "nf4"}, "checkpoint": {"every": 0}, "launch": {"workers": 2}}

    def packed(budget: int | str, free: float) -> Plan:
        memory = {"parameter_tier": "disk", "budget": {"disk": budget}, "zero": 3}
        chosen = config(**asked, memory=memory)
        return make_plan(chosen, Scales(model, DATA, MACHINE), threads_per_worker=1, free=Free(disk=free))

    made = packed("auto", 0)
    assert (made.choice.disk_bytes, made.choice.packed_bytes) == (0, 520_000)
    assert packed(520_000, 0).fits
    with pytest.raises(UserError, match=r"520 kB for what rests there[^\n]*\n[^\n]*519\.999 kB|520 kB.*memory\.budget"):
        packed(519_999, 1e12)


def test_what_is_short_of_disk_is_said_of_a_plan_that_is_made_all_the_same() -> None:
    made = make_plan(
        config(memory={"optimizer_tier": "disk", "moments": "fp32", "budget": {"disk": "1GB"}}),
        Scales(LARGE, DATA, machine(40e9)),
        threads_per_worker=1,
        force=True,
    )
    assert not made.fits
    assert made.shortfall == "20 GB of 1 GB on the disks"


def test_a_plan_shows_what_disks_have_and_give() -> None:
    keys = SMALL | {"moments": "fp32", "optimizer_tier": "disk"}
    row = dict(facts(plan(16e9, free=50e9, memory=keys)))["disk"]
    assert row == "20 GB, copies for checkpoints included, of 50 GB (free)"
    row = dict(facts(plan(24e9, memory=keys | {"budget": {"disk": "30GB"}}, launch={"workers": 2})))["disk"]
    assert row == "8 GB a worker, copies for checkpoints included, 16 GB of a machine's 30 GB (memory.budget.disk)"


def test_disks_are_filled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the first that is full is the end; directories on one disk share it."""
    directories = [tmp_path / name for name in ("a", "b", "c")]
    disks = {"a": (1, 900), "b": (1, 900), "c": (2, 200)}
    for directory in directories:
        directory.mkdir()
    real = Path.stat

    def stat(path: Path, **more: Any) -> Any:
        return SimpleNamespace(st_dev=disks[path.name][0]) if path.name in disks else real(path, **more)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(Path, "exists", lambda path: path.name in disks or os.path.exists(path))  # noqa: PTH110
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=disks[path.name][1], f_frsize=1))

    def free(*chosen: Path) -> int:
        return free_for_states(config(memory={"offload_dirs": [str(one) for one in chosen]}))

    assert free(directories[0]) == 900
    assert free(*directories[:2]) == 900
    assert free(directories[0], directories[2]) == 400
    assert free(*directories) == 600
