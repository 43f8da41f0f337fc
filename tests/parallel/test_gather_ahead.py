"""Blocks that are gathered ahead of the one that runs: when, and with the same bits."""

from __future__ import annotations

import json

import pytest

from forked import work

WORKERS = 2


def gathered(*names: object) -> list[str]:
    return [f"gather {name}" for name in names]


@pytest.mark.matrix
def test_two_blocks_are_gathered_while_one_runs() -> None:
    """Of six blocks the second has a router in fp32, which is a unit of its own."""
    found = json.loads(work("parallel.gather_ahead", (WORKERS, [])))
    assert all(one["same"] for one in found.values())
    assert found["ZeRO 3"]["order"] == [
        *gathered("rest", 0, 1, "1 in fp32", 2),
        "forward 0",
        *gathered(3),
        "forward 1",
        *gathered(4),
        "forward 2",
        *gathered(5),
        "forward 3",
        "forward 4",
        "forward 5",
        *gathered(5, 4, 3),
        "backward 5",
        *gathered(2),
        "backward 4",
        *gathered(1, "1 in fp32"),
        "backward 3",
        *gathered(0),
        "backward 2",
        "backward 1",
        "backward 0",
    ]
    assert found["ZeRO 3"]["default"][:4] == [*gathered("rest", 0), "forward 0", *gathered(1)]
    below = found["ZeRO 2"]["order"]  # all stay from the first micro-batch on
    assert not [one for one in below if one.startswith("gather")]
    some = found["ZeRO 3, some learn"]["order"]  # the fifth: before it FSDP2 gathers one in vain, as ever
    assert some[some.index("forward 5") + 1 :] == [*gathered(5, 4), "backward 5", *gathered(3), "backward 4"]
