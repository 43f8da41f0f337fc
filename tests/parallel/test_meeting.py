"""Ranks that are given no address find each other through a file, and nobody else."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tonnage.errors import UserError
from tonnage.parallel.meeting import addresses, meet
from tonnage.parallel.place import Place

FIRST, SECOND = Place(0, 2, 0), Place(1, 2, 1)


def test_two_ranks_meet_and_the_file_goes(tmp_path: Path) -> None:
    with meet(FIRST, tmp_path, 10) as first, meet(SECOND, tmp_path, 10) as second:
        first.set("a", "b")
        assert second.get("a") == b"b"
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_launch_that_crashed_leads_nowhere(tmp_path: Path) -> None:
    with meet(FIRST, tmp_path, 10):
        (file,) = tmp_path.iterdir()
        left = file.read_text()
    file.write_text(left)  # its port is closed
    with pytest.raises(UserError, match="worker 1 did not find worker 0"), meet(SECOND, tmp_path, 0.4):
        pytest.fail("met nobody")

    found: list[bytes] = []

    def come_early() -> None:
        with meet(SECOND, tmp_path, 10) as second:
            found.append(second.get("a"))

    thread = threading.Thread(target=come_early)
    thread.start()
    time.sleep(0.2)
    with meet(FIRST, tmp_path, 10) as first:
        first.set("a", "b")
        thread.join()
    assert found == [b"b"]


def test_another_store_on_the_same_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    with meet(FIRST, tmp_path, 10):
        (file,) = tmp_path.iterdir()
        told = json.loads(file.read_text())
        file.write_text(json.dumps(told | {"word": "of an earlier launch"}))
        with pytest.raises(UserError, match="did not find"), meet(SECOND, tmp_path, 0.4):
            pytest.fail("met another launch")


def test_launches_with_names_do_not_meet(tmp_path: Path) -> None:
    other = Place(1, 2, 1, launch="13 0")
    with (
        meet(Place(0, 2, 0, launch="12 0"), tmp_path, 10),
        pytest.raises(UserError, match="did not find"),
        meet(other, tmp_path, 0.4),
    ):
        pytest.fail("met another launch")


def test_a_rank_is_taken_once(tmp_path: Path) -> None:
    with (
        meet(FIRST, tmp_path, 10),
        meet(SECOND, tmp_path, 10),
        pytest.raises(UserError, match="another process is worker 1"),
        meet(SECOND, tmp_path, 10),
    ):
        pytest.fail("two workers 1")


def test_addresses_are_for_other_machines() -> None:
    assert all(not name.startswith("127.") for name in addresses())
