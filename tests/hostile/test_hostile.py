"""A slice of the hostile inputs, in a process of its own that imports everything and forks a child for every try.

What goes wrong is printed with the command that shows it again. All of them: ``python -m tests.hostile --tries 12000
--commands 300``.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hostile import case, forking, mutations
from hostile.case import Case, judge, prepare
from hostile.forking import Ended, forked
from hostile.stock import Stock
from hostile.strings import CANARY

ROOT = Path(__file__).parents[2]


def tried(tmp_path: Path, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    result = subprocess.run(
        [sys.executable, "-m", "tests.hostile", *words],
        cwd=ROOT,
        env=environment | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize(
    ("tries", "commands"), [pytest.param(20, 1, marks=pytest.mark.slow), pytest.param(200, 5, marks=pytest.mark.matrix)]
)
def test_nothing_goes_wrong_in_a_slice(tries: int, commands: int, tmp_path: Path) -> None:
    tried(tmp_path, "--tries", f"{tries}", "--commands", f"{commands}", "--processes", "1", "--seed", "60000")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stock = Stock(tmp_path / "stock")
    stock.cache.mkdir(parents=True)
    prepare(tmp_path / "try", stock)
    return tmp_path / "try"


def found(folder: Path, ended: Ended, **what: object) -> str:
    return judge(Case([["plan"]], **what), [ended], folder)  # type: ignore[arg-type]


def test_what_is_wrong_is_seen(folder: Path) -> None:
    fine = Ended(0, "", "", 0.1)
    assert found(folder, fine) == ""
    assert found(folder, Ended(2, "", "error: x", 0.1)) == ""
    assert found(folder, Ended(2, "", "", 0.1)) == "refused without a word"
    assert found(folder, Ended(1, "", f"{case.TRACEBACK}:", 0.1)) == "a traceback"
    assert found(folder, Ended(1, "", "error: x", 0.1)) == "exit status 1"
    assert found(folder, Ended(-11, "", "", 0.1)) == "ended by signal 11"
    assert found(folder, Ended(2, "", "error: \x1b[31m", 0.1)) == "control characters in what is said"
    assert found(folder, Ended(0, "\x1b]0;x\x07", "", 0.1), terminal=True) == "control characters on the terminal"
    assert found(folder, Ended(0, case.SECRET, "", 0.1)) == "a file outside was read"
    assert found(folder, fine, broken="it is") == "success, although it is"
    assert found(folder, Ended(0, "1 bad row", "", 0.1), broken="it is", named=["bad row"]) == ""
    assert found(folder, Ended(2, "", "error: x", 0.1), sound=True) == "refused, although the input is right"
    (folder / "tmp" / "x").touch()
    assert found(folder, fine).startswith("left in the directory")
    (folder / "tmp" / "x").unlink()
    (folder / "work" / CANARY).touch()
    assert found(folder, fine) == "something of the input was carried out"
    (folder / "work" / CANARY).unlink()
    (folder / "outside" / "more").touch()
    assert found(folder, fine) == "something outside was changed"


def test_children_are_kept_within_bounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "BYTES", 50 << 20)

    def endless() -> int:
        while True:
            pass

    def large() -> int:
        kept = []
        while True:
            kept.append(b"x" * (8 << 20))
            time.sleep(0.05)  # or the system's own bound would be first

    def asks() -> int:
        print(sys.stdin.readline(), end="")
        return 3

    said = folder / "said"
    assert "processor time" in forked(endless, said, says_yes=False, terminal=False, seconds=0.3).wrong
    assert "bytes of memory" in forked(large, said, says_yes=False, terminal=False).wrong
    assert forked(asks, said, says_yes=True, terminal=False).out == "y\n"
    assert forked(asks, said, says_yes=True, terminal=False).status == 3


def test_a_mutation_is_the_same_every_time() -> None:
    given = {"a": [1, {"b": "c"}], "d": None}
    for seed in range(200):
        one, other = (repr(mutations.changed(random.Random(seed), given, 2)) for _ in range(2))
        assert one == other
        assert mutations.content(random.Random(seed), b"abc" * 9) == mutations.content(random.Random(seed), b"abc" * 9)
    assert given == {"a": [1, {"b": "c"}], "d": None}
