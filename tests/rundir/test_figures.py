"""Intervals against published values and those of rows drawn again and again."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tonnage.rundir.figures import Evaluated, Figure, RatioSums, Told, mean_of, wilson


@pytest.mark.parametrize(
    ("successes", "rows", "low", "high"),
    [(0, 5, 0.0, 0.4345), (3, 10, 0.1078, 0.6032), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)  # the last from R. G. Newcombe, Statistics in Medicine 17 (1998), table I
def test_shares_have_wilsons_interval(successes: int, rows: int, low: float, high: float) -> None:
    found = wilson(successes, rows)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
    assert mean_of([1.0] * successes + [0.0] * (rows - successes)) == found


def test_a_ratio_varies_as_rows_drawn_again_make_it_vary() -> None:
    draws = np.random.default_rng(0)
    y = draws.integers(1, 40, 400).astype(float)
    x = y * draws.normal(2.0, 0.5, 400)
    sums = RatioSums(400, x.sum(), y.sum(), (x * x).sum(), (x * y).sum(), (y * y).sum())
    chosen = draws.integers(0, 400, (4000, 400))
    again = x[chosen].sum(1) / y[chosen].sum(1)
    found = sums.figure
    assert found.value == pytest.approx(x.sum() / y.sum())
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(again, [0.025, 0.975])), abs=4e-3)
    assert math.isnan(RatioSums().figure.value)


def test_an_evaluation_comes_back_from_json() -> None:
    told = Told(3, 40, Figure(1.5, 1.0, 2.0), Figure(0.5, math.nan, math.nan))
    found = Evaluated(told, {"a": told, "b": told}, told, {"number": wilson(1, 3)}, 3)
    again = Evaluated.of_json(found.to_json())
    assert again.to_json() == found.to_json()
    assert again.figures(found)["forgets"].value == 0
    assert "forgets" not in again.figures()
