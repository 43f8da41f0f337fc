"""What the model is asked: what stands before the answer in training, and what cannot be asked is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from report.recorded import decided
from tiny import write_rows
from tonnage.errors import UserError
from tonnage.files.reading import read_record
from tonnage.rundir.samples import Prompts


def asked(folder: Path, prompts: int | str, room: int = 20, **keys: Any) -> Prompts:
    run = decided(folder, evaluate={"prompts": prompts, "max_new_tokens": room}, **keys)
    return read_record(run.prompts, Prompts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompts")


def test_validation_rows_and_the_same_rows_of_a_file_are_asked_alike(folder: Path) -> None:
    of_rows = asked(folder, 3)
    rows = []
    for prompt in of_rows.prompts:
        assert prompt.expected is not None
        assert prompt.text.endswith(prompt.expected.lower() + "\n\n") or prompt.expected.lower() in prompt.text
        rows.append({"instruction": "Say in capitals.", "input": prompt.expected.lower(), "output": prompt.expected})
    path = write_rows(folder / "asked.jsonl", rows)
    assert asked(folder, str(path)) == of_rows
    assert of_rows.stop_tokens == [256]


def test_an_answer_has_the_room_that_a_pack_leaves(folder: Path) -> None:
    for prompt in asked(folder, 5, room=200).prompts:
        assert prompt.room == min(200, 128 - len(prompt.ids))


def test_what_cannot_be_asked_is_refused(folder: Path) -> None:
    short, long = {"prompt": "a", "completion": "b"}, {"prompt": "a" * 128, "completion": "b"}
    path = write_rows(folder / "long.jsonl", [short, long])
    with pytest.raises(UserError, match="row 2 has 128 tokens before its answer") as error:
        asked(folder, str(path))
    assert "fewer than 128, which is data.max_length" in str(error.value)
    path = write_rows(folder / "many.jsonl", [short] * 201)
    with pytest.raises(UserError, match="more than 200 rows"):
        asked(folder, str(path))
    text = write_rows(folder / "text.jsonl", [{"text": f"nothing but text {number}"} for number in range(40)])
    data = {"train": str(text), "validation": 0.2, "max_length": 128, "cache": str(folder / "cache")}
    with pytest.raises(UserError, match="no validation row has anything before its answer"):
        asked(folder, 2, data=data)
