"""Figures held against the table, the record as a file and as a page, and pieces that stay from an earlier call."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tonnage.files import writing
from tonnage.prove import child, head
from tonnage.prove import conduct as conducting
from tonnage.prove.checks import CHECKS
from tonnage.prove.kit import MOST_BYTES, choose
from tonnage.prove.machine import NEEDED, USEFUL, missing
from tonnage.prove.page import lines, render
from tonnage.prove.pieces import LIMIT_SECONDS, PIECES, ProofPiece
from tonnage.prove.proof import NOTHING, Proof, apart, unequal
from tonnage.prove.record import PART, PieceResult, ProofRecord, keep, kept, status_of

MACHINE = {
    "tonnage": "0",
    "code": "c",
    "processor": "<b>P</b>",
    "cpus": 2,
    "memory_bytes": 1e9,
    "python": "3",
    "torch": "2",
    "packages": {"torch": "2"},
    "gpus": [],
}


def proof(card: str = "", *, computes: bool = True) -> Proof:
    return Proof(torch.device("cuda" if card else "cpu"), card, computes, Path())


def test_a_red_line_is_held_against_its_own_card_only() -> None:
    for card, status in (("NVIDIA H200", "failed"), ("NVIDIA H100 80GB HBM3", "told"), ("", "told")):
        at = proof(card)
        at.found("8B full, tokens", "x", 10_470)
        assert at.findings[0].status == status, card
        assert at.findings[0].red == (status == "failed")
    at = proof("NVIDIA H200")
    at.found("8B full, tokens", "x", 10_471)
    assert at.findings[0].status == "passed"


@pytest.mark.parametrize(("figure", "status"), [(1.02, "failed"), (1.0, "passed"), (0.94, "failed"), (0.96, "passed")])
def test_a_planned_peak_may_be_a_little_high_and_less_low(figure: float, status: str) -> None:
    at = proof("a card that nobody knows")
    at.found("peak", "x", figure)
    assert (at.findings[0].status, at.findings[0].red) == (status, True)


def test_a_figure_that_is_none_fails_and_is_still_json() -> None:
    at = proof()
    at.found("losses, fp32", "x", math.inf, "refused")
    assert (at.findings[0].status, at.findings[0].figure) == ("failed", None)


def test_a_device_that_does_not_compute_is_told_so() -> None:
    at = proof("a stand-in", computes=False)
    at.found("losses, fp32", "x", 1.0)
    at.found("waits", "x", 1)
    assert [one.status for one in at.findings] == ["skipped", "passed"]
    assert at.findings[0].why == NOTHING


def test_no_path_of_the_machine_is_in_what_is_found(tmp_path: Path) -> None:
    proof = Proof(torch.device("cpu"), "", computes=True, folder=tmp_path)
    proof.skip("refusals", "a full disk", f"{tmp_path}/out: 3 GB free")
    assert proof.findings[0].why == "./out: 3 GB free"


def test_distances() -> None:
    assert apart([1.0, 2.0], [1.0, 2.2]) == pytest.approx(0.2 / 2.2)
    assert apart([1.0], [1.0, 1.0]) == apart([], []) == apart([math.nan], [1.0]) == math.inf
    assert (unequal([1, 2], [1, 3]), unequal([1], [1, 2]), unequal([], [])) == (1, 1, 1)


def test_results_stay_for_the_same_machine_and_code(tmp_path: Path) -> None:
    at = proof()
    at.found("losses, fp32", "x", 1e-6)
    result = PieceResult("families", status_of(at.findings), 1.0, "cpu", findings=tuple(at.findings))
    keep(tmp_path, result, "a")
    assert kept(tmp_path, "families", "a") == result
    assert kept(tmp_path, "families", "b") is None
    (tmp_path / "pieces" / "families.json").write_text('{"version": 1')
    assert kept(tmp_path, "families", "a") is None


def test_a_piece_that_is_ended_leaves_what_it_had_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(proof: Proof) -> None:
        proof.found("losses, fp32", "x", 1e-6)
        raise KeyboardInterrupt

    monkeypatch.setattr(head, "prove", one)
    monkeypatch.setattr(child, "_know_the_machine", lambda _: None)
    monkeypatch.setattr(writing, "close_to_others", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        child.main("head", str(tmp_path), "a", "1", "1")
    assert kept(tmp_path, "head", "a") is None
    part = kept(tmp_path, "head", "a" + PART)
    assert part is not None
    assert [found.case for found in part.findings] == ["x"]


def test_an_interruption_ends_pieces_that_go_on_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, begun = list[subprocess.Popen[bytes]](), threading.Event()

    def carried_out(piece: ProofPiece, *given: Any, **_: Any) -> PieceResult:
        if piece.name == "update":
            assert begun.wait(30)
            os.kill(os.getpid(), signal.SIGINT)
            return PieceResult(piece.name, "passed", 0.0, "cuda")
        there.append(subprocess.Popen(["sleep", "100"], start_new_session=True))
        given[3].add(there[0])
        begun.set()
        there[0].wait()
        return PieceResult(piece.name, "passed", 0.0, "cuda")

    machine = {**MACHINE, "gpus": [{"name": "H100"}], "cpus": 16}
    monkeypatch.setattr(conducting, "described", lambda: machine)
    monkeypatch.setattr(conducting, "_carried_out", carried_out)
    with pytest.raises(KeyboardInterrupt):
        conducting.conduct(tmp_path, only=("head", "update"))
    assert there[0].wait(10) == -signal.SIGKILL


def test_the_page_holds_strangers_text_as_text() -> None:
    at = proof()
    at.found("losses, fp32", "a <script>", 1.0, "why & how")
    pieces = (
        PieceResult("families", "failed", 1.0, "cpu", findings=tuple(at.findings)),
        PieceResult("tiers", "failed", 1.0, "cpu", error="Traceback\nValueError: <i>"),
        PieceResult("memory", "skipped", 0.0, "cpu", why="needs a GPU"),
    )
    record = ProofRecord("2026", MACHINE, pieces)
    page = render(record)
    assert "<script>" not in page
    assert "a &lt;script&gt;" in page
    assert "<b>P</b>" not in page
    assert [status for _, status, _ in lines(record)] == ["failed", "failed", "skipped"]
    assert record.failed == [("families", "losses, fp32 (a <script>)"), ("tiers", "broke off: ValueError: <i>")]
    json.dumps(record.to_json(), allow_nan=False)


def test_every_piece_is_there() -> None:
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    for piece in PIECES:
        assert callable(import_module(f"tonnage.prove.{piece.module}").prove)
        assert 0 < piece.seconds <= LIMIT_SECONDS
    assert all(one.shows and one.unit for one in CHECKS.values())


def test_what_is_needed_is_what_the_package_asks_for() -> None:
    asked = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    listed = {f"{name}>={least}" for name, least in {**NEEDED, **USEFUL}.items()} - {"numpy>=1", "pyarrow>=15"}
    assert listed == set(asked)
    assert missing({"torch": "99.1", "numpy": "1", "no-such-package": "1"}) == ["torch>=99.1", "no-such-package>=1"]
    assert missing({"pyyaml": "6.0.99"}) == ["pyyaml>=6.0.99"]


def test_a_kit_leaves_out_what_has_no_room() -> None:
    sizes = {"tonnage-1.whl": 1_000_000, "big-1.whl": MOST_BYTES, "small-1.whl": 10, "torch-2.whl": 10**9}
    kept_wheels, left_out = choose(sizes, {"tonnage-1.whl"})
    assert kept_wheels == {"tonnage-1.whl", "small-1.whl"}
    assert left_out == ["big", "torch"]


def test_names_are_those_of_pieces() -> None:
    from entry import refusal

    assert "no piece is called nothing" in refusal("doctor", "--prove", "--only", "nothing")
    assert "--only without --prove" in refusal("doctor", "--only", "tiers")
