"""What differs between the machines of a run is said machine by machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.host import nodes
from tonnage.host.nodes import Node, describe_node, disagreements, leave_token, sees_token, versions, wrong_clocks

SAME = {"python": "3.12.1", "torch": "2.13.0", "code": "abc"}


def node(host: str, versions: dict[str, str] | None = None, missing: dict[str, str] | None = None) -> Node:
    return Node(host, versions or SAME, missing or {})


def test_machines_that_agree() -> None:
    assert disagreements([node("a"), node("a"), node("b")], {}) == []
    assert wrong_clocks([node("a"), node("b")]) == ""


def test_every_difference_names_its_machines() -> None:
    nodes = [
        node("a"),
        node("a"),
        node("b", SAME | {"torch": "2.12.0"}),
        node("c", SAME | {"code": "def"}, {"model": "/models/llama"}),
    ]
    said = [str(problem) for problem in disagreements(nodes, {"the run's directory cannot be written": [2]})]
    assert "the run's directory cannot be written: b (worker 2)" in said[0]
    assert "no model at /models/llama: c (worker 3)" in said[1]
    assert "torch differs between machines: 2.13.0: a (workers 0, 1), c (worker 3); 2.12.0: b (worker 2)" in said[2]
    assert "tonnage's code differs between machines: abc: a (workers 0, 1), b (worker 2); def: c (worker 3)" in said[3]
    assert len(said) == 4


def test_a_clock_that_is_wrong() -> None:
    said = wrong_clocks([node("a"), Node("b", SAME, {}, -61.2), Node("c", SAME, {}, 0.4)])
    assert "b by -61 s" in said
    assert "c " not in said.replace("clocks", "")


def test_this_machine(tmp_path: Path) -> None:
    found = describe_node({"model": str(tmp_path), "data": str(tmp_path / "none"), "validation": None})
    assert found.missing == {"data": str(tmp_path / "none")}
    assert found.versions == versions()
    assert set(found.versions) == {"python", "tonnage", "torch", "transformers", "code"}


def test_a_token_is_seen_once_it_is_there(tmp_path: Path) -> None:
    assert not sees_token(tmp_path / "workers", "token", 0.15)
    leave_token(tmp_path / "workers", "token")
    assert sees_token(tmp_path / "workers", "token", 0)
    assert not sees_token(tmp_path / "workers", "another", 0)


def test_other_code_in_any_room_is_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("host", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text("a = 1\n")
    monkeypatch.setattr(nodes, "__file__", str(tmp_path / "host" / "nodes.py"))
    digest = nodes.code_digest()
    (tmp_path / "data" / "code.py").write_text("a = 2\n")
    assert nodes.code_digest() != digest
