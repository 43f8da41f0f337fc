"""What a lent GPU is asked (``python -m benchmarks.gpu``): which pieces, in which order, and that each is kept at once.

The slow tests hold a small contest on the CPU, and walk all pieces under the stand-in where its environment is.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.pieces import PIECES, Piece, fitting, in_turn

from device.stand_in.environments import FOLDER, VERSIONS
from tonnage.prove.pieces import named

ROOT = Path(__file__).resolve().parents[2]
KEY = {"code": "new"}
HERE = command.Machine(sys.executable, {}, {})
TEXTS = (command.__doc__ or "") + (ROOT / "benchmarks" / "README.md").read_text()
LINES = sorted(
    {line.partition("   ")[0] for line in re.findall(r"^ *(python -m benchmarks\.gpu .*)$", TEXTS, re.MULTILINE)}
)


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmarks.gpu", *words]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)


def measured(code: str = "new", *, whole: bool = True) -> dict[str, Any]:
    return {"of": {"code": code}, "whole": whole, "date": "2026-11-29"}


def copies(name: str, *words: str, seconds: int = 1) -> Piece:
    return Piece(name, 1, "copies a file of JSON", seconds, ("json.tool", *words))


def test_they_come_in_order_and_say_how_long_they_take(tmp_path: Path) -> None:
    ended = ask("--list", "--output", str(tmp_path / "none.json"))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()[1:-1]
    assert [line[2:32].strip() for line in lines] == [piece.name for piece in PIECES]
    assert all(str(piece.seconds) in line and "missing" in line for piece, line in zip(PIECES, lines, strict=True))
    numbers = [piece.number for piece in PIECES]
    assert numbers == sorted(numbers)
    assert set(numbers) == {1, 2, 3, 4, 5, 6}
    assert sum(piece.seconds for piece in PIECES[:5]) <= 600  # of kinds 1 to 3, those of full rows


@pytest.mark.parametrize("line", [line for line in LINES if "--stand-in" not in line])
def test_every_line_of_help_and_readme_can_be_asked(line: str, tmp_path: Path) -> None:
    words = shlex.split(line)
    ended = ask(*words[3:], "--list", "--output", str(tmp_path / "none.json"))
    assert ended.returncode == 0, ended.stderr


def test_minutes_take_what_fits_and_a_long_piece_gives_way() -> None:
    long, short, last = (copies(name, seconds=seconds) for name, seconds in (("a", 100), ("b", 30), ("c", 40)))
    assert fitting([long, short, last], 75) == [short, last]
    assert fitting([long, short, last], 135) == [long, short]
    assert fitting([long, short, last], 20) == []


def test_what_was_never_measured_comes_before_what_other_code_measured() -> None:
    pieces = [copies(name) for name in ("old", "done", "broken", "new")]
    results = {"old": measured("old"), "done": measured(), "broken": measured(whole=False)}
    states = {piece.name: command.state(results.get(piece.name), KEY) for piece in pieces}
    assert states == {"old": "stale", "done": "done", "broken": "broke off", "new": "missing"}
    assert [piece.name for piece in in_turn(pieces, states, [])] == ["broken", "new", "old"]
    assert [piece.name for piece in in_turn(pieces, states, ["done"])] == ["done", "broken", "new", "old"]


def test_every_result_is_written_at_once_and_one_that_breaks_off_is_told(tmp_path: Path) -> None:
    source, output = tmp_path / "source.json", tmp_path / "out.json"
    source.write_text('{"tokens": 1}')
    todo = [copies("good", str(source), "{output}"), copies("bad", str(tmp_path / "none.json"), "{output}")]
    todo.append(copies("long", str(source), "{output}", seconds=10**6))
    seen = []

    class Watched(dict[str, Any]):
        """Looks into the file before the next result comes."""

        def __setitem__(self, name: str, result: Any) -> None:
            seen.append(sorted(json.loads(output.read_text())["pieces"]) if output.exists() else [])
            super().__setitem__(name, result)

    record = {"machine": {"code": "new", "packages": {"torch": "2"}, "gpus": [{"name": "H"}]}, "pieces": Watched()}
    assert not command.run(todo, HERE, output, record, time.monotonic() + 60)
    assert [piece.name for piece in todo] == ["long"]
    assert seen == [[], ["good"]]
    found = json.loads(output.read_text())["pieces"]
    assert found["good"]["result"] == {"tokens": 1}
    assert found["good"]["of"] == {"code": "new", "versions": {"torch": "2"}, "gpus": ["H"]}
    assert (found["good"]["whole"], found["bad"]["whole"]) == (True, False)
    assert "none.json" in found["bad"]["log"]


def test_a_stand_in_says_nothing_of_speed() -> None:
    profile = {
        "step_seconds": 1.0,
        "causes": {"attention": 1.0},
        "operations": [{"name": "mm", "calls": 2, "seconds": 1.0}],
    }
    told = {"more": {"8B": {"tokens_per_second": 9.0, "peak_bytes": 3, "planned_seconds": 1.0}}, "seconds": 3.0}
    assert command.without_speed(profile) == {"operations": [{"name": "mm", "calls": 2}]}
    assert command.without_speed(told) == {"more": {"8B": {"peak_bytes": 3, "planned_seconds": 1.0}}}


def test_pieces_name_what_there_is() -> None:
    from benchmarks.gpu.beside import CONTESTS

    for piece in PIECES:
        assert find_spec(piece.command[0]) is not None, piece.name
        named(piece.only)  # raises KeyError
        if piece.number == 3:
            assert piece.command[1] in CONTESTS


@pytest.mark.matrix
@pytest.mark.parametrize("contest", ["small", "small LoRA"])
def test_everybody_begins_alike_and_trains_alike(contest: str, tmp_path: Path) -> None:
    words = ["-m", "benchmarks.gpu.beside", contest, "--folder", str(tmp_path), "--output", str(tmp_path / "out.json")]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    contestants = json.loads((tmp_path / "out.json").read_text())["contestants"]
    assert all(len(one["losses"]) == 8 for one in contestants.values())
    pairs = {f"{name}, {other}": pair for name, one in contestants.items() for other, pair in one["beside"].items()}
    assert len(pairs) == 5  # each peer with both of ours, and ours with each other
    differences = {name: pair["largest_relative_difference_of_losses"] for name, pair in pairs.items()}
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.slow
@pytest.mark.skipif(
    not any((FOLDER / version / "ready").exists() for version in VERSIONS),
    reason="no CUDA build of torch: python -m tests.device.stand_in environments",
)
def test_all_of_it_under_the_stand_in(tmp_path: Path) -> None:
    ended = ask("--stand-in", "--output", str(tmp_path / "out.json"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "out.json").read_text())["pieces"]
    assert list(found) == [piece.name for piece in PIECES]
    assert all(one["whole"] and one["status"] == 0 for one in found.values())
