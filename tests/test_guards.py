"""Sizes of functions and vague names are held by numbers that only fall, and no modules import in a circle."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).parent.parent
LONG = "def long(a, b):\n" + "    a = 1\n" * 61
WIDE = f"class Wide:\n    def wide(self, {', '.join('abcdefghi')}):\n        pass\n"
VAGUE = "def f(found):\n" + "    a = 1\n" * 9 + "    for one in [one for one in found]:\n        said = one\n"


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    return import_module("guards")


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name / "module.py"
        path.parent.mkdir()
        path.write_text(text)
    return folder


def test_a_function_too_large_is_seen_and_one_that_may_be_so_may_not_grow(guards: Any, tmp_path: Path) -> None:
    source = written(tmp_path, data=LONG, optim=WIDE, kernels=LONG + WIDE, cli=WIDE)
    assert guards.problems(source, {}) == [
        "data/module.py:long: 62 lines and 2 parameters, 60 and 8 at most",
        "optim/module.py:Wide.wide: 2 lines and 9 parameters, 60 and 8 at most",
    ]
    limits = {"functions": {"data/module.py:long": [62, 2], "optim/module.py:Wide.wide": [2, 9]}}
    assert guards.problems(source, limits) == []
    (source / "data" / "module.py").write_text(LONG + "    a = 1\n")
    assert len(guards.problems(source, limits)) == 1


def test_a_docstring_does_not_count_and_a_list_names_no_small_function(guards: Any, tmp_path: Path) -> None:
    documented = LONG.replace("\n", '\n    """Of\n\n    lines.\n    """\n', 1).removesuffix("    a = 1\n" * 2)
    source = written(tmp_path, data=documented)
    assert guards.problems(source, {}) == []
    limits = {"functions": {"data/module.py:long": [62, 2]}}
    assert guards.problems(source, limits) == ["data/module.py:long is small enough: python scripts/guards.py --lower"]
    assert tomllib.loads(guards.lowered(source, limits))["functions"] == {}


def test_vague_names_are_counted_by_room(guards: Any, tmp_path: Path) -> None:
    source = written(tmp_path, data=VAGUE, optim=VAGUE.replace("    a = 1\n" * 9, ""))
    assert guards.vague_names(source) == {"data": 3}  # a parameter, a loop, an assignment
    assert guards.problems(source, {"vague": {"data": 3}}) == []
    (line,) = guards.problems(source, {"vague": {"data": 2}})
    assert line.startswith("data: 3 vague names, 2 at most")
    assert tomllib.loads(guards.lowered(source, {"vague": {"data": 5}}))["vague"] == {"data": 3}


def test_size_counts_lines_and_statements(guards: Any, tmp_path: Path) -> None:
    lines = guards.size(written(tmp_path, data=LONG, optim=LONG))
    assert lines[0] == "124 lines in 2 files"
    assert lines[2] == "statements of a function: median 61, 90th percentile 61"


def test_a_circle_of_imports_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    circle = import_module("rooms").circle
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")):
        graph.add_import(importer=f"tonnage.data.{importer}", imported=f"tonnage.data.{imported}")
    assert circle(graph) == {"tonnage.data.b": {"tonnage.data.c"}, "tonnage.data.c": {"tonnage.data.b"}}
