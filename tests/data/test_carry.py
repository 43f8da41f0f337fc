"""Numbers of rows that go with their documents: into packs, into the cache's key; and rows that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.conftest import alpaca_rows, write_rows
from tonnage.config import Data, Source
from tonnage.data import DataError, PackedDataset, Packer, prepare
from tonnage.errors import UserError

ROWS = [{**row, "score": number / 4 - 3, "reward": number} for number, row in enumerate(alpaca_rows(40))]


def options(path: Path, *carry: str, **changes: Any) -> Data:
    usual: dict[str, Any] = {"max_length": 200, "template": "plain"} | changes
    return Data(train=(Source(path=str(path)),), carry=carry, **usual)


def documents(data: PackedDataset) -> dict[int, tuple[list[int], list[float], dict[str, float]]]:
    """Tokens, weights and numbers of every row, by the row."""
    found = {}
    for pack in map(data.pack, range(data.num_packs)):
        ends = np.cumsum(pack.lengths)[:-1]
        parts = zip(np.split(pack.input_ids, ends), np.split(pack.weights, ends), strict=True)
        for at, (tokens, weights) in enumerate(parts):
            carried = {name: float(values[at]) for name, values in pack.carried.items()}
            found[data.where(int(pack.documents[at]))[1]] = tokens.tolist(), weights.tolist(), carried
    return found


def test_packs_hold_the_numbers_of_their_rows(tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    plain = prepare(options(path), tokenizer, cache=tmp_path / "cache")
    one = prepare(options(path, "score", "reward", validation=0.2), tokenizer, cache=tmp_path / "cache")
    assert plain.train.pack(0).carried == {}
    assert one.validation is not None
    found = documents(one.train) | documents(one.validation)
    assert len(found) == len(ROWS)
    for number, (tokens, weights, carried) in found.items():
        row = ROWS[number - 1]
        assert carried == {"score": row["score"], "reward": row["reward"]}
        assert (tokens, weights) == documents(plain.train)[number][:2]
    assert "score" not in one.account.total.unread
    assert plain.account.total.unread == {"score": len(ROWS), "reward": len(ROWS)}


def test_what_is_carried_is_part_of_the_key(tokenizer: Any, tmp_path: Path) -> None:
    path, cache = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "cache"
    asked = [options(path, *carry) for carry in ((), ("score",), ("reward",), ("score", "reward"), ("score",))]
    paths = [prepare(one, tokenizer, cache=cache).train.source.path for one in asked]
    assert len(set(paths)) == 4
    assert paths[1] == paths[4]


def test_rows_of_other_numbers_are_no_duplicates(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{**row, "reward": 3} for row in [{**ROWS[0], "score": score} for score in (1.0, 2.0, 1.0, 2)] + ROWS[1:2]]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    kept = [
        prepare(options(path, *carry, duplicates="drop"), tokenizer, cache=tmp_path / "cache").train.num_documents
        for carry in ((), ("score",))
    ]
    assert kept == [2, 3]


def test_pieces_of_a_document_have_its_numbers(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"text": "fox " * 300, "score": 1.5}, {"text": "dog " * 10, "score": -2}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    cut = options(path, "score", over_length="split", max_length=64, max_loss=1.0)
    data = prepare(cut, tokenizer, cache=tmp_path / "cache").train
    pieces = [
        (int(document), float(score))
        for pack in map(data.pack, range(data.num_packs))
        for document, score in zip(pack.documents, pack.carried["score"], strict=True)
    ]
    assert len(pieces) > 4
    assert set(pieces) == {(0, 1.5), (1, -2.0)}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "no 'score', which data.carry names"),
        ("0.5", "'score' is a string, and data.carry takes numbers"),
        ([1.0], "'score' is a list"),
        (1e39, "takes numbers that fp32 holds"),
        (10**400, "takes numbers that fp32 holds"),
    ],
    ids=["none", "text", "a list", "large", "larger"],
)
def test_rows_without_a_number_are_bad(value: Any, said: str, tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [ROWS[0], {**ROWS[1], "score": value}])
    with pytest.raises(DataError) as caught:
        prepare(options(path, "score"), tokenizer, cache=tmp_path / "cache")
    assert said in str(caught.value)
    assert "rows.jsonl:2" in str(caught.value)


def test_rows_in_memory_are_packed_as_those_of_a_run(tokenizer: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    prepared = prepare(options(path, "score"), tokenizer, cache=tmp_path / "cache")
    held = Packer(prepared.recipe, prepared.forms, 200).pack(ROWS)
    of_run = documents(prepared.train)
    seen = []
    for index in range(held.num_packs):
        pack = held.pack(index)
        assert len(pack.input_ids) <= 200
        assert held.lengths(index).tolist() == pack.lengths.tolist()
        ends = np.cumsum(pack.lengths)[:-1]
        parts = zip(np.split(pack.input_ids, ends), np.split(pack.weights, ends), strict=True)
        for at, (tokens, weights) in enumerate(parts):
            name, row = held.where(int(pack.documents[at]))
            assert name == "rows in memory"
            assert (tokens.tolist(), weights.tolist()) == of_run[row + 1][:2]
            assert pack.carried["score"][at] == ROWS[row]["score"]
            seen.append(row)
    assert sorted(seen) == list(range(len(ROWS)))
    assert held.num_packs == prepared.train.num_packs


def test_columns_of_the_run_are_those_of_rows_in_memory(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"ask": row["instruction"], "say": row["output"]} for row in ROWS[1:3]]
    source = Source(
        path=str(write_rows(tmp_path / "rows.jsonl", rows)), columns={"instruction": "ask", "output": "say"}
    )
    prepared = prepare(options(tmp_path).model_copy(update={"train": (source,)}), tokenizer, cache=tmp_path / "cache")
    packer = Packer(prepared.recipe, prepared.forms, 200)
    (named,), (usual,) = packer.pack(rows).packs, packer.pack(ROWS[1:3]).packs
    assert sorted(named.input_ids.tolist()) == sorted(usual.input_ids.tolist())
    with pytest.raises(UserError, match="fields ask"):
        packer.pack([{"ask": "a"}])
    with pytest.raises(UserError, match="at least one row"):
        packer.pack([])
