"""What is decided: steps and packs, the layout that is fastest among those that fit, and refusals that help."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from planning.profiles import DATA, MACHINE, MODEL, block, config, machine
from tonnage.errors import UserError
from tonnage.files.reading import parse_record
from tonnage.offload.residency import OPTIMIZER
from tonnage.planning import ladder, rules, scales, search
from tonnage.planning.axes import layouts
from tonnage.planning.budgets import Free, budget_of
from tonnage.planning.machine import Machine, parse_hardware
from tonnage.planning.plan import SAFETY, Choice, Plan, RowSizes, Steps
from tonnage.planning.planner import make_plan
from tonnage.planning.profile import Line, ModelProfile
from tonnage.planning.scales import Scales, work_of
from tonnage.planning.search import Search, candidates
from tonnage.planning.seconds import disk_bytes
from tonnage.planning.space import resting_bytes
from tonnage.planning.stages import workers_parts
from tonnage.planning.states import held_states, states
from tonnage.planning.words import describe

HOST_TILE_BYTES, TILE_BYTES = (OPTIMIZER[tier].unit_bytes for tier in ("host", "disk"))
STEPS = Steps(num_packs=800, packs=8, share_prefixes=False)


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter weighs nothing here: it would outweigh the model."""
    monkeypatch.setitem(scales.RUNTIME_BYTES, "cpu", 0.0)


def plan(machine: Machine = MACHINE, weighed: ModelProfile = MODEL, **changes: Any) -> Plan:
    return make_plan(config(**changes), Scales(weighed, DATA, machine), threads_per_worker=2)


def test_steps_and_packs() -> None:
    made = plan(epochs=2.0)
    assert (made.packs_per_step, made.num_packs, made.num_steps) == (8, 200, 25)
    assert made.tokens_per_step == 7200
    assert (made.layout.micro_batch, made.layout.micro_batches) == (4, 2)
    made = plan(epochs=0.505)
    assert (made.num_packs, made.num_steps) == (50, 7)
    made = plan(steps=3, launch={"workers": 3})
    assert (made.num_packs, made.num_steps, made.layout.micro_batches) == (24, 3, 1)


def test_a_step_is_never_larger_than_the_run() -> None:
    made = plan(epochs=0.03, batch={"sequences": 64})
    assert (made.packs_per_step, made.num_packs, made.num_steps) == (3, 3, 1)


def rows(steps: Steps, workers: int, micro_batch: int) -> RowSizes:
    """Half as long where they share, and no two alike."""
    tokens = 900 * micro_batch / (2 if steps.share_prefixes else 1)
    return RowSizes(round(tokens) + workers, 300 * micro_batch + workers, tokens, 900 * micro_batch)


def test_a_row_is_as_full_as_the_fullest_of_the_run() -> None:
    full = plan(memory={"micro_batch": 2}).layout
    assert (full.row_tokens, full.row_supervised, full.mean_row_tokens) == (2000, 600, 1800)
    for micro_batch in (1, 2, 4):
        asked = config(memory={"micro_batch": micro_batch}, launch={"workers": 2})
        made = make_plan(asked, Scales(MODEL, DATA, MACHINE, rows=rows), threads_per_worker=2)
        found = made.layout
        assert (found.row_tokens, found.row_supervised) == (900 * micro_batch + 2, 300 * micro_batch + 2)
        assert parse_record(made.to_json(), Plan, "") == made


def test_rows_share_prefixes_where_attention_can_and_nobody_forbids_it() -> None:
    can = replace(MODEL, shares_prefixes=True)
    for model, here, wanted, tokens in (
        (can, MACHINE, True, 450),
        (MODEL, MACHINE, True, 900),
        (can, MACHINE, False, 900),
        (can, parse_hardware("A100-80GB"), True, 900),
    ):
        asked = config(data={"train": "rows.jsonl", "max_length": 1000, "share_prefixes": wanted})
        made = make_plan(asked, Scales(model, DATA, here, rows=rows), threads_per_worker=2)
        assert made.layout.share_prefixes == (tokens == 450)
        assert made.layout.mean_row_tokens == tokens * made.layout.micro_batch
        assert made.layout.spared_tokens == 1 - tokens / 900
        assert work_of(made.layout, DATA).row_tokens == made.layout.mean_row_tokens


def test_packs_of_one_document_come_many_to_a_row() -> None:
    short = replace(DATA, num_packs=1000, num_tokens=100_000, supervised_tokens=50_000)
    made = make_plan(config(batch={"sequences": 64}), Scales(MODEL, short, MACHINE), threads_per_worker=2)
    assert made.layout.micro_batch >= 16, "of 100 tokens, though max_length is 1000"


def test_warm_up_is_a_fraction_or_a_number() -> None:
    assert plan(epochs=2.0, optimizer={"warmup": 0.1}).warmup_steps == 2
    assert plan(epochs=2.0, optimizer={"warmup": 5.0}).warmup_steps == 5


@pytest.mark.parametrize(
    ("precision", "workers", "micro_batch", "expected"),
    [
        ("bf16", 1, 8, (2, 2, 10)),
        ("bf16", 1, 1, (2, 4, 10)),
        ("bf16", 2, 1, (2, 2, 4)),
        ("fp16", 1, 8, (2, 2, 12)),
        ("fp16", 1, 1, (2, 4, 12)),
        ("fp16", 2, 1, (2, 2, 4)),
        ("fp32", 1, 1, (4, 4, 8)),
    ],
)
def test_bytes_a_parameter(precision: str, workers: int, micro_batch: int, expected: tuple[int, int, int]) -> None:
    made = plan(precision=precision, launch={"workers": workers}, memory={"micro_batch": micro_batch, "zero": 3})
    found = states(made.layout, MODEL)
    assert (found.weights, found.gradients, found.optimizer) == tuple(n * 1_000_000 for n in expected)


@pytest.mark.parametrize(
    ("moments", "workers", "expected"), [("bf16", 1, 6), ("int8", 1, 4.03125), ("int8", 2, 1.015625)]
)
def test_optimizer_bytes_by_moments(moments: str, workers: int, expected: float) -> None:
    made = plan(launch={"workers": workers}, memory={"moments": moments, "zero": 3})
    assert states(made.layout, MODEL).optimizer == expected * 1_000_000


@pytest.mark.parametrize("name", ["V100-16GB", "V100-32GB", "T4", "2x8xV100-32GB"])
def test_bf16_is_not_planned_for_devices_without_it(name: str) -> None:
    lacking = parse_hardware(name)
    with pytest.raises(UserError, match=r"(?s)bf16 on (V100|T4).*TFLOP/s, [\d.]+ in fp16.*precision=fp16"):
        plan(lacking)
    with pytest.raises(UserError, match=r"bf16 on (V100|T4)"):  # however fast they seemed
        plan(replace(lacking, flops=dict.fromkeys(lacking.flops, 1e15)))
    for precision in ("fp16", "fp32"):
        assert plan(lacking, precision=precision).layout.precision == precision
    assert (
        make_plan(config(), Scales(MODEL, DATA, lacking), threads_per_worker=1, force=True).layout.precision == "bf16"
    )
    for other in ("A100-40GB", "RTX3090", "cpu:2c:24GB"):
        assert plan(parse_hardware(other)).layout.precision == "bf16"


def test_more_workers_than_packs_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"101 workers, 100 packs"):
        plan(launch={"workers": 101}, batch={"sequences": 200})


def test_where_everything_fits_nothing_is_given_up() -> None:
    layout = plan().layout
    assert (layout.recompute, layout.moments, layout.tiers_on_disk) == ("none", "fp32", [])


def needs(**memory: Any) -> float:
    """Bytes for the peak of a layout."""
    return tight(plan(machine(1e12), memory=memory))


def tight(made: Plan) -> float:
    """Bytes for the peak of a plan whose heap keeps nothing."""
    return made.choice.peak_bytes - made.choice.heap_bytes


def test_the_fastest_that_fits_is_chosen_and_exactness_is_given_up_last() -> None:
    """Memory shrinks: first micro-batches get smaller and activations are recomputed, then moments or tiers change."""
    smallest_exact = min(
        choice_bytes
        for recompute in ("none", "selective", "full")
        for micro_batch in (1, 2, 4)
        if (choice_bytes := needs(recompute=recompute, micro_batch=micro_batch, moments="fp32",
                                  optimizer_tier="device", gradient_tier="device", parameter_tier="device"))
    )  # fmt: skip
    seconds = 0.0
    for budget in (1e9, 60e6, 40e6, smallest_exact / SAFETY + 1e3):
        made = plan(machine(budget))
        assert made.choice.peak_bytes <= SAFETY * budget
        assert (made.layout.moments, made.layout.tiers_on_disk) == ("fp32", [])
        assert made.choice.seconds.total >= seconds
        seconds = made.choice.seconds.total
    made = plan(machine(smallest_exact / SAFETY - 1e6))
    assert made.layout.moments == "int8" or made.layout.tiers_on_disk
    assert made.choice.peak_bytes <= SAFETY * (smallest_exact / SAFETY - 1e6)


def test_what_the_config_says_is_kept() -> None:
    said: dict[str, Any] = {"recompute": "full", "moments": "int8", "micro_batch": 2, "optimizer_tier": "disk"}
    layout = plan(memory=said).layout
    assert {key: getattr(layout, key) for key in said} == said


def test_nothing_fits_and_the_way_out_is_named() -> None:
    said = {"recompute": "none", "moments": "fp32", "gradient_tier": "device"}
    with pytest.raises(UserError) as caught:
        plan(machine(30e6), memory=said)
    (problem,) = caught.value.problems
    assert "optimizer 10 MB" in problem.found
    assert "the least that the config allows" in problem.found
    assert problem.needed.startswith("27.6 MB: 92% of 30 MB")
    assert problem.change == "memory.recompute=auto"  # one key is enough, and what the refusal says comes true
    assert plan(machine(30e6), memory=said | {"recompute": "auto"}).layout.recompute != "none"
    with pytest.raises(UserError, match=r"a smaller data\.max_length"):
        plan(machine(1e6))


def test_force_takes_the_smallest() -> None:
    made = make_plan(config(), Scales(MODEL, DATA, machine(1e6)), threads_per_worker=1, force=True)
    assert made.choice.peak_bytes == min(
        made.choice.peak_bytes, *(choice.peak_bytes for choice in made.frontier), needs()
    )


def test_workers_of_a_cpu_share_its_memory() -> None:
    assert plan(machine(8e9), launch={"workers": 4}).budget.memory == 2e9
    assert plan(machine(8e9), memory={"budget": {"device": "3GB"}}).budget.memory == 3e9


def test_a_run_that_goes_on_keeps_what_was_chosen() -> None:
    small = plan(machine(40e6))
    again = make_plan(config(), Scales(MODEL, DATA, MACHINE), threads_per_worker=2, before=small.layout)
    assert (again.layout.recompute, again.layout.micro_batch) == (small.layout.recompute, small.layout.micro_batch)
    assert small.layout.recompute != plan().layout.recompute


def test_a_run_that_goes_on_where_there_is_less_is_cut_up_anew() -> None:
    large = plan()
    small = make_plan(config(), Scales(MODEL, DATA, machine(40e6)), threads_per_worker=2, before=large.layout)
    assert small.choice.peak_bytes < large.choice.peak_bytes
    # And so where a key that is said leaves nothing of what was chosen.
    on_disk = plan(launch={"workers": 2}, memory={"parameter_tier": "disk"}).layout
    said = config(launch={"workers": 2}, memory={"zero": 1})
    assert make_plan(said, Scales(MODEL, DATA, MACHINE), threads_per_worker=2, before=on_disk).layout.zero == 1


def test_the_frontier_trades_memory_for_time() -> None:
    made = plan(machine(40e6))
    ways = made.frontier
    assert [way.seconds.total for way in ways] == sorted(way.seconds.total for way in ways)
    assert [way.peak_bytes for way in ways] == sorted((way.peak_bytes for way in ways), reverse=True)
    assert ways[0].peak_bytes > made.choice.peak_bytes > ways[-1].peak_bytes
    assert ways[0].seconds.total < made.choice.seconds.total < ways[-1].seconds.total


def test_memory_is_returned_as_it_is_freed_where_it_is_tight() -> None:
    said = {"recompute": "none", "moments": "fp32", "micro_batch": 1, "parameter_tier": "device"}
    said |= {"optimizer_tier": "device", "gradient_tier": "device"}
    roomy = plan(memory=said).choice
    stays = roomy.peak.bytes["weights"] + roomy.peak.bytes["optimizer"]
    assert roomy.heap_bytes == roomy.peak.total - stays  # as much again as comes and goes
    for budget, room in ((1.001 * roomy.peak_bytes, True), (0.999 * roomy.peak_bytes, False)):
        made = plan(machine(budget / SAFETY), memory=said)
        assert made.layout.returns_memory is not room
        assert made.choice.heap_bytes == (roomy.heap_bytes if room else 0)


def test_a_heap_is_trimmed_later_where_the_budget_has_room() -> None:
    said = {"recompute": "none", "micro_batch": 1, "parameter_tier": "device"}
    said |= {"optimizer_tier": "device", "gradient_tier": "device", "moments": "fp32"}
    roomy = plan(memory=said)
    assert roomy.kept_bytes == roomy.choice.kept_bytes + roomy.choice.heap_bytes / 2
    peak = roomy.choice.peak_bytes
    tight = plan(machine(1.001 * peak / SAFETY), memory=said)
    assert tight.choice.heap_bytes == roomy.choice.heap_bytes
    assert tight.kept_bytes == pytest.approx(tight.choice.kept_bytes + 0.001 * peak)


def test_a_heap_that_keeps_its_memory_may_be_worth_a_smaller_layout() -> None:
    said = {"recompute": "none", "moments": "fp32", "parameter_tier": "device"}
    said |= {"optimizer_tier": "device", "gradient_tier": "device"}
    largest = plan(memory=said | {"micro_batch": 4}).choice
    just = machine(1.001 * (largest.peak_bytes - largest.heap_bytes) / SAFETY)
    assert plan(just, memory=said | {"micro_batch": 4}).layout.returns_memory
    made = plan(just, memory=said)
    assert (made.layout.micro_batch < 4, made.layout.returns_memory) == (True, False)


def test_pages_that_come_anew_and_copies_of_what_is_sent_take_their_time() -> None:
    said = {"recompute": "none", "moments": "fp32", "micro_batch": 1, "parameter_tier": "device", "zero": 1}
    said |= {"optimizer_tier": "device", "gradient_tier": "device"}
    roomy = plan(memory=said).choice
    tight = plan(machine(0.999 * roomy.peak_bytes / SAFETY), memory=said).choice
    made = 8 * (4 * 900 * 1200 + 270 * 15_000)  # packs; blocks, head
    assert tight.seconds.compute - roomy.seconds.compute == pytest.approx(made / (2 * 0.65e9))  # two cores
    shared = plan(memory=said, launch={"workers": 2}).choice
    sent = 1e6 * (2 + 4) / 2  # weights gathered, gradients reduced in fp32
    weights = (4 + 2) / 2 + 2 * 2 / 2 + 2 * 2  # half of them cast and copied in, all copied out
    copied = 1e6 * (weights + 2 + 4 + (4 + 4) / 2)  # gradients copied in, in fp32, and half of their sum
    seconds = (4 * sent + copied) / (MACHINE.memory_bytes_per_second / 2)  # sent through memory that both read
    seconds += copied / 2 / 2e9  # what is written, in pages that come anew
    assert shared.seconds.communication == pytest.approx(seconds)


def test_what_the_budget_leaves_keeps_state_in_memory_that_would_be_on_disk() -> None:
    large = replace(MODEL, num_parameters=1_000_000_000, outside_parameters=100_000_000, block_parameters=450_000_000)
    exact = {"moments": "fp32", "gradient_tier": "device", "parameter_tier": "device"}

    def large_plan(budget: float, **memory: Any) -> Plan:
        return make_plan(config(memory=exact | memory), Scales(large, DATA, machine(budget)), threads_per_worker=2)

    said = large_plan(1e12, optimizer_tier="disk")
    assert said.layout.optimizer_resident == 0
    for room in (1e9, 3e9, 5e9):
        budget = (tight(said) + room) / SAFETY / search.FULL
        found = large_plan(budget)
        assert found.layout.tiers_on_disk == ["memory.optimizer_tier"]
        resident = found.layout.optimizer_resident
        assert resident % TILE_BYTES == 0
        assert found.choice.peak_bytes - resident <= tight(said)
        assert (1 - 1e-9) * SAFETY * search.FULL * budget >= found.choice.peak_bytes
        assert found.choice.peak_bytes > SAFETY * search.FULL * budget - TILE_BYTES
        assert found.choice.seconds.disk == pytest.approx(said.choice.seconds.disk * (1 - resident / 10e9))
        assert parse_record(found.to_json(), Plan, "") == found
    kept = large_plan(1e12, optimizer_tier="disk", optimizer_resident="2GB")
    assert kept.choice.peak_bytes - said.choice.peak_bytes == 2e9
    assert large_plan(budget, optimizer_resident=0).layout.optimizer_resident == 0


def test_the_copy_that_saves_are_made_from_is_counted() -> None:
    exact = {"moments": "fp32", "optimizer_tier": "device", "parameter_tier": "device", "micro_batch": 1}
    without, beside = (plan(memory=exact, checkpoint={"every": every}).choice for every in (0, 5))
    assert beside.peak_bytes - without.peak_bytes == 12_000_000
    exact["optimizer_tier"] = "disk"
    without, beside = (plan(memory=exact, checkpoint={"every": every}).choice for every in (0, 5))
    assert beside.peak_bytes - without.peak_bytes == 2_000_000


@pytest.mark.parametrize("workers", [1, 2])
def test_the_host_of_gpus_updates_what_rests_there_or_on_disk(workers: int) -> None:
    gpu = parse_hardware(f"{workers}xA100-80GB")
    found = list(layouts(config(launch={"workers": workers}), STEPS, DATA.full_rows, gpu))
    for axis in ("tensor", "pipeline"):
        keys: dict[str, Any] = {"parallel": {axis: 2}, "launch": {"workers": 2 * workers}}
        found += layouts(config(**keys), STEPS, DATA.full_rows, parse_hardware(f"{2 * workers}xA100-80GB"))
    for layout in found:
        tiers = {layout.optimizer_tier, layout.gradient_tier}
        on_host = layout.parameter_tier != "device" or "disk" in tiers
        assert layout.update_tier == ("host" if on_host else "device")
        assert not (on_host and "device" in tiers)
        assert layout.zero == 3 or layout.parameter_tier == "device"
    assert {layout.optimizer_tier for layout in found} == {"device", "host", "disk"}
    for axis in ("workers", "tensor", "pipeline"):
        tiers = {layout.parameter_tier for layout in found if getattr(layout, axis) > 1 or axis == "workers"}
        assert tiers == {"device", "host", "disk"}
    for layout in layouts(config(adapter={"rank": 4}), STEPS, DATA.full_rows, gpu):  # what is frozen nobody updates
        assert (layout.update_tier == "host") == ("disk" in (layout.optimizer_tier, layout.gradient_tier))


def test_parameters_go_to_host_memory_where_a_device_has_no_room_for_them() -> None:
    """It has room for those outside blocks, two blocks, and a few gradients on their way."""
    tight = on_gpu(3e9)
    assert (tight.layout.parameter_tier, tight.layout.update_tier) == ("host", "host")
    assert tight.choice.peak_bytes < 3e9
    assert tight.choice.host_bytes == pytest.approx((2 + 10 + 2) * 1e9, rel=0.01)
    smallest = on_gpu(3e9, host_bytes=1.5e9, model=replace(LARGE, num_blocks=40, block_parameters=22_500_000))
    assert len(smallest.layout.tiers_on_disk) == 3
    smaller = on_gpu(3e9, host_bytes=7e9)
    assert smaller.layout.tiers_on_disk == ["memory.optimizer_tier"]
    assert 4e9 < smaller.choice.host_bytes < 5e9


def test_a_host_whose_speed_nobody_measured_updates_where_that_is_much_faster() -> None:
    chosen = on_gpu(13e9, memory={"moments": "fp32"}).choice
    there = on_gpu(13e9, memory={"moments": "fp32", "parameter_tier": "host"}).choice
    assert (chosen.layout.update_tier, there.layout.update_tier) == ("device", "host")

    def taking(choice: Choice, seconds: float) -> Choice:
        return replace(choice, seconds=replace(choice.seconds, total=seconds))

    for seconds, best in ((1.2, "device"), (1.3, "host")):
        found = ladder.choose([taking(chosen, seconds), taking(there, 1.0)], MACHINE)
        assert found.layout.update_tier == best


def test_a_packed_base_is_not_shared_by_workers_where_torch_would_cast_it(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"adapter": {"rank": 4, "quantize": "nf4"}, "launch": {"workers": 2}}
    asked, said = config(**changes), config(**changes, memory={"zero": 3})

    def stages() -> set[int]:
        return {layout.zero for layout in layouts(asked, STEPS, DATA.full_rows, parse_hardware("H100"))}

    for name, shares in (("2.13.0+cu130", True), ("2.11.0", False)):
        monkeypatch.setattr(rules, "version_of_torch", lambda name=name: name)
        assert (3 in stages()) == shares
        assert {0, 1, 2} < stages() | {3}
        if not shares:
            with pytest.raises(UserError, match=r"(?s)memory.zero.*torch 2\.11\.0.*change: memory.zero=2"):
                make_plan(said, Scales(MODEL, DATA, MACHINE), threads_per_worker=1)


@pytest.mark.parametrize(
    ("key", "changes", "instead"),
    [
        (
            "gradient_tier",
            {"adapter": {"rank": 4}, "memory": {"optimizer_tier": "device"}},
            "memory.optimizer_tier=host",
        ),
        ("optimizer_tier", {"memory": {"gradient_tier": "device"}}, "memory.gradient_tier=host"),
        ("parameter_tier", {"memory": {"optimizer_tier": "device"}}, "memory.optimizer_tier=host"),
        ("parameter_tier", {"compile": "on"}, "compile=off"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_what_rests_on_disk_is_refused_beside_some_gpus(
    key: str, changes: dict[str, Any], instead: str, force: bool
) -> None:
    asked = config(**(changes | {"memory": {**changes.get("memory", {}), key: "disk"}}))
    assert make_plan(asked, Scales(MODEL, DATA, MACHINE), threads_per_worker=1, force=force).layout.tiers_on_disk
    with pytest.raises(UserError, match=f"(?s)memory.{key}.*disk, on H100.*change: {instead}"):
        make_plan(asked, Scales(MODEL, DATA, parse_hardware("H100")), threads_per_worker=1, force=force)


LARGE = replace(MODEL, num_parameters=1_000_000_000, outside_parameters=100_000_000, block_parameters=225_000_000)


def on_gpu(device_bytes: float, host_bytes: float = 1e12, model: ModelProfile = LARGE, **changes: Any) -> Plan:
    gpu = replace(parse_hardware("A100-80GB"), device_bytes=round(device_bytes), host_bytes=round(host_bytes))
    changes = {"checkpoint": {"every": 0}} | changes
    return make_plan(config(precision="bf16", **changes), Scales(model, DATA, gpu), threads_per_worker=2)


def on_gpus(device_bytes: float, workers: int = 4, **memory: Any) -> Plan:
    gpu = replace(parse_hardware(f"{workers}xA100-80GB"), device_bytes=round(device_bytes))
    asked = config(
        precision="bf16",
        checkpoint={"every": 0},
        launch={"workers": workers},
        memory={"recompute": "full"} | memory,
    )
    return make_plan(asked, Scales(LARGE, DATA, gpu), threads_per_worker=2)


def test_two_blocks_are_gathered_ahead_between_gpus_where_there_is_room() -> None:
    """Two more than FSDP2 has by itself while a block runs forward, for the one that is received besides."""
    roomy = on_gpus(80e9, zero=3)
    assert roomy.layout.blocks_ahead == 2
    assert (roomy.layout.optimizer_tier, roomy.layout.gradient_tier) == ("device", "device")
    there: dict[str, Any] = {
        "optimizer_tier": "device",
        "gradient_tier": "device",
        "micro_batch": roomy.layout.micro_batch,
    }
    tight = on_gpus((roomy.choice.peak_bytes - 1e6) / SAFETY, zero=3, **there)
    assert tight.layout == replace(roomy.layout, blocks_ahead=1)
    assert tight.choice.peak_bytes < roomy.choice.peak_bytes
    assert "one block gathered ahead" in describe(tight.layout)
    assert "gathered ahead" not in describe(roomy.layout)
    gathered = {one.name: one.bytes["gathered"] for one in roomy.choice.instants if "gathered" in one.bytes}
    unit = 2 * LARGE.trained_block
    assert gathered["forward of the last block but two"] - gathered["forward of the last block"] == 2 * unit
    assert on_gpus(80e9, zero=2).layout.blocks_ahead == 2
    assert parse_record(tight.to_json(), Plan, "") == tight


@pytest.mark.parametrize(
    "memory",
    [
        {"optimizer_tier": "host"},
        {"parameter_tier": "host", "optimizer_tier": "host", "gradient_tier": "host"},
        {"tiles": 4},
        {"zero": 0},
    ],
)
def test_what_rests_elsewhere_or_comes_in_tiles_is_gathered_as_ever(memory: dict[str, Any]) -> None:
    """And what every GPU has whole is not gathered."""
    made = on_gpus(80e9, **{"zero": 3} | memory)
    assert made.layout.blocks_ahead == 1
    assert "gathered ahead" not in describe(made.layout)


def test_on_a_cpu_blocks_are_gathered_as_ever() -> None:
    assert plan(launch={"workers": 2}, memory={"zero": 3}).layout.blocks_ahead == 1


def test_accelerators_rest_exact_state_in_host_memory_before_they_round_it() -> None:
    """10 bytes a parameter leave the device but for a ring of tiles; what there is room for stays."""
    roomy = on_gpu(60e9)
    assert (roomy.layout.optimizer_tier, roomy.layout.moments, roomy.choice.host_bytes) == ("device", "fp32", 0)
    least = on_gpu(60e9, memory={"optimizer_tier": "host", "recompute": "full", "micro_batch": 1})
    assert least.layout.optimizer_resident == 0
    for room in (0.5e9, 4e9):
        budget = (least.choice.peak_bytes + room) / SAFETY / search.FULL
        tight = on_gpu(budget, memory={"recompute": "full", "micro_batch": 1, "moments": "fp32"})
        assert (tight.layout.optimizer_tier, tight.layout.moments) == ("host", "fp32")
        assert room - HOST_TILE_BYTES < tight.layout.optimizer_resident <= room
        assert tight.layout.optimizer_resident % HOST_TILE_BYTES == 0
        assert tight.choice.peak_bytes - least.choice.peak_bytes <= room
        assert tight.choice.host_bytes == 10e9
        assert tight.choice.seconds.host < least.choice.seconds.host
        assert parse_record(tight.to_json(), Plan, "") == tight


def test_8_bit_moments_that_stay_come_before_exact_ones_that_travel_where_they_are_much_faster() -> None:
    keys: dict[str, Any] = {"recompute": "full", "micro_batch": 1, "gradient_tier": "device"}
    staying = on_gpu(60e9, memory={**keys, "moments": "int8", "optimizer_tier": "device"})
    travelling = on_gpu(60e9, memory={**keys, "moments": "fp32", "optimizer_tier": "host", "optimizer_resident": 0})
    tight = staying.choice.peak_bytes / SAFETY / search.FULL
    ratio = travelling.choice.seconds.total / staying.choice.seconds.total
    assert ratio > ladder.WORTH_ROUNDING
    chosen = on_gpu(tight, memory=keys).layout
    assert (chosen.moments, chosen.optimizer_tier) == ("int8", "device")
    exact = replace(travelling.choice, seconds=replace(travelling.choice.seconds, total=1.2))
    rounded = replace(staying.choice, seconds=replace(staying.choice.seconds, total=1.0))
    assert ladder.choose([exact, rounded], MACHINE) is exact  # not much faster


def test_a_host_that_is_too_small_is_weighed_too() -> None:
    """For state that rests there, and for the copy from which checkpoints are saved."""
    keys = {"moments": "fp32"}
    tight = on_gpu(13e9, memory=keys)
    assert (tight.layout.optimizer_tier, tight.layout.moments) == ("host", "fp32")
    assert on_gpu(13e9, host_bytes=8e9).layout.moments == "int8"
    saving = on_gpu(13e9, memory=keys, checkpoint={"every": 1})
    assert saving.choice.host_bytes == tight.choice.host_bytes + 12e9
    assert saving.layout.saves_beside
    waiting = on_gpu(13e9, host_bytes=12e9, memory=keys, checkpoint={"every": 1})  # where a copy has no room
    assert (waiting.layout, waiting.choice.host_bytes) == (tight.layout, tight.choice.host_bytes)
    assert waiting.choice.saving.stop_seconds > saving.choice.saving.stop_seconds
    assert "no memory for a copy" in waiting.saves
    with pytest.raises(UserError, match=r"memory\.moments=auto"):
        on_gpu(13e9, host_bytes=2e9, memory={"moments": "fp32"})


def test_blocks_are_compiled_where_the_run_gains_by_it() -> None:
    busy = {name: replace(one, forward_traffic=Line(0, 1e7)) for name, one in LARGE.blocks.items()}
    model = replace(LARGE, blocks=busy)
    few, many = (on_gpu(60e9, model=model, steps=steps) for steps in (2, 200_000))
    assert (few.layout.compiled, many.layout.compiled) == (False, True)
    assert "less than the 60 s" in few.reasons["compile"]
    assert many.reasons["compile"] == "auto: each block"
    assert many.choice.seconds.total < few.choice.seconds.total
    on, off = (on_gpu(60e9, model=model, steps=2, compile=how) for how in ("on", "off"))
    assert (on.layout.compiled, off.layout.compiled) == (True, False)
    assert off.choice.seconds == few.choice.seconds


def test_a_budget_of_host_memory_is_obeyed() -> None:
    keys: dict[str, Any] = {"moments": "fp32"}
    free = on_gpu(13e9, memory=keys)
    assert free.choice.host_bytes > 8e9
    said = on_gpu(13e9, memory={"budget": {"host": "8GB"}})
    assert said.layout.moments == "int8"
    assert said.layout == on_gpu(13e9, host_bytes=8e9).layout
    with pytest.raises(UserError, match=r"2 GB \(memory\.budget\.host\)"):
        on_gpu(13e9, memory={**keys, "budget": {"host": "2GB"}})
    with pytest.raises(UserError, match=r"memory\.budget\.device=8000000000"):
        make_plan(config(memory={"budget": {"host": "8GB"}}), Scales(MODEL, DATA, MACHINE), threads_per_worker=1)


def test_a_budget_of_host_memory_is_never_more_than_is_free() -> None:
    gpu = replace(parse_hardware("2xA100-80GB"), device_bytes=round(13e9), host_bytes=round(1e12))
    asked = config(
        precision="bf16", checkpoint={"every": 0}, launch={"workers": 2}, memory={"budget": {"host": "64GB"}}
    )
    planned = partial(make_plan, scales=Scales(LARGE, DATA, gpu), threads_per_worker=1)
    said, little = (planned(asked, free=Free(host=free)) for free in (200e9, 30e9))
    assert (said.budget.host, said.budget.host_what) == (32e9, "memory.budget.host: 64 GB, shared by 2 workers")
    assert little.budget.host == 15e9
    assert little.budget.host_what == "free now, less than memory.budget.host: 30 GB, shared by 2 workers"
    assert all(plan.choice.host_bytes <= SAFETY * (plan.budget.host or 0) for plan in (said, little))


def test_locked_memory_is_known_where_a_driver_keeps_to_its_limit() -> None:
    """The limit is one process's: it is not shared. A copy for checkpoints need not be locked."""
    gpu = replace(parse_hardware("A100-80GB"), device_bytes=round(13e9))
    exact: dict[str, Any] = {"moments": "fp32", "optimizer_tier": "host"}

    def planned(lockable: float | None, every: int = 5, **memory: Any) -> Plan:
        asked = config(precision="bf16", checkpoint={"every": every}, memory=memory)
        return make_plan(asked, Scales(LARGE, DATA, gpu), threads_per_worker=1, free=Free(lockable=lockable))

    free = planned(None, **exact)
    assert free.layout.saves_beside
    assert 0 < free.choice.locked_bytes < free.choice.host_bytes
    assert planned(free.choice.locked_bytes, **exact).layout == free.layout
    less = planned(0.6 * free.choice.locked_bytes)
    assert less.choice.locked_bytes <= 0.6 * free.choice.locked_bytes
    with pytest.raises(UserError, match=r"ulimit -l") as caught:
        planned(8e6, **exact)
    (problem,) = caught.value.problems
    assert problem.where == "locked memory"
    assert "8 MB: what the system lets a process lock" in problem.needed
    assert problem.change.endswith("ulimit -l unlimited, or for a container --ulimit memlock=-1")


def test_gradients_leave_an_accelerator_after_exact_state() -> None:
    keys = {"recompute": "full", "micro_batch": 1}
    roomy = on_gpu(60e9, memory=keys | {"optimizer_tier": "host", "gradient_tier": "device"})
    tight = on_gpu((roomy.choice.peak_bytes - 1e9) / SAFETY, memory=keys)
    assert (tight.layout.optimizer_tier, tight.layout.gradient_tier, tight.layout.moments) == ("host", "host", "fp32")
    sums = 2 if tight.layout.micro_batches == 1 else 4
    assert tight.choice.host_bytes == 10e9 + sums * 1e9
    assert on_gpu((roomy.choice.peak_bytes + 1e9) / SAFETY, memory=keys).layout.gradient_tier == "device"


def test_inputs_of_blocks_leave_an_accelerator_where_they_have_no_room() -> None:
    deep = replace(LARGE, num_blocks=200_000, block_parameters=4_500)
    keys: dict[str, Any] = {"recompute": "full", "micro_batch": 1, "moments": "fp32"}
    keys |= {"optimizer_tier": "device", "gradient_tier": "device"}
    roomy = on_gpu(60e9, model=deep, memory=keys)
    assert roomy.layout.activation_tier == "device"
    less = (roomy.choice.peak_bytes - 1) / SAFETY
    tight = on_gpu(less, model=deep, memory=keys)
    assert tight.layout == replace(roomy.layout, activation_tier="host")
    inputs = deep.num_blocks * 2 * deep.hidden_size * tight.layout.row_tokens
    assert tight.choice.host_bytes == inputs
    with pytest.raises(UserError, match=r"memory\.activation_tier=auto"):
        on_gpu(less, model=deep, memory=keys | {"activation_tier": "device"})
    with pytest.raises(UserError, match=r"host's memory: 25\.6 GB"):
        on_gpu(less, inputs / SAFETY - 1, model=deep, memory=keys | {"activation_tier": "host"})
    found = list(layouts(config(), STEPS, DATA.full_rows, parse_hardware("A100-80GB")))
    assert {layout.recompute for layout in found if layout.activation_tier == "host"} == {"full"}
    assert {layout.activation_tier for layout in layouts(config(), STEPS, DATA.full_rows, MACHINE)} == {"device"}


def test_on_a_cpu_the_host_is_where_they_were() -> None:
    keys = {"recompute": "full", "micro_batch": 8}
    here, there = (plan(memory=keys | {"activation_tier": tier}).choice for tier in ("device", "host"))
    assert here.host_bytes == there.host_bytes == 0
    assert there.peak_bytes > here.peak_bytes
    assert there.peak.bytes["host"] == MODEL.num_blocks * 2 * MODEL.hidden_size * there.layout.row_tokens


def test_all_candidates_are_weighed_in_a_moment() -> None:
    began = time.process_time()
    plan(launch={"workers": 4}, batch={"sequences": 64})
    assert time.process_time() - began < 2


DEEP = replace(MODEL, num_parameters=200_000 + 32 * 200_000, num_blocks=32)
KEPT: dict[str, Any] = {"micro_batch": 1, "moments": "fp32", "optimizer_tier": "device", "gradient_tier": "device"}
"""All of ``memory`` but recompute."""
KEPT |= {"parameter_tier": "device", "activation_tier": "device"}


def deep(budget: float = 1e12, workers: int = 1, **memory: Any) -> Plan:
    keys = KEPT | ({"zero": 3} if workers > 1 else {}) | memory
    asked = config(memory=keys, launch={"workers": workers}, batch={"sequences": 2 * workers})
    return make_plan(asked, Scales(DEEP, DATA, machine(budget)), threads_per_worker=1)


def budget_for(made: Plan) -> float:
    """Bytes in which a plan just fits."""
    return made.choice.peak_bytes * made.workers / SAFETY + made.workers


def fitting(budget: float, workers: int) -> dict[Any, Plan]:
    """Every way to recompute, and every number of blocks, that fits."""
    found: dict[Any, Plan] = {}
    said: list[dict[str, Any]] = [{"recompute": kind} for kind in ("none", "selective", "full")]
    for memory in (*said, *({"recompute_blocks": number} for number in range(1, 32))):
        with suppress(UserError):
            found[next(iter(memory.values()))] = deep(budget, workers, **memory)
    return found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("share", [pytest.param(0.05, marks=pytest.mark.slow), 0.1, 0.9])
def test_as_few_blocks_are_recomputed_as_fit(share: float, workers: int) -> None:
    """None do not fit, and all leave room. What is found is the fastest of all numbers of blocks."""
    none, full = (deep(workers=workers, recompute=kind) for kind in ("none", "full"))
    budget = share * budget_for(none) + (1 - share) * budget_for(full)
    made = deep(budget, workers)
    assert made.choice.peak_bytes <= made.budget.usable
    everything = fitting(budget, workers)
    fastest = min(plan.choice.seconds.total for plan in everything.values())
    assert made.choice.seconds.total == pytest.approx(fastest, rel=ladder.NEARLY - 1)
    assert made.layout.recomputed is not None
    number, blocks = made.layout.recomputed
    assert 0 < number < blocks == 32
    assert none.choice.seconds.total < made.choice.seconds.total < everything["full"].choice.seconds.total
    assert f"recompute full in {number} of 32 blocks" in describe(made.layout)


def test_a_number_of_blocks_that_is_said_is_kept() -> None:
    none, some, full = (
        deep(**said) for said in ({"recompute": "none"}, {"recompute_blocks": 12}, {"recompute": "full"})
    )
    assert (some.layout.recompute, some.layout.recomputed) == ("full", (12, 32))
    assert deep(recompute="full").layout.recomputed is None, "all of them"
    assert deep(recompute="full", recompute_blocks=32).layout == full.layout
    at_loss = [next(one for one in made.choice.instants if one.name == "loss") for made in (none, some, full)]
    kept = [one.bytes["activations"] for one in at_loss]
    assert kept[1] == pytest.approx(20 / 32 * kept[0] + 12 / 32 * kept[2])
    seconds = [made.choice.seconds.compute for made in (none, some, full)]
    assert seconds[1] == pytest.approx(20 / 32 * seconds[0] + 12 / 32 * seconds[2])
    with pytest.raises(UserError, match=r"33 blocks to recompute, 32 blocks in the model"):
        deep(recompute_blocks=33)


def test_a_run_that_goes_on_recomputes_as_many_blocks() -> None:
    tight = 0.9 * budget_for(deep(recompute="none"))
    first = deep(tight)
    assert first.layout.recomputed is not None
    for said, expected in (
        ({}, first.layout.recomputed),
        ({"recompute_blocks": 3}, (3, 32)),
        ({"recompute": "full"}, None),
    ):
        asked = config(memory=KEPT | said, batch={"sequences": 2})
        again = make_plan(asked, Scales(DEEP, DATA, MACHINE), threads_per_worker=1, before=first.layout)
        assert (again.layout.recompute, again.layout.recomputed) == ("full", expected)


def test_a_pipeline_recomputes_all_blocks_or_none() -> None:
    asked = {"launch": {"workers": 2}, "parallel": {"pipeline": 2}, "memory": KEPT}
    none, full = (
        make_plan(
            config(**asked | {"memory": KEPT | {"recompute": kind}}), Scales(DEEP, DATA, MACHINE), threads_per_worker=1
        )
        for kind in ("none", "full")
    )
    between = machine((budget_for(none) + 3 * budget_for(full)) / 4)
    made = make_plan(config(**asked), Scales(DEEP, DATA, between), threads_per_worker=1)
    assert made.layout.recomputed is None


def test_a_plan_without_a_number_of_blocks_is_read(tmp_path: Any) -> None:
    """As older versions wrote it."""
    for made in (deep(recompute_blocks=12), deep(recompute="full")):
        made.write(tmp_path / "plan.json")
        assert Plan.read(tmp_path / "plan.json") == made
        old = json.loads(made.to_json())
        for choice in (old["choice"], *old["frontier"]):
            del choice["layout"]["recomputed"]
        assert parse_record(json.dumps(old), Plan, "").layout == replace(made.layout, recomputed=None)


def test_a_plan_survives_its_file(tmp_path: Any) -> None:
    made = plan(epochs=2.0, kernels="plain")
    made.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == made


def test_an_update_without_the_kernel_takes_memory_and_its_time() -> None:
    """Its operations go through memory one after another; where there is nothing to switch off, nothing changes."""
    for hardware, slower in ((MACHINE, True), (parse_hardware("A100-80GB"), False)):
        on, off = (plan(hardware, kernels={"adamw": switch}) for switch in ("on", "off"))
        assert off.layout == replace(on.layout, kernels_off=("adamw",))
        assert (off.choice.seconds.update > 3 * on.choice.seconds.update) == slower
        update_on, update_off = (
            next(one for one in made.choice.instants if one.name == "update") for made in (on, off)
        )
        assert (update_off.total > update_on.total) == slower


HALF = replace(
    MODEL,
    num_parameters=502_000,
    embedding_parameters=32_000,
    outside_parameters=101_000,
    block_parameters=100_250,
    attention_size=32,
    vocab_size=500,
    blocks={"none": block(3000, 4000, 1), "selective": block(1500, 4000, 1.2), "full": block(128, 5000, 2)},
)


def divided(tensor: int | str, machine: Machine = MACHINE, force: bool = False, **changes: Any) -> Plan:
    asked = config(parallel={"tensor": tensor}, **changes)
    return make_plan(asked, Scales(MODEL, DATA, machine, parts={2: HALF}), threads_per_worker=1, force=force)


def test_ranks_that_compute_together_hold_their_parts() -> None:
    made = divided(2, launch={"workers": 2}, memory={"micro_batch": 1})
    assert (made.layout.tensor, made.layout.shards, made.layout.micro_batches) == (2, 1, 8)
    assert made.choice.peak.bytes["weights"] == 2 * HALF.num_parameters  # bf16, with no one to shard with
    assert made.model.num_parameters == MODEL.num_parameters
    sharded = divided(2, launch={"workers": 4}, memory={"micro_batch": 1, "zero": 3})
    assert (sharded.layout.shards, sharded.layout.micro_batches) == (2, 4)
    assert sharded.choice.peak.bytes["weights"] == 4 * HALF.num_parameters / 2
    assert made.choice.seconds.communication > 0


def test_the_planner_divides_matrices_where_it_must() -> None:
    assert divided("auto", launch={"workers": 4}).layout.tensor == 1
    few = divided("auto", launch={"workers": 4}, batch={"sequences": 2})
    assert (few.layout.tensor, few.layout.shards) == (2, 2)
    kept = {"optimizer_tier": "device", "gradient_tier": "device", "parameter_tier": "device", "moments": "fp32"}
    keys: dict[str, Any] = {"launch": {"workers": 4}, "memory": kept}
    least, halved = (divided(size, machine(1e6), force=True, **keys).choice.peak_bytes for size in (1, 2))
    between = machine(4 * (halved + least) / 2 / SAFETY)
    with pytest.raises(UserError):
        divided(1, between, **keys)
    assert divided("auto", between, **keys).layout.tensor == 2


def test_what_does_not_go_with_divided_matrices_is_not_chosen() -> None:
    ways = list(layouts(config(parallel={"tensor": 2}, launch={"workers": 4}), STEPS, DATA.full_rows, MACHINE))
    assert {way.moments for way in ways} == {"fp32", "bf16"}
    for key in ("optimizer_tier", "gradient_tier", "parameter_tier"):
        assert {getattr(way, key) for way in ways} == {"device", "disk"}


def test_moments_in_8_bits_are_refused_where_a_block_would_be_cut() -> None:
    asked = config(parallel={"tensor": 2}, launch={"workers": 2}, memory={"moments": "int8"})
    cut = replace(HALF, keeps_blocks=False)
    with pytest.raises(UserError, match=r"int8, and rows of matrices that 2 workers would cut.*\n.*multiple of 512"):
        make_plan(asked, Scales(MODEL, DATA, MACHINE, parts={2: cut}), threads_per_worker=1)
    made = make_plan(asked, Scales(MODEL, DATA, MACHINE, parts={2: HALF}), threads_per_worker=1)
    assert made.layout.moments == "int8"
    left = config(parallel={"tensor": "auto"}, launch={"workers": 2}, memory={"moments": "int8"})
    ways = candidates(Search(left, Scales(MODEL, DATA, MACHINE, parts={2: cut})))
    assert {way.layout.tensor for way in ways} == {1}


STATE_ON_DISK: dict[str, Any] = {"micro_batch": 1, "optimizer_tier": "disk", "optimizer_resident": 0}


def test_workers_that_divide_the_model_have_their_parts_of_it_on_disk() -> None:
    whole = plan(memory=STATE_ON_DISK)
    assert whole.choice.states is None
    two: dict[str, Any] = {"launch": {"workers": 2}, "memory": STATE_ON_DISK}
    halves, stages = divided(2, **two), plan(**two, parallel={"pipeline": 2})
    assert (whole.states.optimizer, halves.states.optimizer) == (10 * MODEL.num_parameters, 10 * HALF.num_parameters)
    assert resting_bytes(halves) == 2 * halves.states.optimizer
    assert halves.choice.seconds.disk == pytest.approx(whole.choice.seconds.disk * 2 * HALF.num_parameters / 1e6)
    # The head is no part of the embedding here: both stages' states are those of the model, on one disk.
    assert stages.choice.seconds.disk == pytest.approx(whole.choice.seconds.disk)
    most = max(part.num_parameters for part in workers_parts(MODEL, stages.layout.stages, 2))
    assert stages.states.optimizer == 10 * most < whole.states.optimizer
    assert parse_record(stages.to_json(), Plan, "") == stages


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_rests_beside_gpus_of_a_divided_model_is_each_workers_part(tier: str) -> None:
    """Updated by the host; of several stages a worker's device has room for two blocks of each."""
    rests = dict.fromkeys(("optimizer_tier", "gradient_tier", "parameter_tier"), tier)
    memory: dict[str, Any] = {**rests, "zero": 3, "micro_batch": 1, "recompute": "full", "optimizer_resident": 0}
    alone = on_gpu(60e9, memory=memory)
    two: dict[str, Any] = {"launch": {"workers": 2}, "memory": memory}
    model = replace(LARGE, num_parameters=1_700_000_000, num_blocks=4 * LARGE.num_blocks, block_parameters=100_000_000)
    stages = on_gpu(60e9, model=model, **two, parallel={"pipeline": 2})
    woven = on_gpu(60e9, model=model, **two, parallel={"pipeline": 2, "schedule": "interleaved"})
    halves = replace(LARGE, num_parameters=LARGE.num_parameters // 2, outside_parameters=LARGE.outside_parameters // 2)
    gpu = replace(parse_hardware("A100-80GB"), host_bytes=10**12)
    asked = config(precision="bf16", checkpoint={"every": 0}, **two, parallel={"tensor": 2})
    matrices = make_plan(asked, Scales(LARGE, DATA, gpu, parts={2: halves}), threads_per_worker=2)
    for made in (alone, stages, woven, matrices):
        assert made.layout.update_tier == "host"
        assert not made.layout.compiled
    part = max(one.num_parameters for one in workers_parts(model, stages.layout.stages, 2))
    for made, parameters in ((stages, part), (matrices, halves.num_parameters)):
        share = parameters / LARGE.num_parameters
        if tier == "disk":
            assert resting_bytes(made) == pytest.approx(share * resting_bytes(alone), rel=1e-6)
        else:
            assert made.choice.host_bytes == pytest.approx(share * alone.choice.host_bytes, rel=0.05)
    there = [held_states(one.layout, workers_parts(model, one.layout.stages, 2)[0]).weights for one in (stages, woven)]
    assert there[1] - there[0] == pytest.approx(2 * 2 * model.block_parameters, rel=0.01)


def test_parameters_of_divided_models_leave_gpus_only_where_they_must() -> None:
    keys: dict[str, Any] = {"launch": {"workers": 2}, "parallel": {"pipeline": 2}, "precision": "bf16"}
    gpu = parse_hardware("A100-80GB")
    asked = config(**keys, checkpoint={"every": 0})
    open_ways = candidates(Search(asked, Scales(LARGE, DATA, gpu)))
    assert {way.layout.parameter_tier for way in open_ways} == {"device", "host"}
    last = candidates(Search(asked, Scales(LARGE, DATA, gpu)), last_resort=True)
    assert {way.layout.parameter_tier for way in last} == {"device", "host", "disk"}
    assert all(way.layout.tiers_on_disk for way in last)
    roomy = budget_of(asked, gpu)
    ways = candidates(Search(asked, Scales(LARGE, DATA, gpu), roomy))
    assert {way.layout.parameter_tier for way in ways if way.layout.zero == 3} == {"device"}
    least = min(way.peak_bytes for way in open_ways if way.layout.update_tier == "device")
    tight = on_gpu(0.9 * least / SAFETY, launch={"workers": 2}, parallel={"pipeline": 2})
    assert (tight.layout.update_tier, tight.layout.parameter_tier) == ("host", "host")


def test_a_node_waits_for_the_stages_that_it_has_on_its_disk() -> None:
    keys: dict[str, Any] = {"launch": {"workers": 4}, "memory": STATE_ON_DISK, "parallel": {"pipeline": 4}}
    one, two = (plan(replace(MACHINE, nodes=nodes), **keys) for nodes in (1, 2))
    moved = [disk_bytes(two.layout, part) for part in workers_parts(MODEL, two.layout.stages, 4)]
    rate = MACHINE.disk_mixed_bytes_per_second
    assert one.choice.seconds.disk == pytest.approx(sum(moved) / rate)
    assert two.choice.seconds.disk == pytest.approx(max(sum(moved[:2]), sum(moved[1:3]), sum(moved[2:])) / rate)


def test_state_of_divided_models_leaves_memory_only_where_it_must() -> None:
    two: dict[str, Any] = {"launch": {"workers": 2}}
    kept = {"moments": "fp32", "micro_batch": 1, "recompute": "full", "optimizer_resident": 0}
    inside = {"optimizer_tier": "device", "gradient_tier": "device", "parameter_tier": "device"}
    for axis in ("tensor", "pipeline"):
        keys: dict[str, Any] = two | {"parallel": {axis: 2}}
        asked, parts = config(**keys, memory=kept), {1: MODEL, 2: HALF}
        roomy = budget_of(asked, MACHINE)
        ways = candidates(Search(asked, Scales(MODEL, DATA, MACHINE, parts), roomy))
        assert not any(way.layout.tiers_on_disk for way in ways)
        least = min(way.peak_bytes for way in ways)
        small = machine(2 * (least - 1) / SAFETY)
        with pytest.raises(UserError, match="the least that the config allows"):
            make_plan(
                config(**keys, memory=kept | inside), Scales(MODEL, DATA, small, parts=parts), threads_per_worker=1
            )
        made = make_plan(asked, Scales(MODEL, DATA, small, parts=parts), threads_per_worker=1)
        assert made.layout.tiers_on_disk
        assert made.choice.peak_bytes < least


def test_a_pipeline_is_cut_and_its_largest_stage_planned_for() -> None:
    alone = plan(memory={"micro_batch": 1, "recompute": "none"}).choice
    both: dict[str, Any] = {"launch": {"workers": 2}, "memory": {"micro_batch": 1, "recompute": "none"}}
    found = {}
    for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
        made = plan(**both, parallel={"pipeline": 2, "schedule": schedule})
        found[schedule] = made.choice
        assert sum(made.layout.stages) == MODEL.num_blocks
        assert parse_record(made.to_json(), Plan, "") == made
    assert len(found["interleaved"].layout.stages) == 4
    # States are divided as the blocks are; what gpipe holds of all micro-batches, 1f1b holds of two.
    for choice in found.values():
        assert choice.peak.bytes["optimizer"] < 0.75 * alone.peak.bytes["optimizer"]
    assert found["gpipe"].peak.bytes["in flight"] > 3 * found["1f1b"].peak.bytes["in flight"]
    idle = {schedule: choice.seconds.idle / choice.seconds.compute for schedule, choice in found.items()}
    assert idle["gpipe"] == idle["1f1b"] == pytest.approx(1 / 8)  # (2 - 1) stages over 8 micro-batches
    assert idle["interleaved"] < idle["1f1b"]
    assert idle["zero_bubble"] < idle["1f1b"]


def test_the_planner_puts_stages_on_nodes_whose_network_is_slow() -> None:
    keys: dict[str, Any] = {"launch": {"workers": 4}, "batch": {"sequences": 32}}
    near = replace(MACHINE, nodes=2, network_bytes_per_second=1e12, link_bytes_per_second=1e12)
    far = replace(near, network_bytes_per_second=1e6)
    made = {
        name: make_plan(
            config(parallel={"pipeline": "auto"}, **keys), Scales(MODEL, DATA, machine), threads_per_worker=1
        )
        for name, machine in {"near": near, "far": far}.items()
    }
    assert made["near"].layout.pipeline == 1
    assert made["far"].layout.pipeline > 1
    alone = make_plan(config(**keys), Scales(MODEL, DATA, far), threads_per_worker=1)
    assert made["far"].choice.seconds.total < alone.choice.seconds.total


def test_a_pipeline_that_is_open_keeps_to_what_its_schedule_can() -> None:
    cases: list[tuple[dict[str, Any], set[int]]] = [
        ({"launch": {"workers": 4}}, {1, 2, 4}),
        ({"launch": {"workers": 4}, "parallel": {"schedule": "zero_bubble"}}, {1, 4}),
        ({"launch": {"workers": 4}, "parallel": {"schedule": "zero_bubble"}, "precision": "fp16"}, {1}),
        ({"launch": {"workers": 4}, "parallel": {"schedule": "interleaved"}}, {1, 2}),  # two of four blocks each
        ({"launch": {"workers": 6}}, {1, 2}),
    ]
    for keys, sizes in cases:
        asked = config(**keys | {"parallel": {"pipeline": "auto", **keys.get("parallel", {})}})
        ways = candidates(Search(asked, Scales(MODEL, DATA, MACHINE)))
        assert {way.layout.pipeline for way in ways} == sizes


@pytest.mark.parametrize(
    ("keys", "compiled"),
    [
        ({"adapter": {"rank": 4}}, {("device", True), ("host", False), ("disk", False)}),
        ({"adapter": {"rank": 4}, "compile": "on"}, {("device", True)}),
        ({"adapter": {"rank": 4}, "compile": "off"}, {("device", False), ("host", False), ("disk", False)}),
        (
            {"launch": {"workers": 4}, "parallel": {"pipeline": 4}},
            {("device", True), ("host", False), ("disk", False)},
        ),
        (
            {"launch": {"workers": 4}, "parallel": {"pipeline": 4, "schedule": "zero_bubble"}},
            {("device", False), ("host", False), ("disk", False)},
        ),
    ],
)
def test_blocks_are_planned_as_compiled_where_the_worker_compiles_them(
    keys: dict[str, Any], compiled: set[tuple[str, bool]]
) -> None:
    found = list(layouts(config(**keys), STEPS, DATA.full_rows, parse_hardware("A100-80GB")))
    chosen = [layout for layout in found if layout.recompute == "selective"]
    assert not any(layout.compiled for layout in chosen)
    assert bool(chosen) == (keys.get("compile") != "on")
    assert {(layout.parameter_tier, layout.compiled) for layout in found if layout not in chosen} == compiled
    assert not any(layout.compiled for layout in layouts(config(), STEPS, DATA.full_rows, MACHINE))


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(UserError, match="6 stages, 4 blocks"):
        plan(launch={"workers": 6}, parallel={"pipeline": 6})


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"parallel": {"pipeline": 2, "schedule": "zero_bubble"}, "launch": {"workers": 4}}, "2 groups of workers"),
        ({"parallel": {"pipeline": 2, "schedule": "zero_bubble"}, "precision": "fp16"}, "precision is fp16"),
        ({"parallel": {"pipeline": 2, "schedule": "zero_bubble"}, "compile": "on"}, "compile is on"),
        ({"parallel": {"pipeline": 3}, "launch": {"workers": 4}}, "4 workers"),
    ],
)
def test_what_does_not_go_through_a_pipeline_is_refused(keys: dict[str, Any], found: str) -> None:
    from tonnage.config.check import contradictions

    whole = {"parallel": {"pipeline": 2}, "launch": {"workers": 2}, "epochs": 1.0} | keys
    told = [one.found for one in contradictions(config(**whole))]
    assert any(found in one for one in told), told
