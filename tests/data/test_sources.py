"""Reading files: borders of parts, damaged arrays, what a directory and a glob hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.conftest import alpaca_rows, write_rows
from tonnage.config import read_config
from tonnage.data import sources
from tonnage.data.conversation import RowError
from tonnage.data.options import Source
from tonnage.errors import UserError


@pytest.mark.parametrize("pattern", ["a**/b.jsonl", "****", "**x"])
def test_a_pattern_that_is_none_is_refused(pattern: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model": str(tmp_path), "data": {"train": f"{tmp_path}/{pattern}"}}))
    with pytest.raises(UserError, match="can only be an entire path component"):
        rows_of(f"{tmp_path}/{pattern}")
    with pytest.raises(UserError, match="can only be an entire path component"):
        read_config(config)


def test_a_row_that_is_much_larger_than_its_file_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MOST_UNPACKED_BYTES", 100_000)
    words = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array(["o" * 1000]))
    many = pa.ListArray.from_arrays(pa.array([0, 2, 300], pa.int32()), words)
    pq.write_table(pa.table({"output": many, "n": [1, 2]}), tmp_path / "rows.parquet")
    first, second = rows_of(str(tmp_path / "rows.parquet"))
    assert first == {"output": ["o" * 1000] * 2, "n": 1}
    assert isinstance(second, RowError)
    assert second.kind == "too_large"
    assert "at most 100,000 are read" in second.reason


def rows_of(path: str) -> list[object]:
    return [row for part in sources.resolve(Source(path), 0).parts for _, row in sources.read_rows(part)]


@pytest.mark.parametrize("size", [1, 7, 64, 100, 1000, 10**6])
def test_parts_of_any_size_give_every_line_once(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", size)
    rows = alpaca_rows(30)
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows[:20]) + "\n\n\n" + json.dumps(rows[20]) + "\n")
    numbers, found, base = [], [], 0
    for part in sources.resolve(Source(str(file)), 0).parts:
        for number, row in sources.read_rows(part):
            numbers.append(base + number)
            found.append(row)
        base += sources.lines_of(part)
    assert found == rows[:21]
    assert numbers == [*range(1, 21), 23]
    assert base == 23


def test_an_array_is_read_the_same_whole_and_by_a_window(tmp_path: Path) -> None:
    rows = [{"text": "x" * n, "nested": [{"a": "]"}]} for n in range(2000)]
    file = write_rows(tmp_path / "rows.json", rows)
    part = sources.resolve(Source(str(file)), 0).parts[0]
    assert [row for _, row in sources.first_rows(part)] == [row for _, row in sources.read_rows(part)] == rows


@pytest.mark.parametrize(
    ("text", "good", "kind"),
    [
        ('[{"a": 1}, {"a": 2', 1, "truncated"),
        ('[{"a": 1}', 1, "truncated"),
        ('[{"a": 1}, oops, {"a": 2}]', 1, "invalid_json"),
        ('[{"a": 1} {"a": 2}]', 1, "invalid_json"),
        ('[{"a": 1}] more', 1, "invalid_json"),
        ('[{"a": 1}, 3, {"a": 2}]', 2, "wrong_type"),
        ("[" * 5000, 0, "invalid_json"),
    ],
)
def test_damaged_arrays_name_the_row(text: str, good: int, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(text)
    found = rows_of(str(file))
    assert sum(isinstance(row, dict) for row in found) == good
    assert [row.kind for row in found if isinstance(row, RowError)] == [kind]


def test_directories_and_globs(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b/c.json", "b/d.parquet.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_rows(tmp_path / name, [{"text": name}])
    assert rows_of(str(tmp_path)) == [
        {"text": "a.jsonl"},
        {"text": "b/c.json"},
        *rows_of(str(tmp_path / "b/d.parquet.txt")),
    ]
    assert rows_of(str(tmp_path / "*.jsonl")) == [{"text": "a.jsonl"}]
    assert rows_of(str(tmp_path / "**" / "*.json")) == [{"text": "b/c.json"}]
    with pytest.raises(UserError, match="no file fits"):
        rows_of(str(tmp_path / "*.csv"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.xlsx", b"x", "ending in '.xlsx'"),
        ("rows.docx.gz", b"x", "ending in '.docx.gz'"),
        ("rows.jsonl", "{}".encode("utf-16"), "text in UTF-16"),
        ("rows.parquet", b"not parquet", "not a readable Parquet file"),
        ("rows.arrow", b"not arrow", "not a readable Arrow file"),
    ],
)
def test_files_that_are_refused_whole(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        rows_of(str(tmp_path / name))


def test_csv_rows_of_the_wrong_width(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(b'a,b\n1,"two\nlines"\n3\n\n4,5\n')
    first, second, third = rows_of(str(file))
    assert (first, third) == ({"a": "1", "b": "two\nlines"}, {"a": "4", "b": "5"})
    assert isinstance(second, RowError)
    assert second.kind == "invalid_csv"


def test_a_hub_id_without_a_network_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def unreachable(*given: Any, **named: Any) -> None:
        asked.append(given[1:])
        assert named["timeout"] <= 10
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", lambda *given, **named: pytest.fail("it waits again"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError, match=r"(?s)as a hub id it does not load .*Couldn't reach.*without a connection"):
        sources.resolve(Source("nobody/has-this"), 0)
    assert asked == [("nobody/has-this",)]
    assert not datasets.config.HF_HUB_OFFLINE, "other uses of the hub are not affected"


@pytest.mark.parametrize("answers", [True, False], ids=["the hub answers", "it was loaded before"])
def test_a_hub_data_set_is_read_from_its_arrow_files(
    answers: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(30)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    load = datasets.load_dataset

    def info(*given: Any, **named: Any) -> None:
        if not answers:
            raise TimeoutError("timed out")

    def loaded(name: str, split: str) -> Any:
        assert (name, split) == ("someone/rows", "train")
        assert datasets.config.HF_HUB_OFFLINE is not answers
        return load("json", data_files=str(file), split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", loaded)
    assert rows_of("someone/rows") == rows


def test_a_hub_data_set_without_such_a_split(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    load = datasets.load_dataset
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *given, **named: None)
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, split: load("json", data_files=str(file), split=split, cache_dir=str(tmp_path / "cache")),
    )
    with pytest.raises(UserError, match=r"(?s)no split 'dev'; there are train.*set split: train"):
        sources.resolve(Source("someone/rows", split="dev"), 0)
