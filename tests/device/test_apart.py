"""The device ``apart`` itself, and what it finds: waits of streams that are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forked import work


def test_operations_are_those_of_the_cpu_and_do_not_mix_with_it() -> None:
    assert json.loads(work("device.apart_itself", (1, []))) == {
        "same": True,
        "mixed": ["own", "cat"],
        "raced": ["write", "read", "free"],
        "waited": 8.0,
        "left": 0,
    }


def test_frozen_blocks_come_and_go_with_no_wait_too_few() -> None:
    """The same bits, however late copies are made; with a wait less, a race is found."""
    found = json.loads(work("device.apart_blocks", (1, [])))
    for recomputed in (0, 1, 4):
        assert found[f"{recomputed} False"] is found[f"{recomputed} True"] is True
        assert "copy of stream" in found[f"{recomputed} WithoutFollowing"]
        assert "does not wait for copy" in found[f"{recomputed} WithoutJoining"]


@pytest.mark.slow
def test_shards_of_two_workers_come_and_go_with_no_wait_too_few(tmp_path: Path) -> None:
    """The bits of weights that are on the device, wherever they rest, and however late copies are made."""
    found = json.loads(work("device.apart_shards", (2, [str(tmp_path)])))
    assert "copy of stream" in found.pop("WithoutFollowing")
    assert "does not wait for copy" in found.pop("WithoutJoining")
    assert "of the host does not wait for copy of stream" in found.pop("sent"), (
        "a buffer that another block is still in"
    )
    assert "copy of stream" in found.pop("gradients WithoutFollowing")
    assert "of the host does not wait for copy of stream" in found.pop("gradients Unfinished")
    assert len(found) == 4
    assert set(found.values()) == {True}


def test_tiles_come_from_the_host_and_from_disk_with_no_wait_too_few(tmp_path: Path) -> None:
    """The same bits from both, however late copies are made, and the numbers of whole weights."""
    found = json.loads(work("device.apart_tiles", (1, [str(tmp_path)])))
    assert "copy of stream" in found.pop("WithoutFollowing")
    assert "does not wait for copy" in found.pop("WithoutJoining")
    assert "of the host does not wait for copy of stream" in found.pop("left")
    assert found == {"same bits False": True, "same bits True": True}
