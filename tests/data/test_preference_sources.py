"""Sources of pairs, and of other rows, under objectives that learn from one or the other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.conftest import write_rows
from tonnage.config import read_config
from tonnage.data.sources.given import Sources, read_sources
from tonnage.errors import Problem, UserError

ASK = {"role": "user", "content": "Which day?"}
GOOD, BAD = {"role": "assistant", "content": "Friday."}, {"role": "assistant", "content": "Monday."}
PAIR = {"prompt": "Which day?", "chosen": "Friday.", "rejected": "Monday."}
SAFER = {"prompt": "Which day?", "response_0": "Friday.", "response_1": "Monday.", "better_response_id": 0}


def sources(tmp_path: Path, rows: list[dict[str, Any]], *overrides: str, **source: Any) -> Sources:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": "owner/model", "data": {"train": {"path": str(file), **source}}}))
    config = read_config(str(path), list(overrides))
    return read_sources(config.data, config.objective.rows)


def refusal(tmp_path: Path, rows: list[dict[str, Any]], *overrides: str, **source: Any) -> Problem:
    with pytest.raises(UserError) as error:
        sources(tmp_path, rows, *overrides, **source)
    (problem,) = error.value.problems
    return problem


WRITTEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "texts": (PAIR, "preference", "completion"),
    "an instruction": ({"instruction": "Which day?", "chosen": "a", "rejected": "b"}, "preference", "alpaca"),
    "two outputs": ({"instruction": "Which day?", "output": ["a", "b"]}, "preference", "alpaca"),
    "messages": ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "preference", "messages"),
    "a message": ({"messages": [ASK], "chosen": GOOD, "rejected": BAD}, "preference", "messages"),
    "hh": (
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
        "preference",
        "messages",
    ),
    "a history": (
        {"instruction": "a", "history": [["b", "c"]], "chosen": "d", "rejected": "e"},
        "preference",
        "messages",
    ),
    "also a completion": ({**PAIR, "completion": "Friday.", "text": "a"}, "preference", "completion"),
    "a better one": (SAFER, "saferlhf", "completion"),
    "a winner": (
        {"conversation_a": [ASK, GOOD], "conversation_b": [ASK, BAD], "winner": "model_a"},
        "arena",
        "messages",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_pairs_are_found_where_they_are_needed(name: str, tmp_path: Path) -> None:
    row, format, written_as = WRITTEN[name]
    for settings in ({}, {"format": format}):
        read = sources(tmp_path, [row], "objective=dpo", **settings)
        assert ([form.format for form in read.forms], read.formats) == ([format], [written_as])
    problem = refusal(tmp_path, [row])
    assert "preferences, of which one answer is chosen and the other one rejected, and objective is supervised" in (
        problem.found
    )
    assert refusal(tmp_path, [row], format=format).found == problem.found
    pasted = re.search(r"objective: (\w+)", problem.change)
    assert pasted is not None
    assert sources(tmp_path, [row], f"objective={pasted[1]}").formats == [written_as]


def test_columns_hold_in_what_is_advised(tmp_path: Path) -> None:
    row = {"ask": "Which day?", "about": "Be brief.", "yes": "Friday.", "no": "Monday."}
    columns = {"question": "ask", "system": "about", "chosen": "yes", "rejected": "no"}
    assert sources(tmp_path, [row], "objective=dpo", columns=columns).formats == ["completion"]
    for settings in ({}, {"format": "preference"}):
        change = refusal(tmp_path, [row], columns=columns, **settings).change
        pasted = re.search(r"data\.train: (\{.*\})", change)
        assert pasted is not None
        assert yaml.safe_load(pasted[1])["columns"] == {"prompt": "ask", "system": "about", "completion": "yes"}
        (form,) = sources(tmp_path, [row], **yaml.safe_load(pasted[1])).forms
        assert form.format == "completion"


def test_answers_of_several_messages_are_advised_with_their_prompt(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "look_up", "arguments": {}}]}
    row = {"prompt": [ASK], "chosen": [call, {"role": "tool", "content": "5"}, GOOD], "rejected": [BAD]}
    assert "format: completion, columns: {completion: chosen}" in refusal(tmp_path, [row]).change
    assert "format: messages, columns: {messages: chosen}" in refusal(tmp_path, [row | {"chosen": [ASK, GOOD]}]).change


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"instruction": "a", "output": "b"}, "alpaca"),
        ({"messages": [ASK, GOOD]}, "messages"),
        ({"text": "a", "instruction": "a", "output": "b"}, "alpaca or text"),
    ],
)
def test_other_rows_are_refused_where_pairs_are_needed(row: dict[str, Any], form: str, tmp_path: Path) -> None:
    problem = refusal(tmp_path, [row], "objective=dpo")
    assert f"rows of the form {form} (fields: " in problem.found
    assert "preference (chosen, rejected)" in problem.needed
    assert "objective: supervised" in problem.change
    if " or " not in form:
        assert (
            f"format: {form}, whose rows are no pairs" in refusal(tmp_path, [row], "objective=dpo", format=form).found
        )
        assert sources(tmp_path, [row], "objective=supervised").formats == [form]


def test_a_format_of_other_rows_is_to_be_left_out_where_they_are_pairs(tmp_path: Path) -> None:
    row = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    settings: dict[str, Any] = {"format": "messages", "columns": {"messages": "chosen"}}
    assert sources(tmp_path, [row], **settings).formats == ["messages"]
    problem = refusal(tmp_path, [row], "objective=dpo", **settings)
    assert "leave format and columns of this source out; or objective: supervised" in problem.change


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, "a completion with a label of true or false"),
        ({"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}, "preferences of steps"),
        ({"prompt": "a", "answers": [{"answer": "b", "rank": 1}] * 3}, "'answers' is a list of 3 answers: a ranking"),
        ({"question": "a", "good": "b", "bad": "c"}, "rows with the fields question, good, bad"),
    ],
)
def test_rows_of_no_form_are_named(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    problem = refusal(tmp_path, [row, row], "objective=dpo")
    assert reason in problem.found
    assert "preference (chosen, rejected)" in problem.needed
    assert problem.change
    if "label" not in row:
        assert reason in refusal(tmp_path, [row, row]).found
    if "question" in row:
        assert "columns: {prompt: ..., chosen: ..., rejected: ...}" in problem.change


def test_presets_of_pairs_are_advised_for_pairs_alone(tmp_path: Path) -> None:
    row = {"prompt": "Which day?", "response_1": "a", "response_2": "b", "preference_strength": -2}
    assert "format: helpsteer2" in refusal(tmp_path, [row], "objective=dpo").change
    assert "helpsteer2" not in refusal(tmp_path, [row]).change


def test_a_few_pairs_among_other_rows_are_bad_rows(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": [ASK, GOOD]}, {"messages": [ASK], "chosen": GOOD, "rejected": BAD}]
    assert sources(tmp_path, rows).formats == ["messages"]
    assert sources(tmp_path, [{"messages": [ASK, GOOD], "chosen": None, "rejected": None}]).formats == ["messages"]


def test_all_sources_must_hold_pairs(tmp_path: Path) -> None:
    pairs, others = write_rows(tmp_path / "a.jsonl", [PAIR]), write_rows(tmp_path / "b.jsonl", [{"text": "a"}])
    path = tmp_path / "config.yaml"
    data = {"train": [str(pairs), str(others)], "validation": str(others)}
    path.write_text(json.dumps({"model": "owner/model", "objective": "dpo", "data": data}))
    with pytest.raises(UserError) as error:
        read_sources(read_config(str(path)).data, purpose="pairs")
    assert [problem.where for problem in error.value.problems] == [f"data: {others}"] * 2
