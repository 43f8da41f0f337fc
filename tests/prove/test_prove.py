"""A slice of the proof, in processes of its own, as the command carries it out on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entry import tonnage
from tonnage.prove.pieces import PIECES

SLICE = ("head", "update", "tiers", "memory")


@pytest.mark.matrix
def test_a_slice_on_this_machine(tmp_path: Path) -> None:
    words = [word for name in SLICE for word in ("--only", name)]
    ended = tonnage("doctor", "--prove", "--quick", "--directory", str(tmp_path), *words)
    record: dict[str, Any] = json.loads((tmp_path / "tonnage-prove" / "prove.json").read_text())
    assert not ended.status, (ended.out, record["failed"])
    pieces = {piece["name"]: piece for piece in record["pieces"]}
    assert tuple(pieces) == SLICE
    assert (record["version"], record["machine"]["gpus"], record["failed"]) == (1, [], [])
    assert (pieces["memory"]["status"], pieces["memory"]["why"]) == ("skipped", "needs a GPU")
    assert {pieces[name]["status"] for name in SLICE[:3]} == {"passed"}
    assert all(one["tolerance"] for name in SLICE[:3] for one in pieces[name]["findings"])
    assert "needs a GPU" in (tmp_path / "tonnage-prove" / "prove.html").read_text()

    before = pieces["head"]["seconds"]
    ended = tonnage("doctor", "--prove", "--quick", "--directory", str(tmp_path), "--only", "memory", "--json")
    again = {piece["name"]: piece for piece in json.loads(ended.out)["pieces"]}
    assert again["head"]["seconds"] == before  # what is there stays


@pytest.mark.matrix
def test_all_of_it_on_this_machine(tmp_path: Path) -> None:
    """A slice of every piece, two processes for two devices."""
    ended = tonnage("doctor", "--prove", "--quick", "--gpus", "2", "--directory", str(tmp_path))
    record: dict[str, Any] = json.loads((tmp_path / "tonnage-prove" / "prove.json").read_text())
    assert not ended.status, (ended.out, record["failed"])
    assert [piece["name"] for piece in record["pieces"]] == [piece.name for piece in PIECES]
    for piece, found in zip(PIECES, record["pieces"], strict=True):
        assert (found["why"] == "needs a GPU") == piece.gpu, found
        assert piece.gpu or found["findings"], found
