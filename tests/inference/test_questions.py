"""Rows of every form as questions, with and without answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from tonnage.config import Source
from tonnage.errors import UserError
from tonnage.inference.questions import Question, read_questions

USER = {"role": "user", "content": "Hi"}
HO, HE = ({"role": "assistant", "content": words} for words in ("Ho", "He"))
FORMS: dict[str, tuple[dict[str, Any], list[str], str | None]] = {
    "alpaca": ({"instruction": "Add", "input": "1 2", "output": "3"}, ["Add\n\n1 2"], "3"),
    "alpaca unanswered": ({"instruction": "Add", "input": "1 2"}, ["Add\n\n1 2"], None),
    "alpaca, empty answer": ({"instruction": "Add", "output": ""}, ["Add"], None),
    "prompt": ({"prompt": "Once"}, ["Once"], None),
    "completion": ({"prompt": "Once", "completion": " upon"}, ["Once"], " upon"),
    "messages": ({"messages": [USER, {"role": "assistant", "content": "Ho"}]}, ["Hi"], "Ho"),
    "messages unanswered": ({"messages": [USER]}, ["Hi"], None),
    "several turns": (
        {"messages": [USER, {"role": "assistant", "content": "Ho"}, USER, {"role": "assistant", "content": "He"}]},
        ["Hi", "Ho", "Hi"],
        "He",
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], "system": "Be brief"},
        ["Be brief", "Hi"],
        "Ho",
    ),
    "sharegpt unanswered": ({"conversations": [{"from": "human", "value": "Hi"}]}, ["Hi"], None),
    "messages as prompt": ({"prompt": [USER]}, ["Hi"], None),
    "messages as prompt and completion": ({"prompt": [USER], "completion": [HO]}, ["Hi"], "Ho"),
    "messages beside their prompt": ({"prompt": "Hi", "messages": [USER, HO]}, ["Hi"], "Ho"),
    "a list of messages beside their prompt": ({"prompt": [USER], "messages": [USER, HO]}, ["Hi"], "Ho"),
    "pair": ({"prompt": "2 + 2", "chosen": "4", "rejected": "5"}, ["2 + 2"], "4"),
    "pair of messages": ({"prompt": [USER], "chosen": [HO], "rejected": [HE]}, ["Hi"], "Ho"),
    "pair of conversations": ({"chosen": [USER, HO], "rejected": [USER, HE]}, ["Hi"], "Ho"),
    "pair as text": (
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Ho", "rejected": "\n\nHuman: Hi\n\nAssistant: He"},
        ["Hi"],
        "Ho",
    ),
    "desirable": ({"prompt": "2 + 2", "completion": "4", "label": True}, ["2 + 2"], "4"),
    "undesirable": ({"prompt": "2 + 2", "completion": "5", "label": False}, ["2 + 2"], None),
    "undesirable messages": ({"messages": [USER, HO], "label": False}, ["Hi"], None),
}


def read(path: Path, rows: list[dict[str, Any]], limit: int | None = None) -> list[Question]:
    return read_questions([Source(path=str(tiny.write_rows(path / "rows.jsonl", rows)))], limit)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_row_is_a_question(name: str, tmp_path: Path) -> None:
    row, said, answer = FORMS[name]
    (question,) = read(tmp_path, [row])
    assert [message["content"] for message in question.conversation.messages] == said
    assert question.answer == answer
    assert question.row == row


@pytest.mark.parametrize(
    ("source", "row", "answer"),
    [
        ({"format": "labelled"}, {"prompt": "2 + 2", "completion": "5", "label": 0}, None),
        ({"format": "preference"}, {"prompt": "2 + 2", "chosen": "4", "rejected": "5"}, "4"),
        ({"columns": {"prompt": "q"}}, {"q": "2 + 2", "question": "?", "chosen": "4", "rejected": "5"}, "4"),
        ({"format": "completion"}, {"prompt": "2 + 2", "messages": [USER]}, None),
    ],
)
def test_a_source_says_what_its_rows_are(
    source: dict[str, Any], row: dict[str, Any], answer: str | None, tmp_path: Path
) -> None:
    path = str(tiny.write_rows(tmp_path / "rows.jsonl", [row]))
    (question,) = read_questions([Source(path=path, **source)])
    assert [message["content"] for message in question.conversation.messages] == ["2 + 2"]
    assert question.answer == answer


def test_the_first_rows_are_taken_in_order(tmp_path: Path) -> None:
    rows = [{"prompt": str(number)} for number in range(10)]
    assert [question.row["prompt"] for question in read(tmp_path, rows, 3)] == ["0", "1", "2"]
    assert len(read(tmp_path, rows)) == 10


def test_all_rows_that_cannot_be_asked_are_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"text": "plain"},
        {"question": "a"},
        {"messages": [{"role": "poet", "content": "a"}]},
    ]
    with pytest.raises(UserError) as caught:
        read(tmp_path, rows)
    found = [(problem.where.rpartition(":")[2], problem.found) for problem in caught.value.problems]
    assert [number for number, _ in found] == ["2", "3", "4"]
    assert "plain text" in found[0][1]
    assert "question" in found[1][1]
    assert "poet" in found[2][1]


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="20 more rows"):
        read(tmp_path, [{"text": "plain"}] * 25)
