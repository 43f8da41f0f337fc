"""Ranks that divide a row exchange heads, and compute what one computes of the whole row."""

from __future__ import annotations

import pytest

from forked import work
from tonnage.model.context import Context, copies_of_heads


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_is_that_of_the_whole_row(ranks: int) -> None:
    """Of grouped heads, of fewer than there are ranks, with windows, sinks, caps and values of another size."""
    work("model.context_ranks", (ranks, []))


def test_who_has_which_tokens_and_heads() -> None:
    assert [Context("", 3, rank).slice_of(12) for rank in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    with pytest.raises(AssertionError, match="filled up to a multiple"):
        Context("", 3, 0).slice_of(13)
    assert [copies_of_heads(*at) for at in ((4, 2), (2, 4), (1, 4), (6, 4))] == [1, 2, 4, 2]
