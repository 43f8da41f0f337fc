"""What is left out of CI is run whole by one command, which says what became of every test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pytest

@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1])
def test_of_the_matrix(number):
    assert number

@pytest.mark.matrix
def test_of_what_is_not_there(nothing):
    pass

def test_of_another_kind():
    pass
"""


def test_the_result_has_every_test_of_the_matrix_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = matrix\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "tests.matrix", "--processes", "0", "--output", str(tmp_path / "out.json")]
    ended = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["counts"] == {"passed": 1, "failed": 1, "error": 1}
    assert {name.partition("::")[2]: one["outcome"] for name, one in found["tests"].items()} == {
        "test_of_the_matrix[0]": "failed",
        "test_of_the_matrix[1]": "passed",
        "test_of_what_is_not_there": "error",
    }
    assert all(one["date"] == found["date"] and one["commit"] == found["commit"] for one in found["tests"].values())
    assert len(found["commit"]) in (0, 40)
    (tmp_path / "test_others.py").write_text(TESTS.replace("assert number", "assert True"))
    subprocess.run([*command, str(tmp_path / "test_others.py")], capture_output=True, cwd=ROOT, check=False)
    together = json.loads((tmp_path / "out.json").read_text())
    assert together["counts"] == {"passed": 3, "failed": 1, "error": 2}
    assert found["tests"].items() <= together["tests"].items()


COMBINATIONS = """
import pytest

@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.slow
def test_of_two(number):
    pass
"""


@pytest.mark.slow
def test_a_combination_that_is_named_is_of_the_matrix_as_among_all(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    matrix\n    slow\n")
    (tmp_path / "test_some.py").write_text(COMBINATIONS)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--collect-only", "-q", "-m", "matrix"]
    for named in ("", "::test_of_two[1]"):
        ended = subprocess.run(
            [*command, f"test_some.py{named}"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        )
        assert ended.stdout.splitlines()[:1] == ["test_some.py::test_of_two[1]"], ended.stdout + ended.stderr


def test_ci_leaves_out_what_make_matrix_runs() -> None:
    (line,) = [one for one in (ROOT / ".ci" / "run").read_text().splitlines() if one.startswith("scripts/check")]
    assert '-m "slow and not matrix"' in line
    assert "python -m tests.matrix --output benchmarks/results/matrix.json" in (ROOT / "Makefile").read_text()
