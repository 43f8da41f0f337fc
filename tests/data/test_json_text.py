"""JSON files of every layout, told apart by their beginning and read a value at a time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tonnage.config import Source
from tonnage.data.reading import json_text
from tonnage.data.reading import rows as rows_module
from tonnage.data.reading.json_text import layout_of, read_values
from tonnage.data.reading.rows import read_rows
from tonnage.data.sources import files as sources
from tonnage.errors import UserError
from tonnage.forms.conversation import RowError

ROWS: list[dict[str, Any]] = [{"text": f"row {n}", "more": [{"n": n}]} for n in range(3)]
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def written(tmp_path: Path, text: str | bytes, name: str = "rows.json") -> Path:
    file = tmp_path / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def rows_of(file: Path, split: str = "train") -> list[tuple[int, object]]:
    return [row for part in sources.resolve(Source(path=str(file), split=split), 0).parts for row in read_rows(part)]


LAYOUTS: dict[str, tuple[str, str, list[Any]]] = {
    "lines": ("lines", LINES, ROWS),
    "one line": ("lines", json.dumps(ROWS[0]), ROWS[:1]),
    "lines, the first one broken": ("lines", '{"text": \n' + LINES, [None, *ROWS]),
    "lines of lists": ("lines", "".join(json.dumps(TURNS) + "\n" for _ in range(2)), [{"messages": TURNS}] * 2),
    "one line that is a list of messages": ("lines", json.dumps(TURNS), [{"messages": TURNS}]),
    "lines that are strings": ("lines", '"a"\n"b"\n', [None, None]),
    "an array": ("array", json.dumps(ROWS), ROWS),
    "an array over several lines": ("array", "\n" + json.dumps(ROWS, indent=2) + "\n", ROWS),
    "an array of conversations": ("array", json.dumps([TURNS, TURNS]), [{"messages": TURNS}] * 2),
    "an array of conversations over several lines": ("array", json.dumps([TURNS], indent=1), [{"messages": TURNS}]),
    "an empty array": ("array", "[]", []),
    "objects over several lines": ("values", "\n".join(json.dumps(row, indent=2) for row in ROWS), ROWS),
    "objects over several lines, one after another": ("values", "".join(json.dumps(r, indent=1) for r in ROWS), ROWS),
    "a holder": ("holder", json.dumps({"version": 1, "data": ROWS}), ROWS),
    "a holder over several lines": ("holder", json.dumps({"about": {"a": [1]}, "rows": ROWS, "n": 2}, indent=2), ROWS),
    "a holder of conversations": ("holder", json.dumps({"train": [{"messages": TURNS}]}), [{"messages": TURNS}]),
    "one object that is a row": ("lines", json.dumps({"messages": TURNS}), [{"messages": TURNS}]),
    "one row over several lines": ("values", json.dumps({"messages": TURNS}, indent=2), [{"messages": TURNS}]),
    "one row with a list beside": (
        "lines",
        json.dumps({"instruction": "a", "output": "b", "facts": [{"x": 1}]}),
        [{"instruction": "a", "output": "b", "facts": [{"x": 1}]}],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_layouts(name: str, ending: str, tmp_path: Path) -> None:
    layout, text, expected = LAYOUTS[name]
    for mark in (b"", b"\xef\xbb\xbf"):
        file = written(tmp_path, mark + text.replace("\n", ending).encode())
        assert layout_of(file, "train")[0] == layout
        found = [row if isinstance(row, dict) else None for _, row in rows_of(file)]
        assert found == expected


def test_rows_are_numbered_by_line_or_place(tmp_path: Path) -> None:
    printed = "\n\n".join(json.dumps(row, indent=2) for row in ROWS)
    lines = [number for number, line in enumerate(printed.splitlines(), 1) if line == "{"]
    assert [number for number, _ in rows_of(written(tmp_path, printed))] == lines == [1, 10, 19]
    assert [number for number, _ in rows_of(written(tmp_path, json.dumps({"data": ROWS}, indent=2)))] == [1, 2, 3]


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_window_of_any_size_gives_the_same(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: LAYOUTS[name][1] for name in ("an array over several lines", "a holder over several lines")}
    for text in (*texts.values(), LAYOUTS["objects over several lines"][1]):
        file = written(tmp_path, text.replace("row 1", 'r\\u00f6w \u00e9 \\\\\\"'))
        layout, field = layout_of(file, "train")
        whole = list(read_values(file, layout, field))
        with monkeypatch.context() as patch:
            patch.setattr("tonnage.data.reading.json_text.BLOCK_BYTES", size)
            assert list(read_values(file, layout, field)) == whole
        assert [row["text"] for _, row in whole if isinstance(row, dict)] == ["row 0", 'r\u00f6w \u00e9 \\"', "row 2"]


def test_many_small_objects_are_numbered_soon(tmp_path: Path) -> None:
    number = 20_000
    file = written(tmp_path, "\n".join([json.dumps({"text": "a"}, indent=1)] * number))
    began = time.monotonic()
    assert [line for line, _ in read_values(file, "values", "")] == list(range(1, 3 * number, 3))
    assert time.monotonic() - began < 8, "0.4 on a machine that does nothing else; 24 where lines are counted anew"


def test_a_holder_of_several_lists_obeys_split_or_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, json.dumps({"train": ROWS[:2], "test": ROWS[2:]}))
    assert [row for _, row in rows_of(file)] == ROWS[:2]
    assert [row for _, row in rows_of(file, "test")] == ROWS[2:]
    with pytest.raises(UserError, match=r"(?s)lists train, test.*set split: train"):
        rows_of(file, "dev")
    file = written(tmp_path, json.dumps({"test": ROWS}))
    with pytest.raises(UserError, match=r"(?s)lists test.*set split: test"):
        rows_of(file)
    assert [row for _, row in rows_of(file, "test")] == ROWS
    with pytest.raises(UserError, match=r"(?s)lists one, two.*set split: one"):
        rows_of(written(tmp_path, json.dumps({"one": ROWS, "two": ROWS})))


BROKEN: dict[str, tuple[str, int, str]] = {
    "a value cut off": ('{\n"text": "a"\n}\n{\n"text": "b', 1, "truncated"),
    "no comma": ('{\n"text": "a"\n}\n{\n"text" "b"\n}\n', 1, "truncated"),
    "words between values": ('{\n"text": "a"\n}\nand\n{\n"text": "b"\n}', 1, "invalid_json"),
    "a holder cut off": ('{"version": 1, "data": [{"text": "a"}, {"text": ', 1, "truncated"),
    "a field twice": ('[{"text": "a"}, {"text": "b", "text": "c"}, {"text": "d"}]', 2, "invalid_json"),
    "a field twice, printed": (
        '{\n"text": "a"\n}\n{\n"text": "b",\n"text": "c"\n}\n{\n"text": "d"\n}',
        2,
        "invalid_json",
    ),
    "NUL": ('{"text": "a"}\n\0\0\n{"text": "b"}\n', 2, "invalid_json"),
    "nested without end": ("{\n" + '"a": {' * 200_000, 0, "invalid_json"),
    "a list that is no conversation": ('{"text": "a"}\n[1, 2]\n{"text": "b"}', 2, "wrong_type"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_in_its_place(name: str, tmp_path: Path) -> None:
    text, good, kind = BROKEN[name]
    found = [row for _, row in rows_of(written(tmp_path, text))]
    assert sum(isinstance(row, dict) for row in found) == good
    assert [row.kind for row in found if isinstance(row, RowError)] == [kind]


def test_a_field_that_stands_twice_is_named(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.json"):
        file = written(tmp_path, '{"a": {"text": "b", "text": "c"}}\n{"text": "d"}\n', name)
        (_, error), (_, row) = rows_of(file)
        assert isinstance(error, RowError)
        assert error.reason == "field 'text' stands twice in one object"
        assert row == {"text": "d"}


@pytest.mark.parametrize("layout", ["lines", "array", "values", "holder"])
def test_a_row_that_is_too_long_is_named(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json_text, rows_module):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 1 << 17)
    monkeypatch.setattr(rows_module, "PART_BYTES", 1 << 16)  # so that arrays are read by a window
    long = {"text": "x" * (2 << 20)}
    text = {
        "lines": f"{json.dumps(ROWS[0])}\n{json.dumps(long)}\n{json.dumps(ROWS[1])}\n",
        "array": json.dumps([ROWS[0], long]),
        "values": "\n".join(json.dumps(row, indent=1) for row in (ROWS[0], long)),
        "holder": json.dumps({"data": [ROWS[0], long]}),
    }[layout]
    file = written(tmp_path, text)
    assert layout_of(file, "train")[0] == layout
    first, (_, error), *_ = rows_of(file)
    assert first[1] == ROWS[0]
    assert isinstance(error, RowError)
    assert error.kind == "too_large"
    assert "at most 131,072 are read" in error.reason
