"""The plan's arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.config import Config
from tonnage.errors import UserError
from tonnage.plan.plan import DataProfile, ModelProfile, Plan
from tonnage.plan.planner import make_plan

MODEL = ModelProfile("llama", 1_000_000, 0, 4, 64, 1000)
DATA = DataProfile("/train", None, num_packs=100, num_tokens=100 * 900, supervised_tokens=30 * 900, max_length=1000)


def config(**changes: Any) -> Config:
    fields: dict[str, Any] = {
        "model": "m",
        "data": {"train": "rows.jsonl", "max_length": 1000},
        "batch": {"tokens": 8500},
    }
    return Config.model_validate(fields | changes)


def plan(**changes: Any) -> Plan:
    return make_plan(config(**changes), MODEL, DATA, threads_per_worker=2)


def test_steps_and_packs() -> None:
    made = plan(epochs=2.0)
    assert (made.packs_per_step, made.num_packs, made.num_steps) == (8, 200, 25)
    assert made.tokens_per_step == 7200
    assert (made.micro_batch, made.micro_batches_per_step) == (4, 2)
    made = plan(epochs=0.505)
    assert (made.num_packs, made.num_steps) == (50, 7)
    made = plan(steps=3, launch={"workers": 3})
    assert (made.num_packs, made.num_steps, made.micro_batches_per_step) == (24, 3, 1)


def test_a_step_is_never_larger_than_the_run() -> None:
    made = plan(epochs=0.03, batch={"sequences": 64})
    assert (made.packs_per_step, made.num_packs, made.num_steps) == (3, 3, 1)


def test_warm_up_is_a_fraction_or_a_number() -> None:
    assert plan(epochs=2.0, optimizer={"warmup": 0.1}).warmup_steps == 2
    assert plan(epochs=2.0, optimizer={"warmup": 5.0}).warmup_steps == 5


@pytest.mark.parametrize(
    ("precision", "workers", "micro_batch", "expected"),
    [("bf16", 1, 8, (2, 2, 10)), ("bf16", 1, 1, (2, 4, 10)), ("bf16", 2, 1, (2, 2, 4)), ("fp32", 1, 1, (4, 4, 8))],
)
def test_bytes_a_parameter(precision: str, workers: int, micro_batch: int, expected: tuple[int, int, int]) -> None:
    made = plan(precision=precision, launch={"workers": workers}, memory={"micro_batch": micro_batch})
    states = (made.weight_bytes_per_worker, made.gradient_bytes_per_worker, made.optimizer_bytes_per_worker)
    assert states == tuple(n * 1_000_000 for n in expected)


@pytest.mark.parametrize(
    ("moments", "workers", "expected"), [("bf16", 1, 6), ("int8", 1, 4.03125), ("int8", 2, 1.015625)]
)
def test_optimizer_bytes_by_moments(moments: str, workers: int, expected: float) -> None:
    made = plan(launch={"workers": workers}, memory={"moments": moments})
    assert made.optimizer_bytes_per_worker == expected * 1_000_000


def test_more_workers_than_packs_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError) as caught:
        make_plan(config(launch={"workers": 101}, batch={"sequences": 200}), MODEL, DATA, threads_per_worker=1)
    assert "101 workers" in str(caught.value)
    assert "100 packs" in str(caught.value)


def test_a_plan_survives_its_file(tmp_path: Any) -> None:
    made = plan(epochs=2.0)
    made.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == made
