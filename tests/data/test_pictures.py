"""Rows that a run keeps for its report: of every source some, in pieces that count exactly where the mask does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.conftest import alpaca_rows, write_rows
from tonnage.config import Data, Source
from tonnage.data import prepare
from tonnage.data.pictures import MOST_TOKENS, ROWS, pictures, pieces


def test_of_every_source_there_are_rows_with_their_masks(tmp_path: Path, tokenizer: Any) -> None:
    long = {"instruction": "tell", "output": "word " * MOST_TOKENS}
    files = [
        write_rows(tmp_path / f"{name}.jsonl", [*alpaca_rows(number), long])
        for name, number in (("many", 60), ("few", 3), ("held", 4))
    ]
    train, held = (Source(path=str(files[0])), Source(path=str(files[1]))), (Source(path=str(files[2])),)
    options = Data(train=train, validation=held, max_length=8192)
    prepared = prepare(options, tokenizer, cache=tmp_path / "cache")
    found = pictures(prepared, 0)["sources"]
    assert [Path(one["name"]).stem for one in found] == ["many", "few", "held"]
    assert [one["role"] for one in found] == ["train", "train", "validation"]
    assert [len(one["rows"]) for one in found] == [ROWS, 4, 5]
    for source in found:
        for row in source["rows"]:
            text = "".join(piece["text"] for piece in row["pieces"])
            counting = "".join(piece["text"] for piece in row["pieces"] if piece["weight"] > 0)
            assert row["file"] == source["name"]
            assert counting
            assert counting in text
            assert 0 < row["supervised"] < row["tokens"]
    longest = max((row for one in found for row in one["rows"]), key=lambda row: row["tokens"])
    assert longest["tokens"] > MOST_TOKENS
    assert sum(len(tokenizer(piece["text"])["input_ids"]) for piece in longest["pieces"]) < MOST_TOKENS * 1.1


def test_pieces_end_where_anything_changes() -> None:
    class Letters:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(map(chr, ids))

    found = pieces([97, 98, 99, 100, 101], [0.0, 0.0, 1.0, 0.5, 0.5], Letters(), special={97, 101})
    assert [(one.text, one.weight, one.special) for one in found] == [
        ("a", 0.0, True),
        ("b", 0.0, False),
        ("c", 1.0, False),
        ("d", 0.5, False),
        ("e", 0.5, True),
    ]
    assert pieces([], [], Letters()) == []
