"""MLPs over tiles of the sequence: taken before anything is given up, as few as help, and never asked for otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planning.profiles import DATA, MODEL, config, machine
from tonnage.errors import UserError
from tonnage.planning import scales
from tonnage.planning.machine import Machine
from tonnage.planning.plan import Plan
from tonnage.planning.planner import explain, make_plan
from tonnage.planning.profile import BlockCost, Envelope, Line, ModelProfile
from tonnage.planning.scales import Scales, work_of
from tonnage.planning.seconds import product_flops
from tonnage.planning.words import describe

WIDE = 100.0
"""So many times as much as of ``MODEL`` lies between the two ends of a block's MLP."""
PEAKS = ("forward_peak", "backward_peak", "backward_bare_peak", "evaluation_peak")


def block(cost: BlockCost, number: int) -> BlockCost:
    """A block whose MLP goes through rows in a number of tiles."""

    def peak(name: str) -> Envelope:
        lines = [Line(line.fixed, line.per_token * (1 + WIDE / number)) for line in getattr(cost, name).lines]
        return Envelope(tuple(lines))

    again = cost.forward_flops * (0.5 if number > 1 else 0.0)
    backward = Line(cost.backward_flops.fixed + again.fixed, cost.backward_flops.per_token + again.per_token)
    peaks: dict[str, Any] = {name: peak(name) for name in PEAKS}
    return replace(cost, **peaks, backward_flops=backward)


def profile(number: int) -> ModelProfile:
    blocks = {kind: block(cost, number) for kind, cost in MODEL.blocks.items()}
    return replace(MODEL, blocks=blocks, tokenwise_blocks=MODEL.num_blocks)


class Weighed:
    """Scales that note which numbers of tiles they are asked about."""

    def __init__(self, model: ModelProfile | None = None) -> None:
        self.asked: list[int] = []
        self._model = model or profile(1)

    def scales(self, here: Machine) -> Scales:
        return Scales(self._model, DATA, here, tiled=self._tiled)

    def _tiled(self, tensor: int, number: int) -> ModelProfile:
        assert tensor == 1
        self.asked.append(number)
        return profile(number)


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scales.RUNTIME_BYTES, "cpu", 0.0)


def plan(budget: float, weighed: Weighed | None = None, **changes: Any) -> Plan:
    return make_plan(config(**changes), (weighed or Weighed()).scales(machine(budget)), threads_per_worker=2)


def least(**changes: Any) -> float:
    """The least that a plan takes which gives nothing up, and has whole rows in its MLPs."""
    exact = {"moments": "fp32", "optimizer_tier": "device", "gradient_tier": "device", "parameter_tier": "device"}
    memory = exact | {"sequence_tiles": 1, "recompute": "full", "micro_batch": 1} | changes
    made = make_plan(config(memory=memory), Weighed().scales(machine(1e6)), threads_per_worker=2, force=True)
    return made.choice.peak_bytes


def test_nobody_asks_where_all_fits_or_weights_alone_do_not() -> None:
    heavy = replace(profile(1), num_parameters=800_200_000, block_parameters=200_000_000)
    roomy, tight = Weighed(), Weighed(heavy)
    assert plan(1e12, roomy).layout.sequence_tiles == 1
    assert plan(4 * heavy.num_parameters, tight).layout.tiers_on_disk
    assert roomy.asked == []
    assert tight.asked == []


def test_as_few_as_help_before_anything_is_given_up() -> None:
    weighed = Weighed()
    made = plan(0.7 * least(), weighed)
    number, layout = made.layout.sequence_tiles, made.layout
    assert number > 1
    assert layout.moments == "fp32"
    assert not layout.tiers_on_disk
    assert made.choice.peak_bytes <= made.budget.usable
    assert f"MLPs over the sequence in {number} tiles" in describe(layout)
    assert made.model.blocks == profile(number).blocks
    exact = {key: getattr(layout, key) for key in ("moments", "optimizer_tier", "gradient_tier", "parameter_tier")}
    with pytest.raises(UserError, match=r"memory\.sequence_tiles=auto"):
        plan(0.7 * least(), memory=exact | {"sequence_tiles": number // 2})
    with pytest.raises(UserError, match=r"memory\.sequence_tiles=auto"):
        plan(0.7 * least(), memory={"sequence_tiles": 1})
    again = make_plan(config(), weighed.scales(machine(0.7 * least())), threads_per_worker=2, before=layout)
    assert again.layout.sequence_tiles == number


def test_why_names_the_rung() -> None:
    asked = config(memory={"micro_batch": 1, "recompute": "full", "gradient_tier": "device", "moments": "fp32"})
    for budget in (0.7 * least(), 1e12):
        there = Weighed().scales(machine(budget))
        made = make_plan(asked, there, threads_per_worker=2)
        (row,) = (row for row in explain(asked, there, made.choice) if row.chosen)
        assert row.fits
        number = made.layout.sequence_tiles
        assert (number == 1) is (budget == 1e12)
        whole = "exact, all state on the device"
        assert row.rung == (whole if number == 1 else f"MLPs over rows in {number} tiles")


def test_what_is_computed_again_is_counted() -> None:
    made = plan(1e12, memory={"sequence_tiles": 4, "recompute": "none"})
    whole = plan(1e12, memory={"sequence_tiles": 1, "recompute": "none"})
    work = work_of(made.layout, DATA)
    assert product_flops(made.layout, made.model, work) > product_flops(whole.layout, whole.model, work)


def test_no_tile_has_less_than_a_token() -> None:
    with pytest.raises(UserError, match=r"sequence_tiles: 1001 tiles of packs of 1000 tokens"):
        plan(1e12, memory={"sequence_tiles": 1001})
    assert plan(1e12, memory={"sequence_tiles": 1000}).layout.sequence_tiles == 1000


def test_a_model_of_experts_is_never_divided_so() -> None:
    experts = Weighed(replace(profile(1), tokenwise_blocks=0))
    with pytest.raises(UserError, match="the least that the config allows"):
        plan(0.7 * least(), experts)
    assert experts.asked == []
    with pytest.raises(UserError, match="no block of model type llama has an MLP that takes hidden states"):
        plan(1e12, experts, memory={"sequence_tiles": 8})
