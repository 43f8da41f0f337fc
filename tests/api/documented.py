"""Carries out what the docstrings of the public names and ``docs/python.md`` show, in a folder made for it."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import sys
from pathlib import Path

import tonnage

ROOT = Path(__file__).resolve().parents[2]
ORDER = ("train", "start", "plan", "open_run", "Run", "Plan", "Session", "UserError")
"""The first examples make the runs that later ones look at."""


def main(told: list[str]) -> None:
    folder, what = Path(told[0]), told[1]
    os.chdir(folder)
    if what == "docstrings":
        carry_out_docstrings()
    else:
        carry_out_page()


def carry_out_docstrings() -> None:
    names: dict[str, object] = {"tonnage": tonnage}
    for name in ORDER:
        text = getattr(tonnage, name).__doc__
        test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
        assert test.examples, name
        said = io.StringIO()
        result = doctest.DocTestRunner(verbose=False).run(test, out=said.write, clear_globs=False)
        assert result.failed == 0, said.getvalue()
        names = test.globs


def carry_out_page() -> None:
    names: dict[str, object] = {}
    printed = io.StringIO()
    page = (ROOT / "docs" / "python.md").read_text()
    for name, code in re.findall(r'```python title="(.*?)"\n(.*?)```', page, re.DOTALL):
        Path(name).write_text(code)
    sys.path.insert(0, str(Path.cwd()))
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        with contextlib.redirect_stdout(printed):
            exec(code, names)
    lines = printed.getvalue().splitlines()
    assert lines[0].startswith("4 of 4 steps, loss "), lines
    assert Path(lines[2]) == Path("runs/sums/export")
    assert Path(lines[2], "config.json").exists()
    assert "True" in lines, lines
    assert str(Path("runs/own/export")) in lines, lines
    assert any(line.startswith("unknown key optimizer.learning_rate -> ") for line in lines), lines
    assert any(line.startswith("steps is 'many' -> a whole number") for line in lines), lines
