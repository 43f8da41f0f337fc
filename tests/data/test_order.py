"""The order of packs: a permutation in every epoch, from anywhere, for any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from tonnage.data.packs.order import balanced, pack_at, permute


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1000, 4097])
def test_every_epoch_is_a_permutation(size: int) -> None:
    for epoch in range(3):
        seen = [pack_at(epoch * size + at, size, seed=7) for at in range(size)]
        assert sorted(seen) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    def order(epoch: int, seed: int) -> list[int]:
        return [pack_at(epoch * 100 + at, 100, seed) for at in range(100)]

    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != list(range(100))


def test_is_spread_evenly() -> None:
    """First packs of many seeds fall everywhere: chi-squared over ten bins of 1,000 (99.9% quantile: 27.9)."""
    bins = [0] * 10
    for seed in range(1000):
        bins[pack_at(0, 1000, seed) // 100] += 1
    assert sum((found - 100) ** 2 / 100 for found in bins) < 27.9


def test_same_200_packs_for_any_number_of_ranks_and_any_cursor() -> None:
    num_packs, seed = 150, 3
    whole = [pack_at(at, num_packs, seed) for at in range(337 + 200)]
    for cursor in (0, 137):
        for ranks in (1, 2, 3, 4):
            shared: dict[int, int] = {}
            for rank in range(ranks):
                for at in range(cursor + rank, cursor + 200, ranks):
                    shared[at] = pack_at(at, num_packs, seed)
            assert [shared[at] for at in sorted(shared)] == whole[cursor : cursor + 200]


def test_is_fixed_forever() -> None:
    """A checkpoint's cursor must mean the same pack in every version."""
    assert [pack_at(at, 10, 0) for at in range(10)] == [3, 4, 9, 7, 5, 6, 8, 1, 0, 2]


def test_far_positions_cost_nothing() -> None:
    size = 10**15 + 37
    assert 0 <= pack_at(10**30, size, 1) < size


def test_refuses_what_is_outside() -> None:
    with pytest.raises(IndexError):
        pack_at(-1, 10, 0)
    with pytest.raises(ValueError):
        pack_at(0, 0, 0)
    with pytest.raises(IndexError):
        permute(10, 10, 0)


@pytest.mark.parametrize(
    ("packs", "workers", "most"), [(8, 2, 1.02), (64, 8, 1.01), (13, 4, 1.12), (5, 5, 2.0), (3, 4, 2.0)]
)
def test_workers_have_equally_many_packs_of_a_step_and_equally_much_to_compute(
    packs: int, workers: int, most: float
) -> None:
    costs = np.random.default_rng(0).uniform(0.4, 1.0, (300, packs))
    order = balanced(costs, workers)
    assert (np.sort(order, axis=1) == np.arange(packs)).all()
    turns = packs // workers * workers
    loads = np.take_along_axis(costs, order, axis=1)[:, :turns].reshape(300, -1, workers).sum(axis=1)
    if turns > workers:
        assert float(np.mean(loads.max(axis=1) / loads.mean(axis=1))) < most
        in_turn = costs[:, :turns].reshape(300, -1, workers).sum(axis=1)
        assert float(np.mean(in_turn.max(axis=1) / in_turn.mean(axis=1))) > most
    else:
        assert (order == np.arange(packs)).all()


def test_what_is_dear_shares_a_micro_batch_with_what_is_cheap() -> None:
    costs = np.arange(12.0)[None]
    (order,) = np.take_along_axis(costs, balanced(costs, 2), axis=1)
    of_worker = order[::2]
    pairs = of_worker.reshape(-1, 2).sum(axis=1)
    assert pairs.max() - pairs.min() <= 2
