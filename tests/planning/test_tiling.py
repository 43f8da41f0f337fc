"""When embedding and head come in tiles, in how many, and when that is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planning.profiles import DATA, MACHINE, MODEL, config, machine
from tonnage.errors import UserError
from tonnage.planning import scales
from tonnage.planning.budgets import Free
from tonnage.planning.machine import Machine, parse_hardware
from tonnage.planning.memory import instants
from tonnage.planning.plan import Plan
from tonnage.planning.planner import make_plan
from tonnage.planning.scales import Scales
from tonnage.planning.seconds import disk_bytes
from tonnage.planning.states import held_states, host_bytes, weights_on_disk
from tonnage.planning.tiling import gathered_bytes, vocabulary_in_tiles, vocabulary_tile
from tonnage.planning.words import describe

ROWS = 400_000
GPU = parse_hardware("A100-80GB")
WORDY = replace(
    MODEL,
    vocab_size=ROWS,
    embedding_parameters=64 * ROWS,
    outside_parameters=2 * 64 * ROWS + 64,
    num_parameters=MODEL.num_blocks * MODEL.block_parameters + 2 * 64 * ROWS + 64,
)
"""Embedding and head are 98% of it."""


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scales.RUNTIME_BYTES, "cpu", 0.0)


def plan(here: Machine = MACHINE, **changes: Any) -> Plan:
    return make_plan(config(**changes), Scales(WORDY, DATA, here), threads_per_worker=2)


def test_tiles_are_taken_where_nothing_else_fits_and_as_few_as_help() -> None:
    assert plan().layout.tiles == 1
    least = min(max(one.total for one in instants(choice.layout, WORDY)) for choice in plan(machine(1e9)).frontier)
    smaller = plan(machine(0.75 * least))
    tiles, layout = smaller.layout.tiles, smaller.layout
    assert tiles > 1
    assert smaller.choice.peak_bytes <= smaller.budget.usable
    assert f"large weights in tiles, the largest in {tiles}" in describe(layout)
    assert layout.parameter_tier == "disk"
    with pytest.raises(UserError, match="the least that the config allows"):
        plan(machine(0.75 * least), memory={"tiles": tiles // 2})
    with pytest.raises(UserError, match=r"memory\.tiles=auto"):
        plan(machine(0.75 * least), memory={"tiles": 1})
    again = make_plan(config(), Scales(WORDY, DATA, machine(0.75 * least)), threads_per_worker=2, before=layout)
    assert again.layout.tiles == tiles


def test_what_is_gathered_shrinks_with_tiles_and_what_rests_on_disk_grows() -> None:
    two = plan(launch={"workers": 2}, memory={"zero": 3, "tiles": 8, "parameter_tier": "device"}).layout
    assert vocabulary_in_tiles(two, WORDY) == 2 * 64 * ROWS
    assert vocabulary_tile(two, WORDY) == 64 * ROWS / 8
    assert gathered_bytes(two, vocabulary_tile(two, WORDY)) == 2 * 64 * ROWS / 8
    whole = replace(two, tiles=1)
    held, before = ({one.name: one.bytes for one in instants(each, WORDY)} for each in (two, whole))
    for name in ("loss", "gradient of the head"):
        assert before[name]["gathered"] - held[name]["gathered"] == 2 * (2 - 1 / 8) * 64 * ROWS
    disk = plan(memory={"tiles": 4, "parameter_tier": "disk"}).layout
    more = weights_on_disk(disk, WORDY) - weights_on_disk(replace(disk, tiles=1), WORDY)
    assert more == pytest.approx(2 * 2 * 64 * ROWS, rel=1e-6)
    assert disk_bytes(disk, WORDY) > disk_bytes(replace(disk, tiles=1), WORDY)


def test_one_gpu_takes_tiles_of_what_its_host_updates_where_nothing_else_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(scales.RUNTIME_BYTES, "cuda", 0.0)
    whole = plan(GPU, memory={"parameter_tier": "host"})
    assert plan(GPU).layout.tiles == 1
    least = min(choice.peak_bytes for choice in plan(GPU).frontier)
    made = make_plan(config(), Scales(WORDY, DATA, GPU), threads_per_worker=2, free=Free(memory=0.7 * least))
    layout = made.layout
    assert layout.tiles > 1
    assert (layout.update_tier, layout.parameter_tier != "device") == ("host", True)
    assert made.choice.peak_bytes <= made.budget.usable
    for rests in ("host", "disk"):
        tiles = plan(GPU, memory={"tiles": 8, "parameter_tier": rests}).layout
        assert (tiles.tiles, tiles.update_tier, tiles.parameter_tier) == (8, "host", rests)
        away = held_states(replace(whole.layout, parameter_tier="host"), WORDY).weights
        assert held_states(tiles, WORDY).weights < away / 3, "two tiles of eight in place of both"
    on_disk = host_bytes(replace(tiles, parameter_tier="disk"), WORDY)
    assert on_disk < host_bytes(replace(tiles, parameter_tier="host"), WORDY)
    assert plan(GPU, memory={"tiles": 8}).layout.update_tier == "host"


@pytest.mark.parametrize("rests", ["host", "disk"])
def test_tiles_beside_several_gpus_are_gathered(rests: str) -> None:
    with pytest.raises(UserError, match=r"(?s)memory\.parameter_tier.*memory\.tiles=1, or memory\.parameter_tier=auto"):
        plan(parse_hardware("2xA100-80GB"), launch={"workers": 2}, memory={"tiles": 4, "parameter_tier": rests})


def test_tiles_in_the_memory_of_a_cpu_that_is_a_host_are_refused() -> None:
    with pytest.raises(UserError, match=r"memory\.parameter_tier=disk, or memory\.tiles=1"):
        plan(memory={"tiles": 4, "parameter_tier": "host"})


def test_tiles_cost_time() -> None:
    how: dict[str, Any] = {"zero": 3, "parameter_tier": "device"}
    whole, tiles = (plan(launch={"workers": 2}, memory=how | {"tiles": number}) for number in (1, 4))
    assert tiles.choice.seconds.compute > whole.choice.seconds.compute


@pytest.mark.parametrize("here", [MACHINE, parse_hardware("A100-80GB")], ids=["cpu", "gpu"])
def test_tiles_of_what_is_in_memory_are_refused(here: Machine) -> None:
    with pytest.raises(UserError, match=r"(?s)memory\.tiles.*has in memory.*memory\.tiles=1") as caught:
        plan(here, memory={"tiles": 4, "parameter_tier": "device"})
    assert ("memory.parameter_tier=disk" in str(caught.value)) == (here.kind == "cpu")
    with pytest.raises(UserError, match="has in memory"):
        plan(here, launch={"workers": 2}, parallel={"replicate": 2}, memory={"tiles": 4, "parameter_tier": "device"})
