"""``adapter: auto``: the first way to train that fits on the same terms, why, and what is said where none does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from planning.profiles import DATA, MODEL, config, machine
from tonnage.config import Config
from tonnage.config.schema import ADAPTER_LR, DEFAULT_LR
from tonnage.errors import Problem, UserError
from tonnage.planning import scales
from tonnage.planning.machine import parse_hardware
from tonnage.planning.plan import SAFETY, Plan
from tonnage.planning.planner import make_plan
from tonnage.planning.profile import BlockCost, Frozen, Line, ModelProfile
from tonnage.planning.scales import Scales
from tonnage.planning.ways import FULL, LORA, LORA_NF4, WAYS, Planned, Way, choose, compare, without_sacrifices


def cheaper(cost: BlockCost) -> BlockCost:
    """A block whose backward pass computes no gradients of weights."""
    return replace(cost, backward_flops=Line(0, cost.backward_flops.per_token - 300_000))


def adapted(frozen_bytes: int, block_bytes: int) -> ModelProfile:
    """The model with additions of 50,000 parameters, and frozen weights that rest in so many bytes."""
    frozen = Frozen(1_000_000, 200_000, 200_000, frozen_bytes, 400_000, block_bytes, head=True, embedding=True)
    blocks = {kind: cheaper(cost) for kind, cost in MODEL.blocks.items()}
    return replace(MODEL, num_parameters=1_050_000, block_parameters=212_500, blocks=blocks, frozen=frozen)


MODELS = {
    "none": MODEL,
    "lora": adapted(2_000_000, 400_000),
    "nf4": adapted(400_000 + 450_000, 112_500),
}


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter weighs nothing here: it would outweigh the model."""
    monkeypatch.setitem(scales.RUNTIME_BYTES, "cpu", 0.0)


def weighed(config: Config) -> ModelProfile:
    if isinstance(config.adapter, str):
        return MODELS[config.adapter]
    return MODELS["lora" if config.adapter.quantize == "none" else "nf4"]


def on(memory_bytes: float) -> Planned:
    def planned(config: Config, force: bool) -> list[Plan]:
        hardware = machine(memory_bytes)
        return [make_plan(config, Scales(weighed(config), DATA, hardware), threads_per_worker=2, force=force)]

    return planned


def least(way: Way, **memory: Any) -> float:
    """Memory with which a way just fits on the terms of ``adapter: auto``."""
    asked = without_sacrifices(way.taken(config(adapter="auto", memory=memory)), "cpu")
    return on(1)(asked, True)[0].choice.peak_bytes / SAFETY + 1


def refused(asked: Config, memory_bytes: float) -> Problem:
    with pytest.raises(UserError) as told:
        choose(asked, on(memory_bytes), "cpu")
    return told.value.problems[0]


def test_each_way_takes_less_than_the_one_before() -> None:
    assert least(FULL) > 1.05 * least(LORA) > 1.1 * least(LORA_NF4)


@pytest.mark.parametrize("way", WAYS)
def test_the_first_way_that_fits_is_taken_and_written_down(way: Way) -> None:
    found, why = choose(config(adapter="auto"), on(least(way)), "cpu")
    assert found.adapter == (way.adapter or "none")
    assert found.optimizer.lr == (DEFAULT_LR if way is FULL else ADAPTER_LR)
    assert why.startswith(f"auto: {way.name}, ")
    assert ("optimizer.lr is 0.0002, 10 times" in why) == (way is not FULL)
    for other in WAYS:
        (told,) = (part for part in why.split("; ") if part.startswith("a step would take"))
        assert (other.name in re.split(r", if it had room,?| and |\d times as long with ", told)) == (other is not way)
        assert (f"{other.name} (" in why.split(";")[0]) == (WAYS.index(other) < WAYS.index(way))
    (plan,) = on(least(way))(found, False)
    assert (plan.layout.moments, plan.layout.tiers_on_disk) == ("fp32", [])
    less, _ = choose(config(adapter="auto"), on(least(way) - 2), "cpu") if way is not LORA_NF4 else (None, "")
    assert less is None or less.adapter != found.adapter, "with a byte less than it needs, it is another way"


def test_the_factor_in_time_is_that_of_the_plans() -> None:
    plenty = on(1e12)
    _, why = choose(config(adapter="auto"), plenty, "cpu")
    full, lora = (plenty(way.taken(config(adapter="auto")), False)[0].choice.seconds.total for way in (FULL, LORA))
    assert f"{lora / full:.2f} times as long with LoRA and" in why
    assert lora / full < 0.9
    _, why = choose(config(adapter="auto"), on(least(LORA)), "cpu")
    assert "times as long with full weights, if it had room, and" in why


def test_full_weights_that_fit_with_8_bit_moments_alone_are_not_taken() -> None:
    memory_bytes = (least(FULL, moments="int8") + least(LORA)) / 2
    assert least(LORA) < least(FULL, moments="int8") < least(FULL)
    there = least(FULL) - 2
    assert on(there)(FULL.taken(config(adapter="auto")), False)[0].fits, "somehow"
    assert choose(config(adapter="auto"), on(there), "cpu")[0].adapter == LORA.adapter
    asked = config(adapter="auto", memory={"moments": "int8"})
    assert choose(asked, on(there), "cpu")[0].adapter == "none", "whoever asks for them has them"
    assert choose(asked, on(memory_bytes), "cpu")[0].adapter != "none"


def test_full_weights_that_would_rest_on_disk_beside_a_gpu_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    large: dict[str, Any] = {"num_parameters": 10**9, "outside_parameters": 10**8, "block_parameters": 225 * 10**6}
    frozen = Frozen(10**9, 10**8, 225 * 10**6, 2 * 10**9, 2 * 10**8, 45 * 10**7, head=True, embedding=True)
    beside: dict[str, Any] = {"num_parameters": 1_001_000_000, "block_parameters": 225_250_000, "frozen": frozen}
    monkeypatch.setitem(MODELS, "none", replace(MODEL, **large))
    monkeypatch.setitem(MODELS, "lora", replace(MODEL, **large | beside))

    def on_gpu(host_bytes: float) -> Planned:
        gpu = replace(parse_hardware("A100-80GB"), device_bytes=6 * 10**9, host_bytes=round(host_bytes))

        def planned(asked: Config, force: bool) -> list[Plan]:
            return [make_plan(asked, Scales(weighed(asked), DATA, gpu), threads_per_worker=2, force=force)]

        return planned

    asked = config(adapter="auto", precision="bf16", checkpoint={"every": 0})
    assert choose(asked, on_gpu(40e9), "cuda")[0].adapter == "none"
    (on_disk,) = on_gpu(4e9)(asked.model_copy(update={"adapter": "none"}), False)
    assert on_disk.layout.tiers_on_disk
    tight, why = choose(asked, on_gpu(4e9), "cuda")
    assert tight.adapter != "none"
    assert "no room for full weights" in why


def test_no_layout_at_all_is_a_way_that_does_not_fit() -> None:
    asked = config(adapter="auto", memory={"parameter_tier": "host"})
    assert choose(asked, on(1e9), "cpu")[0].adapter != "none"


def test_a_learning_rate_that_was_given_is_kept() -> None:
    asked = config(adapter="auto", optimizer={"lr": DEFAULT_LR})
    found, why = choose(asked, on(least(LORA)), "cpu")
    assert found.optimizer.lr == DEFAULT_LR
    assert "optimizer.lr" not in why


def with_words(asked: Config, words: Sequence[str]) -> Config:
    memory = asked.memory.model_dump() | {
        key.removeprefix("memory."): value for key, _, value in (word.partition("=") for word in words)
    }
    return Config.model_validate(asked.model_dump(by_alias=True, exclude={"memory"}) | {"memory": memory})


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({}, "memory.moments=int8"),
        ({"recompute": "none"}, "memory.recompute=auto"),
        ({"recompute": "none", "micro_batch": 8}, "memory.micro_batch=auto memory.recompute=auto"),
    ],
)
def test_where_nothing_fits_the_smallest_change_is_told_and_works(said: dict[str, Any], told: str) -> None:
    there = least(LORA_NF4) if said else (least(LORA_NF4) + least(LORA_NF4, moments="int8")) / 2
    asked = config(adapter="auto", memory=said)
    problem = refused(asked, there)
    assert problem.change == told
    assert [f"{way.name} (" in problem.found for way in WAYS] == [True] * 3
    assert problem.found.endswith("the least that the config allows with fp32 moments and nothing on disk")
    found, _ = choose(with_words(asked, problem.change.split()), on(there), "cpu")
    assert found.adapter != "auto"


def test_where_nothing_would_help_that_is_said_and_force_takes_the_smallest() -> None:
    problem = refused(config(adapter="auto"), 1e5)
    assert problem.change.startswith("a smaller data.max_length")
    found, _ = choose(config(adapter="auto"), on(1e5), "cpu", force=True)
    assert found.adapter == LORA_NF4.adapter


def test_a_way_that_cannot_be_had_is_left_out() -> None:
    def planned(config: Config, force: bool) -> Sequence[Plan]:
        if config.adapter != "none":
            raise UserError(Problem("matrices that cannot be adapted", "others"))
        return on(memory_bytes)(config, force)

    memory_bytes = least(FULL)
    found, why = choose(config(adapter="auto"), planned, "cpu")
    assert found.adapter == "none"
    assert "LoRA" not in why
    lora = compare(config(), planned)[1]
    assert (lora.plan, lora.fits, lora.why_not) == (None, False, "matrices that cannot be adapted")
    memory_bytes = 1e5
    with pytest.raises(UserError, match=r"(?s)no room for full weights \(.*matrices that cannot be adapted"):
        choose(config(adapter="auto"), planned, "cpu")


def test_all_sizes_of_an_elastic_run_must_fit() -> None:
    def planned(config: Config, force: bool) -> list[Plan]:
        return [*on(1e12)(config, force), *on(least(LORA))(config, force)]

    assert choose(config(adapter="auto"), planned, "cpu")[0].adapter == LORA.adapter


def test_ways_are_held_beside_each_other_whether_they_fit_or_not() -> None:
    found = compare(config(), on(least(FULL) - 2))
    assert [one.way for one in found] == list(WAYS)
    assert all(one.fits for one in found)
    assert found[0].plan is not None
    assert found[0].plan.layout.moments == "int8" or found[0].plan.layout.tiers_on_disk, "as a plan of it has it"
    found = compare(config(memory={"moments": "fp32", "optimizer_tier": "device"}), on(1e5))
    assert not any(one.fits for one in found)
    peaks = [one.plan.choice.peak_bytes for one in found if one.plan is not None]
    assert peaks == sorted(peaks, reverse=True)
    assert len(peaks) == 3
