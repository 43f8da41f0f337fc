"""Learning rates against transformers' own schedules."""

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from tonnage.config.schema import Optimizer
from tonnage.optim.schedule import Schedule
from tonnage.planning.batch import steps_of


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
def test_after_warm_up_equals_transformers(shape: str) -> None:
    name = "constant_with_warmup" if shape == "constant" else shape
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=7, num_training_steps=50)
    ours = Schedule(0.5, 50, 7, shape)  # type: ignore[arg-type]
    for step in range(1, 51):
        if step > 7:
            assert ours.lr(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-6)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_every_rate_equals_transformers_where_warm_up_is_from_zero(warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = get_scheduler("cosine", optimizer, num_warmup_steps=warmup, num_training_steps=50)
    ours = Schedule(0.5, 50, warmup, "cosine", from_zero=True)
    for step in range(1, 51):
        assert ours.lr(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-6), step
        optimizer.step()
        theirs.step()


def test_warm_up_rises_evenly_from_above_zero_to_the_peak() -> None:
    schedule = Schedule(1.0, 20, 4, "constant")
    assert [schedule.lr(step) for step in range(1, 7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_final_fraction_and_no_warm_up() -> None:
    schedule = Schedule(1.0, 10, 0, "linear", final=0.1)
    assert schedule.lr(1) == 1.0
    assert schedule.lr(10) == pytest.approx(0.1 + 0.9 * 0.1)
    assert schedule.lr(11) == pytest.approx(0.1)


@pytest.mark.parametrize("warmup", [1, 7, 40])
def test_a_quadratic_warm_up_is_the_square_of_the_linear_one(warmup: int) -> None:
    for from_zero in (False, True):
        even = Schedule(1.0, 50, warmup, "cosine", from_zero=from_zero)
        square = Schedule(1.0, 50, warmup, "cosine", from_zero=from_zero, rise="quadratic")
        for step in range(1, 51):
            assert square.lr(step) == pytest.approx(even.lr(step) ** 2 if step <= warmup else even.lr(step), rel=1e-12)
    assert Schedule(0.5, 50, 4, "cosine", from_zero=True, rise="quadratic").lr(3) == 0.5 * (2 / 4) ** 2


PEAK, NUM_STEPS = 0.5, 50


def transformers_rates(name: str, warmup: int, options: dict[str, Any]) -> list[float]:
    """Learning rates of all steps, by transformers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, warmup, NUM_STEPS, scheduler_specific_kwargs=options)
    rates = []
    for _ in range(NUM_STEPS):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates


SHAPES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"schedule": "constant"}, "constant_with_warmup", {}),
    ({"schedule": "linear"}, "linear", {}),
    ({"schedule": "cosine"}, "cosine", {}),
    ({"schedule": "cosine", "final": 0.2}, "cosine_with_min_lr", {"min_lr_rate": 0.2}),
    ({"schedule": "polynomial", "final": 1e-7 / PEAK}, "polynomial", {}),
    ({"schedule": "polynomial", "final": 0.1, "power": 2.5}, "polynomial", {"lr_end": 0.05, "power": 2.5}),
    ({"schedule": "cosine_with_restarts"}, "cosine_with_restarts", {}),
    ({"schedule": "cosine_with_restarts", "cycles": 4}, "cosine_with_restarts", {"num_cycles": 4}),
    ({"schedule": "inverse_sqrt"}, "inverse_sqrt", {}),
    ({"schedule": "inverse_sqrt", "timescale": 12}, "inverse_sqrt", {"timescale": 12}),
    ({"schedule": "wsd"}, "warmup_stable_decay", {"num_decay_steps": 5}),
    ({"schedule": "wsd", "decay": 20, "final": 0.1}, "wsd", {"num_decay_steps": 20, "min_lr_ratio": 0.1}),
    ({"schedule": "wsd", "decay": 7, "decay_shape": "linear"}, "wsd", {"num_decay_steps": 7, "decay_type": "linear"}),
    (
        {"schedule": "wsd", "decay": 9, "decay_shape": "1-sqrt", "final": 0.3},
        "wsd",
        {"num_decay_steps": 9, "decay_type": "1-sqrt", "min_lr_ratio": 0.3},
    ),
]


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(("keys", "name", "options"), SHAPES)
def test_the_rate_of_every_step_equals_transformers(
    keys: dict[str, Any], name: str, options: dict[str, Any], warmup: int
) -> None:
    settings = Optimizer(lr=PEAK, warmup=warmup, warmup_from="zero", **keys)
    ours = Schedule.of(settings.model_dump(), NUM_STEPS, warmup, steps_of(settings.decay, NUM_STEPS))
    theirs = transformers_rates("warmup_stable_decay" if name == "wsd" else name, warmup, options)
    assert [ours.lr(step) for step in range(1, NUM_STEPS + 1)] == pytest.approx(theirs, rel=0, abs=1e-9)


def test_a_decay_that_warm_up_leaves_no_time_for_is_shortened() -> None:
    schedule = Schedule(1.0, 10, 6, "wsd", decay_steps=8, decay_shape="linear")
    assert [schedule.lr(step) for step in range(7, 12)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_a_run_that_is_older_than_a_key_has_the_schedule_it_had() -> None:
    settings = {"lr": 0.5, "schedule": "cosine", "final": 0.1}
    assert Schedule.of(settings, 20, 3, 0) == Schedule(0.5, 20, 3, "cosine", 0.1)
