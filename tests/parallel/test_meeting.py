"""Ranks that are given no address find each other through a file, and nobody else; restarts begin anew."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from tonnage.errors import UserError
from tonnage.parallel.meeting import addresses, meet
from tonnage.parallel.place import Place

FIRST, SECOND = Place(0, 2, 0), Place(1, 2, 1)
Work = Callable[[Store], None]


def nothing(store: Store) -> None:
    pass


def together(directory: Path, *places: Place, work: Work = nothing, timeout: float = 10) -> list[str]:
    """Each place meets the others and works, in a thread of its own; what was said to each, empty if all is well."""
    said = [""] * len(places)
    all_done = threading.Barrier(len(places))

    def come(index: int) -> None:
        try:
            with meet(places[index], directory, timeout) as store:
                work(store)
                all_done.wait(10)
        except UserError as error:
            all_done.abort()
            said[index] = str(error)
        except (threading.BrokenBarrierError, RuntimeError):  # another has left, and with worker 0 its store
            pass

    threads = [threading.Thread(target=come, args=(index,)) for index in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def meeting_file(directory: Path) -> Path:
    (file,) = directory.glob("meeting-*")
    return file


def test_ranks_meet_and_the_file_goes(tmp_path: Path) -> None:
    three = [Place(rank, 3, rank) for rank in range(3)]
    counts: list[int] = []
    assert together(tmp_path, *three, work=lambda store: counts.append(store.add("count", 1))) == ["", "", ""]
    assert sorted(counts) == [1, 2, 3]
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_launch_that_crashed_leads_nowhere(tmp_path: Path) -> None:
    left: list[str] = []
    together(tmp_path, FIRST, SECOND, work=lambda store: left.append(meeting_file(tmp_path).read_text()))
    together(tmp_path, FIRST, SECOND, work=lambda store: left.append(meeting_file(tmp_path).name))
    name = left[-1]
    (tmp_path / name).write_text(left[0])  # its port is closed
    (said,) = together(tmp_path, SECOND, timeout=0.4)
    assert said.startswith(f"{tmp_path / name}: worker 1 did not find worker 0")

    (tmp_path / name).write_text(left[0])
    early = threading.Thread(target=lambda: left.extend(together(tmp_path, SECOND)))
    early.start()
    time.sleep(0.2)
    assert together(tmp_path, FIRST) == [""]
    early.join()
    assert left[-1] == ""


def test_another_store_on_the_same_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    other = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    left: list[Path] = []
    together(tmp_path, FIRST, SECOND, work=lambda store: left.append(meeting_file(tmp_path)))
    told = {"host": "elsewhere", "addresses": ["127.0.0.1"], "port": other.port, "word": "a"}
    for word in (None, "b"):
        if word is not None:
            other.set("word", word)
        left[0].write_text(json.dumps(told))
        (said,) = together(tmp_path, SECOND, timeout=0.4)
        assert "did not find worker 0" in said


def test_launches_with_names_do_not_meet(tmp_path: Path) -> None:
    places = Place(0, 2, 0, launch="12 0"), Place(1, 2, 1, launch="13 0")
    first, second = together(tmp_path, *places, timeout=0.5)
    assert "worker 1 did not come within 0.5 s" in first
    assert "did not find worker 0" in second


def test_a_rank_is_taken_once(tmp_path: Path) -> None:
    said = together(tmp_path, FIRST, SECOND, SECOND)
    assert sum("another process is worker 1" in one for one in said) == 1


def test_a_restart_on_the_same_store_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(kept.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    places = [Place(rank, 2, rank, address="127.0.0.1", port=kept.port) for rank in range(2)]
    found: list[int] = []
    for _ in range(2):
        assert together(tmp_path, *places, work=lambda store: found.append(store.add("count", 1))) == ["", ""]
    assert sorted(found) == [1, 1, 2, 2]
    assert "worker 0 did not come" in together(tmp_path, places[1], timeout=0.4)[0]


def test_addresses_are_for_other_machines() -> None:
    assert all(not name.startswith("127.") for name in addresses())
