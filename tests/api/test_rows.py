"""Rows in memory: the packs of the same rows in a file, one place for the same content, and refusals by number."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import tonnage
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.api.said import words_of
from tonnage.config import read_config
from tonnage.data import PackedDataset
from tonnage.data.sources.in_memory import keep_rows
from tonnage.decide.decision import decide_on

pandas: Any = import_module("pandas")  # which datasets brings along, without types
ROWS = alpaca_rows(40)


class Polars:
    """A frame of polars, as far as it is asked."""

    def to_dicts(self) -> list[dict[str, Any]]:
        return [dict(row) for row in ROWS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("rows") / "model", llama_config(num_hidden_layers=1)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ROWS,
        lambda: tuple(ROWS),
        lambda: (row for row in ROWS),
        lambda: pandas.DataFrame(ROWS),
        lambda: datasets.Dataset.from_list(ROWS),
        Polars,
    ],
    ids=["list", "tuple", "generator", "pandas", "datasets", "polars"],
)
def test_the_same_rows_lie_in_one_place_whatever_held_them(make: Callable[[], Any], tmp_path: Path) -> None:
    path = keep_rows(make(), tmp_path)
    assert path == keep_rows([dict(row) for row in ROWS], tmp_path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS
    assert path != keep_rows(ROWS[1:], tmp_path)
    assert len(list((tmp_path / "rows").iterdir())) == 2  # nothing half-written besides


def test_what_frames_hold_becomes_json(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {
            "messages": [np.array([{"role": "user", "content": "a"}], dtype=object)],
            "score": [np.float32(0.5)],
            "none": [float("nan")],
            "day": [pandas.Timestamp("2026-01-02")],
        }
    )
    (line,) = keep_rows(frame, tmp_path).read_text().splitlines()
    assert json.loads(line) == {
        "messages": [{"role": "user", "content": "a"}],
        "score": 0.5,
        "none": None,
        "day": "2026-01-02T00:00:00",
    }
    (line,) = keep_rows([{"day": datetime.date(2026, 1, 2)}], tmp_path).read_text().splitlines()
    assert json.loads(line) == {"day": "2026-01-02"}


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([], "no row"),
        ([{"a": 1}, "text"], "row 1 is a str"),
        ([{"a": 1}, {"a": 1, "b": object()}], "row 1 holds in 'b' what JSON cannot: a object"),
        ([{"a": float("inf")}], "row 0 holds in 'a' what JSON cannot"),
        ([{"a": "\ud800"}], "row 0 holds in 'a' what JSON cannot"),
        (7, "a int"),
        (pandas.Series(["a"]), "row 0 is a str"),
    ],
)
def test_rows_that_are_none_are_refused_by_their_number(rows: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(tonnage.UserError) as caught:
        keep_rows(rows, tmp_path)
    assert found in str(caught.value)
    assert not list((tmp_path / "rows").glob("**/*"))


def test_rows_in_memory_are_packed_as_those_of_a_file_and_accounted_for(model: str, tmp_path: Path) -> None:
    file = str(write_rows(tmp_path / "rows.jsonl", ROWS))
    section = {"max_length": 128, "template": "plain", "validation": 0.2, "cache": str(tmp_path / "cache")}
    decisions = []
    for train in (file, ROWS):
        path, words = words_of(model, {**section, "train": train}, {"batch": {"sequences": 4}})
        decisions.append(decide_on(read_config(path, words)))
    of_file, of_memory = (decision.prepared for decision in decisions)
    for one, other in ((of_file.train, of_memory.train), (of_file.validation, of_memory.validation)):
        assert isinstance(one, PackedDataset)
        assert isinstance(other, PackedDataset)
        assert one.num_packs == other.num_packs
        for index in range(one.num_packs):
            assert np.array_equal(one.pack(index).input_ids, other.pack(index).input_ids)
            assert np.array_equal(one.pack(index).weights, other.pack(index).weights)
    (source,) = of_memory.account.to_json()["sources"]
    assert source["name"] == "rows in memory"
    assert decisions[1].config.output.endswith("model-rows-in-memory")


def test_rows_may_stand_wherever_a_path_does(model: str, tmp_path: Path) -> None:
    cache = str(tmp_path)
    data = {"train": [{"path": ROWS, "weight": 2, "format": "alpaca"}, {"path": "other.jsonl"}], "cache": cache}
    config = read_config(*words_of(model, data | {"validation": ROWS[:3]}, {}), check_files=False)
    first, second = config.data.train
    assert (first.path, first.weight, first.format) == (str(keep_rows(ROWS, tmp_path)), 2, "alpaca")
    assert second.path == "other.jsonl"
    assert isinstance(config.data.validation, tuple)
    assert config.data.validation[0].path == str(keep_rows(ROWS[:3], tmp_path))
    with pytest.raises(tonnage.UserError, match=r"data\.cache is 5"):
        read_config(*words_of(model, data | {"train": ROWS, "cache": 5}, {}))
    rows_with_paths = [{"path": "a.py", "text": "x"}]
    config = read_config(*words_of(model, {"train": rows_with_paths, "cache": cache}, {}), check_files=False)
    assert config.data.train[0].path == str(keep_rows(rows_with_paths, tmp_path))
