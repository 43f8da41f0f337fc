"""The search for the largest value that fits, held to trying all of them."""

from __future__ import annotations

import pytest

from tonnage.planning.largest import last_that_fits


def search(number: int, fitting: set[int], **how: object) -> tuple[int, list[int]]:
    """What was found, and what was asked."""
    asked: list[int] = []

    def fits(index: int) -> bool:
        assert 1 <= index <= number
        asked.append(index)
        return index in fitting

    return last_that_fits(number, fits, **how), asked  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [1, 2, 3, 7, 8, 20])
def test_it_is_the_last_one_whatever_the_guess(number: int) -> None:
    for last in range(number + 1):
        for guess in (None, *range(1, number + 1)):
            found, asked = search(number, set(range(1, last + 1)), guess=guess)
            assert found == last
            assert len(asked) <= 2 + number.bit_length() * (1 if guess is None else 2)
            if guess == last:
                assert set(asked) <= {last, last + 1}


def test_few_of_many_are_asked() -> None:
    found, asked = search(100_000, set(range(1, 77_778)))
    assert found == 77_777
    assert len(asked) <= 17


def test_stretches_after_a_fall_are_looked_at_by_themselves() -> None:
    fitting = {*range(1, 6), *range(12, 16)}  # less is needed again from 12 on
    assert search(20, fitting, falls=(12, 20))[0] == 15
    assert search(20, fitting | {20}, falls=(12, 20))[0] == 20
    assert search(20, set(range(1, 6)), falls=(12, 20))[0] == 5
    assert search(20, set(), falls=(12, 20))[0] == 0
