"""Refusals of rows: what they advise is pasted into the config, in a file and on the command line, and works."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data.conftest import alpaca_rows, write_rows
from tonnage.config import read_config
from tonnage.data import Account, DataError, ModelFacts, Prepared, prepare
from tonnage.errors import UserError
from tonnage.forms.advice import advice
from tonnage.forms.values import written

SAID = {"role": "assistant", "content": "Friday."}
ASK = {"role": "user", "content": "Which day?"}
Y = [{"from": "human", "value": "Which day?"}]


def prepared(tmp_path: Path, tokenizer: Any, data: dict[str, Any], *overrides: str, positions: int = 4096) -> Prepared:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": "owner/model", "data": {"max_length": 256, **data}}, allow_unicode=True))
    config = read_config(str(path), list(overrides))
    return prepare(config.data, tokenizer, model=ModelFacts(positions), cache=tmp_path / "cache")


def refusal(tmp_path: Path, tokenizer: Any, data: dict[str, Any], **changes: Any) -> UserError:
    with pytest.raises(UserError) as error:
        prepared(tmp_path, tokenizer, data, **changes)
    return error.value


def said(prepared: Prepared) -> list[str]:
    """What is trained of each document."""
    found = []
    for number in range(prepared.train.num_packs):
        pack = prepared.train.pack(number)
        borders = np.cumsum(pack.lengths)[:-1]
        for ids, weights in zip(np.split(pack.input_ids, borders), np.split(pack.weights, borders), strict=True):
            found.append(str(prepared.tokenizer.decode(ids[weights > 0])))
    return sorted(found)


PASTED = re.compile(r"\bdata\.([\w.]+): (\{.*\}|[^ ,;]+)")


def follow(change: str, tmp_path: Path, tokenizer: Any, data: dict[str, Any], **changes: Any) -> Prepared:
    """What comes of what a sentence says to write, in the file and as an override, which is the same."""
    found = PASTED.search(change)
    assert found is not None, change
    key, value = found[1], found[2]
    assert "." not in key
    over = prepared(tmp_path, tokenizer, data, f"data.{key}={value}", **changes)
    file = prepared(tmp_path, tokenizer, {**data, key: yaml.safe_load(value)}, **changes)
    assert file.train.path == over.train.path
    return file


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "a question and its answer": ({"question": "Which day?", "answer": "Friday."}, "format: gsm8k"),
    "a response": ({"instruction": "Which?", "input": "a, b", "response": "Friday."}, "format: gpteacher"),
    "a query": ({"query": "Which day?", "response": "Friday.", "type": "x"}, "format: metamath"),
    "a system prompt": (
        {"system_prompt": "Be brief.", "question": "Which day?", "response": "Friday."},
        "format: openorca",
    ),
    "a problem": ({"problem": "Which day?", "solution": "Friday."}, "format: numina"),
    "an input and a target": ({"kind": "QA", "input": "Which day?", "target": "Friday."}, "format: firefly"),
    "a query and an answer": ({"query": "Which day?", "answer": "Friday."}, "format: codefeedback"),
    "a context": ({"instruction": "Which?", "context": "Or not.", "response": "Friday."}, "format: dolly"),
    "no preset": ({"q": "Which day?", "a": "Friday.", "score": 3}, "columns: {instruction: q, output: a}"),
    "human and assistant": ({"human": "Which day?", "assistant": "Friday."}, "{instruction: human, output: assistant}"),
    "a passage": (
        {"user": "Which day?", "passage": "It says.", "reply": "Friday."},
        "{instruction: user, output: reply, input: passage}",
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("file", ["rows.jsonl", "ro ws: {1}, é.jsonl"])
def test_the_advice_for_rows_of_no_known_form_works(name: str, file: str, tmp_path: Path, tokenizer: Any) -> None:
    row, expected = FORMS[name]
    data = {"train": str(write_rows(tmp_path / file, [row]))}
    (problem,) = refusal(tmp_path, tokenizer, data).problems
    assert problem.found == f"rows with the fields {', '.join(row)}"
    assert expected in problem.change
    (words,) = said(follow(problem.change, tmp_path, tokenizer, data))
    assert re.sub(r"<\|\w+\|>$", "", words) == "Friday."


def test_every_source_is_advised_under_its_own_key(tmp_path: Path, tokenizer: Any) -> None:
    row, _ = FORMS["no preset"]
    odd = str(write_rows(tmp_path / "odd.jsonl", [row]))
    good = str(write_rows(tmp_path / "good.jsonl", alpaca_rows(2)))
    changes = [one.change for one in refusal(tmp_path, tokenizer, {"train": [good, odd], "validation": odd}).problems]
    assert [change.split(":")[0] for change in changes] == ["data.train.1", "data.validation"]
    overrides = [re.sub(r"^(data[\w.]+): ", r"\1=", change) for change in changes]
    assert len(said(prepared(tmp_path, tokenizer, {"train": [good, odd], "validation": odd}, *overrides))) == 3


def test_nothing_is_advised_that_was_not_tried(tmp_path: Path, tokenizer: Any) -> None:
    for row in ({"question": 3, "answer": None}, {"x": "a", "y": "b"}, {"question": "a"}, {"instruction": "a"}):
        assert advice("data.train", "rows.jsonl", row) == ""
    assert "whole trees" in advice("data.train", "rows.jsonl", {"message_id": "1", "parent_id": None, "text": "a"})
    for value in (
        "rows.jsonl",
        "a b",
        "a: b",
        "{x",
        "true",
        "no",
        "é",
        "-",
        "#x",
        "~",
        ".nan",
        "a,b",
        "1",
        "",
        'a"b',
        "a\\b\n",
    ):
        assert yaml.safe_load(f"{{path: {written(value)}}}") == {"path": value}


def test_two_forms_at_once_and_the_way_on(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"instruction": "Which day?", "output": "Friday.", "text": "all of it"}]
    data = {"train": str(write_rows(tmp_path / "rows.jsonl", rows))}
    (problem,) = refusal(tmp_path, tokenizer, data).problems
    assert "several forms: alpaca, text" in problem.found
    assert said(follow(problem.change, tmp_path, tokenizer, data)) == ["Friday.<|endoftext|>"]
    write_rows(tmp_path / "rows.jsonl", [{"instruction": "a", "output": "b"}, {"prompt": "a", "completion": "b"}])
    (problem,) = refusal(tmp_path, tokenizer, data).problems
    assert "several forms in one file: alpaca, completion" in problem.found
    assert problem.change == "write the rows of each form to a file of their own"


PREFERENCES: dict[str, list[dict[str, Any]]] = {
    "a prompt, and answers": [{"prompt": "Which day?", "completion": "x", "chosen": "Friday.", "rejected": "Monday."}],
    "a history, and messages": [{"conversations": Y, "chosen": {"from": "gpt", "value": "Friday."}, "rejected": {}}],
    "a history, and texts": [{"conversations": Y, "chosen": "Friday.", "rejected": "Monday."}],
    "a history as text": [{"messages": json.dumps([ASK]), "chosen": json.dumps([SAID]), "rejected": "[]"}],
    "whole conversations": [{"messages": [ASK, SAID], "chosen": [ASK, SAID], "rejected": [ASK, SAID]}],
    "an instruction": [{"instruction": "Which day?", "output": "x", "chosen": "Friday.", "rejected": "Monday."}],
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_the_advice_for_preferences_works(name: str, tmp_path: Path, tokenizer: Any) -> None:
    data = {"train": str(write_rows(tmp_path / "rows.jsonl", PREFERENCES[name]))}
    (problem,) = refusal(tmp_path, tokenizer, data).problems
    assert "preferences, of which one answer is chosen" in problem.found
    assert problem.change.startswith("learn from both answers: objective: dpo; or train on the chosen answers alone: ")
    found = follow(problem.change, tmp_path, tokenizer, data)
    assert [re.sub(r"<\|\w+\|>", "", words) for words in said(found)] == ["Friday."]
    assert "rejected" in found.account.total.unread or name == "a history, and messages"


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([{"prompt": "a", "chosen": "Friday.", "rejected": "Monday."}], "prompt"),
        ([{"question": "a", "chosen": "Friday.", "rejected": "Monday."}], "question"),
        ([{"chosen": [ASK, SAID], "rejected": [ASK, SAID]}], "messages"),
    ],
)
def test_preferences_that_fit_no_form_are_told_as_well(
    rows: list[dict[str, Any]], kind: str, tmp_path: Path, tokenizer: Any
) -> None:
    data = {"train": str(write_rows(tmp_path / "rows.jsonl", rows))}
    change = refusal(tmp_path, tokenizer, data).problems[0].change
    found = follow(change, tmp_path, tokenizer, data)
    assert [re.sub(r"<\|\w+\|>", "", words) for words in said(found)] == ["Friday."]
    assert found.account.total.unread == {"rejected": 1}


def test_the_advice_for_labels_pictures_and_roles_works(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "Which day?", "completion": day, "label": day == "Friday."} for day in ("Friday.", "Monday.")]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    problem, _ = refusal(tmp_path, tokenizer, {"train": str(file)}).problems
    assert "write the rows whose label is true to a file of their own, without that field" in problem.change
    good = [{name: value for name, value in row.items() if name != "label"} for row in rows if row["label"]]
    assert len(said(prepared(tmp_path, tokenizer, {"train": str(write_rows(file, good))}))) == 1

    seen = {"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}, SAID]}
    data = {"train": str(write_rows(file, [seen, {"messages": [ASK, SAID]}]))}
    problem, _ = refusal(tmp_path, tokenizer, data).problems
    assert "(data.on_bad_row: skip)" in problem.change
    assert len(said(follow(problem.change.replace(")", " )"), tmp_path, tokenizer, data))) == 1

    data = {"train": str(write_rows(file, [{"messages": [{"role": "Old: Wizard", "content": "a"}, SAID]}]))}
    problem, _ = refusal(tmp_path, tokenizer, data).problems
    roles = re.search(r"roles: (\{.*\}) \(", problem.change)
    assert roles is not None
    assert prepared(tmp_path, tokenizer, data, f"data.train.roles={roles[1]}").account.total.rows_packed == 1


# Columns


@pytest.mark.parametrize(
    ("columns", "message", "change"),
    [
        ({"sytem": "about"}, "a field 'sytem', which rows of form alpaca do not have", "did you mean system?"),
        ({"messages": "about"}, "a field 'messages', which rows of form alpaca do not have", ""),
        (
            {"system": "abuot"},
            "'system' stands in 'abuot', and no row has such a column",
            "correct it, or leave it out",
        ),
    ],
)
def test_columns_that_are_not_there_are_refused(
    columns: dict[str, str], message: str, change: str, tmp_path: Path, tokenizer: Any
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b", "about": "Be brief."}])
    for form in ("auto", "gsm8k", "alpaca"):
        own = {} if form == "gsm8k" else {"instruction": "question", "output": "answer"}
        source = {"path": str(file), "format": form, "columns": {**own, **columns}}
        (problem,) = refusal(tmp_path, tokenizer, {"train": source}).problems
        assert message in problem.found
        assert problem.change == change
        source["columns"] = {**own, "system": "about"}
        assert prepared(tmp_path, tokenizer, {"train": source}).account.total.unread == {}


def test_a_preset_does_without_columns_that_rows_may_lack(tmp_path: Path, tokenizer: Any) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"question": "a", "response": "b"}])
    found = prepared(tmp_path, tokenizer, {"train": {"path": str(file), "format": "openorca"}})
    assert said(found) == ["b<|endoftext|>"]


def test_a_first_row_that_is_too_large_hides_no_other(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.data.reading.rows.MAX_ROW_BYTES", 400)
    monkeypatch.setattr("tonnage.data.sources.files.PART_BYTES", 200)
    large, good = {"messages": [ASK, {**SAID, "content": "x" * 1000}]}, {"messages": [ASK, SAID]}
    file = write_rows(tmp_path / "rows.jsonl", [large, good, good])
    account = prepared(tmp_path, tokenizer, {"train": str(file), "on_bad_row": "skip", "duplicates": "keep"}).account
    assert (account.total.rows_read, account.total.rows_bad) == (3, 1)
    only = write_rows(tmp_path / "large.jsonl", [large])
    error = refusal(tmp_path, tokenizer, {"train": str(only)})
    assert "no readable row; the first one" in str(error)
    assert "take it out of the file" in str(error)


# What is counted, and how often it is said


def test_what_nobody_reads_stands_in_the_account_the_most_frequent_first(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {"messages": [{**ASK, "id": 1}, SAID], "meta": {"a": 1}, "score": number or None, "note": ""}
        for number in range(4)
    ]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    account = prepared(tmp_path, tokenizer, {"train": str(file)}).account
    assert list(account.total.unread.items()) == [("meta", 4), ("messages[].id", 4), ("score", 3)]
    assert Account.from_json(json.loads(json.dumps(account.to_json()))) == account


def bad_lines(tmp_path: Path, tokenizer: Any, rows: Sequence[object], **data: Any) -> list[str]:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    error = refusal(tmp_path, tokenizer, {"train": str(file), **data})
    assert isinstance(error, DataError)
    return [str(problem).replace(str(tmp_path), "") for problem in error.problems]


def test_equal_bad_rows_are_one_line_with_a_count(tmp_path: Path, tokenizer: Any) -> None:
    rows: list[Any] = [*alpaca_rows(2), *[{"instruction": "a", "output": ""}] * 20, {"instruction": "", "output": "b"}]
    first, second, whole = bad_lines(tmp_path, tokenizer, rows)
    assert first.startswith("/rows.jsonl:3, :4, :5, :6 and 16 more: 'output' is empty")
    assert second.startswith("/rows.jsonl:23: 'instruction' is empty")
    assert "21 of 23 rows are bad; all are in " in whole


def test_many_reasons_are_not_all_shown_and_that_is_said(tmp_path: Path, tokenizer: Any) -> None:
    rows: list[Any] = [*alpaca_rows(1), *[{"instruction": "a", f"field {n}": 1} for n in range(30)]]
    lines = bad_lines(tmp_path, tokenizer, rows)
    assert len(lines) == 21
    assert "30 of 31 rows are bad; 20 of 30 reasons are above; all are in " in lines[-1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{'a': 1}\n", "rows.jsonl:1: not JSON"),
        (b'\n\n"a"\n"b"\n', 'rows.jsonl:3: the row is a string, not an object with fields: write {"text": "..."}'),
        (b"\xff\n", "rows.jsonl:1: byte 0 of the row is not UTF-8"),
        (b'{"a": 1, "a": 2}\n', "rows.jsonl:1: field 'a' stands twice"),
        (b'{"text": "cut', "rows.jsonl:1: not JSON"),
    ],
)
def test_no_readable_row_says_why_the_first_was_not(
    content: bytes, reason: str, tmp_path: Path, tokenizer: Any
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    (problem,) = refusal(tmp_path, tokenizer, {"train": str(tmp_path / "rows.jsonl")}).problems
    assert problem.found.startswith("no readable row; the first one: ")
    assert reason in problem.found


# Lengths


@pytest.mark.parametrize(("positions", "advised"), [(4096, True), (388, False), (256, False), (None, True)])
def test_a_length_that_the_model_has_no_positions_for_is_never_advised(
    positions: int | None, advised: bool, tmp_path: Path, tokenizer: Any
) -> None:
    rows = [*alpaca_rows(20), {"instruction": "long", "output": "fox " * 350 + "end"}]
    data = {"train": str(write_rows(tmp_path / "rows.jsonl", rows))}
    changes: Any = {"positions": positions}
    (problem,) = refusal(tmp_path, tokenizer, data, **changes).problems
    longest = re.search(r"the longest has (\d+)", problem.found)
    assert longest is not None
    assert (f"data.max_length: {longest[1]}" in problem.change) == advised
    if positions:
        assert advised or f"the model has positions for {positions}" in problem.needed
    assert follow(problem.change, tmp_path, tokenizer, {**data, "max_loss": 1}, **changes).train.num_packs > 0
    (problem,) = refusal(tmp_path, tokenizer, {**data, "over_length": "drop"}, **changes).problems
    assert ("or a larger data.max_length" in problem.change) == (positions != 256)
    found = follow(problem.change, tmp_path, tokenizer, {**data, "over_length": "drop"}, **changes)
    assert found.account.total.rows_dropped == 1
