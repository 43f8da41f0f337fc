"""Blocks that are gathered ahead of the one that runs: when, and with the same bits."""

from __future__ import annotations

import json

import pytest

from forked import work

WORKERS = 2


@pytest.mark.slow
def test_two_blocks_are_gathered_while_one_runs() -> None:
    """Of six blocks all but the first have a router in fp32, which is a unit of its own."""
    found = json.loads(work("parallel.gather_ahead", (WORKERS, [])))
    print(json.dumps(found))
    assert all(one["same"] for one in found.values())
