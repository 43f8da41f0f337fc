"""Learning rates against transformers' own schedules."""

import pytest
import torch
from transformers import get_scheduler

from tonnage.optim.schedule import Schedule


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
