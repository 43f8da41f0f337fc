"""Rows that workers divide, as they are planned: a part of what rows take, and what attention exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planning.profiles import DATA, MACHINE, MODEL, config, machine
from tonnage.errors import UserError
from tonnage.planning import scales
from tonnage.planning.context import exchanged_bytes
from tonnage.planning.machine import Machine
from tonnage.planning.plan import SAFETY, Plan
from tonnage.planning.planner import make_plan
from tonnage.planning.profile import Heads, ModelProfile
from tonnage.planning.scales import Scales
from tonnage.planning.words import describe

WITH_HEADS = replace(MODEL, heads=(Heads(queries=4, keys=2, size=16, of_values=16),))
KEPT: dict[str, Any] = {
    "zero": 3,
    "micro_batch": 1,
    "recompute": "none",
    "moments": "fp32",
    "optimizer_tier": "device",
    "gradient_tier": "device",
    "parameter_tier": "device",
}


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scales.RUNTIME_BYTES, "cpu", 0.0)


def plan(
    context: int | str,
    here: Machine = MACHINE,
    model: ModelProfile = WITH_HEADS,
    parallel: dict[str, Any] | None = None,
    force: bool = False,
    **changes: Any,
) -> Plan:
    keys = {"launch": {"workers": 4}, "memory": KEPT} | changes
    asked = config(parallel={"context": context, **(parallel or {})}, **keys)
    return make_plan(asked, Scales(model, DATA, here), threads_per_worker=1, force=force)


def test_workers_hold_their_part_of_a_row() -> None:
    whole, halves = plan(1), plan(2)
    assert (halves.layout.context, halves.layout.shards, whole.layout.shards) == (2, 4, 4)
    assert (whole.layout.micro_batches, halves.layout.micro_batches) == (2, 4)
    for name in ("row_tokens", "row_supervised", "mean_row_tokens"):
        assert getattr(halves.layout, name) == getattr(whole.layout, name) / 2
    assert halves.states == whole.states
    forward = "forward of the last block"
    of_whole, of_halves = (
        next(one for one in made.choice.instants if one.name == forward).bytes["activations"]
        for made in (whole, halves)
    )
    kept = 3 * 2 * 4 * 16 * halves.layout.row_tokens  # what attention gave, of three blocks, in bf16
    assert of_halves == pytest.approx(of_whole / 2 + kept)
    assert "context 2" in describe(halves.layout)
    assert halves.flops_per_step == pytest.approx(whole.flops_per_step)


def test_keys_of_fewer_heads_than_workers_are_there_more_than_once() -> None:
    halves, quarters = plan(2), plan(4)
    forward = "forward of the last block"
    of_halves, of_quarters = (
        next(one for one in made.choice.instants if one.name == forward).bytes["activations"]
        for made in (halves, quarters)
    )
    copies = 3 * 2 * 2 * (16 + 16) * quarters.layout.row_tokens
    assert of_quarters == pytest.approx(of_halves / 2 + copies)


def test_what_is_exchanged_takes_time() -> None:
    """Queries, keys and values go, and what the heads gave comes, forward and backward; to one of two workers."""
    halves = plan(2)
    again = replace(halves.layout, recompute="full")
    numbers = 4 * 16 + 2 * 16 + 2 * 16 + 4 * 16
    passes = 4 * 4 * 2  # micro-batches, blocks
    assert exchanged_bytes(halves.layout, WITH_HEADS, 450) == passes * 2 * numbers * 450 / 2
    assert exchanged_bytes(again, WITH_HEADS, 450) == passes * 3 * numbers * 450 / 2
    assert exchanged_bytes(plan(1).layout, WITH_HEADS, 900) == 0
    slow = replace(MACHINE, link_bytes_per_second=MACHINE.link_bytes_per_second / 2)
    assert plan(2, slow).choice.seconds.total > halves.choice.seconds.total
    others = replace(WITH_HEADS, heads=(Heads(queries=4, keys=4, size=32, of_values=32),))
    longer = plan(2, model=others).choice.seconds.total - halves.choice.seconds.total
    more = exchanged_bytes(halves.layout, others, 450) - exchanged_bytes(halves.layout, WITH_HEADS, 450)
    assert longer == pytest.approx(more / MACHINE.link_bytes_per_second)


def test_the_planner_divides_rows_where_it_must() -> None:
    assert plan("auto").layout.context == 1
    few = plan("auto", batch={"sequences": 2})
    assert few.layout.context == 2
    kept: dict[str, Any] = {"memory": KEPT | {"recompute": "full", "micro_batch": 1}}
    least, divided = (plan(size, machine(1e6), force=True, **kept).choice.peak_bytes for size in (1, 2))
    between = machine(4 * (least + divided) / 2 / SAFETY)
    with pytest.raises(UserError):
        plan(1, between, **kept)
    assert plan("auto", between, **kept).layout.context >= 2


def test_heads_that_workers_cannot_divide() -> None:
    with pytest.raises(UserError, match=r"3, and attention of 4 heads.*\n.*\n.*parallel.context=2"):
        plan(3, launch={"workers": 3})
    with pytest.raises(UserError, match=r"2, and attention of .* heads"):
        plan(2, model=MODEL)
    assert plan("auto", model=MODEL, batch={"sequences": 4}).layout.context == 1


def test_what_a_config_does_not_divide_the_planner_does_not() -> None:
    one: dict[str, Any] = {"batch": {"sequences": 1}, "launch": {"workers": 2}}
    assert plan("auto", **one).layout.context == 2
    assert plan("auto", router_loss=0.1, **one).layout.context == 1
