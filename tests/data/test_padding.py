"""How documents are cut into forwards of padded rows."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.data.packs.padding import FORWARD_TOKENS, forwards, in_chunks


def cost(lengths: np.ndarray, cut: list[np.ndarray]) -> int:
    return sum(int(lengths[one].max()) * len(one) + FORWARD_TOKENS for one in cut)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.integers(400, 1600))
def test_every_document_is_in_one_forward_and_no_cut_costs_less(sizes: list[int], most: int) -> None:
    lengths = np.array(sizes)
    cut = forwards(lengths, most)
    assert sorted(np.concatenate(cut).tolist()) == list(range(len(sizes)))
    assert all(lengths[one].max() * len(one) <= most for one in cut)
    order = np.argsort(-lengths, kind="stable")
    for number in range(len(sizes)):
        for places in combinations(range(1, len(sizes)), number):
            other = [order[a:b] for a, b in zip((0, *places), (*places, len(sizes)), strict=True)]
            if all(lengths[one].max() * len(one) <= most for one in other):
                assert cost(lengths, cut) <= cost(lengths, other)


def test_little_is_padding_where_lengths_are_log_normal() -> None:
    """Median 300, 99th percentile 6,000, 8,192 tokens a step."""
    chance = np.random.default_rng(0)
    sigma = np.log(6000 / 300) / 2.3263
    lengths = np.clip(np.exp(np.log(300) + sigma * chance.standard_normal(2000)), 2, 8192).astype(np.int64)
    computed = real = 0
    for start in range(0, len(lengths), 12):
        step = lengths[start : start + 12]
        for one in forwards(step, 8192):
            computed += int(step[one].max()) * len(one)
            real += int(step[one].sum())
    assert 1 - real / computed < 0.05


@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.sampled_from([16, 64]))
def test_documents_count_as_multiples_of_a_chunk(sizes: list[int], chunk: int) -> None:
    lengths, most = np.array(sizes), 448
    cut = forwards(in_chunks(lengths, chunk), most)
    assert sorted(np.concatenate(cut).tolist()) == list(range(len(sizes)))
    assert all(-(-lengths[one].max() // chunk) * chunk * len(one) <= most for one in cut)


def test_a_document_that_fits_no_forward_is_an_error() -> None:
    with pytest.raises(ValueError, match="a document of 11 tokens, forwards of 10 at most"):
        forwards(np.array([3, 11]), 10)


def test_nothing_is_cut_into_nothing() -> None:
    assert forwards(np.zeros(0, dtype=np.int64), 10) == []
