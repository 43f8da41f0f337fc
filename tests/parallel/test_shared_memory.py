"""Ranks of one machine exchange through memory what gloo would send."""

from __future__ import annotations

import json
import os

import pytest

from forked import work

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is shared on Linux alone")


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_collectives_are_those_of_gloo_and_the_same_bits_on_every_rank(workers: int) -> None:
    work("parallel.share_memory", (workers, ["sums"]))


def test_the_end_of_a_rank_is_an_error_to_the_others() -> None:
    assert "Connection closed by peer" in json.loads(work("parallel.share_memory", (2, ["end"])))


def test_ranks_of_several_machines_share_nothing() -> None:
    work("parallel.share_memory", (2, ["apart"]))
