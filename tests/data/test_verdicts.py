"""Columns that say which answers are good ones, and those that only look like it."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tonnage.config import Data, Source
from tonnage.data import DataError, prepare
from tonnage.forms.formats import Form
from tonnage.forms.reader import Reader
from tonnage.forms.verdicts import MOST_VALUES, OTHER, Values, verdict_of

VERDICTS: tuple[tuple[str, list[Any]], ...] = (
    ("label", [1, 0]),
    ("label", ["1", "0"]),
    ("label", [1.0, 0.0]),
    ("label", [1, -1]),
    ("label", ["+1", "-1"]),
    ("label", ["TRUE", "False "]),
    ("label", ["yes", "No"]),
    ("Label", ["Y", "N"]),
    ("label", ["desirable", "undesirable"]),
    ("label", ["positive", "negative"]),
    ("label", [1, 0, None, "", "null"]),
    ("label", [1]),
    ("label", ["true"]),
    ("label", ["desirable"]),
    ("kto_label", [0]),
    ("feedback", ["thumbs_up", "thumbs_down"]),
    ("feedback", ["Thumbs Up", "thumbs-down"]),
    ("user_feedback", ["\U0001f44d\U0001f3fd", "\U0001f44e"]),
    ("feedback", [":+1:", ":-1:"]),
    ("feedback", [1, 0, -1]),
    ("reaction", ["\u2705", "\u274c"]),
    ("rating", ["good", "bad"]),
    ("rating", [0, 1]),
    ("score", [0.0, 1.0]),
    ("reward", [-1, 1]),
    ("quality", ["high", "low"]),
    ("x", ["Good", "not good"]),
    ("x", ["accepted", "rejected"]),
    ("x", ["approve", "disapprove"]),
    ("x", ["like", "dislike"]),
    ("x", ["correct", "incorrect"]),
    ("x", ["helpful", "unhelpful"]),
    ("x", ["chosen", "rejected"]),
    ("x", ["pass", "fail"]),
    ("is_good", [True, False]),
    ("isCorrect", [True, False]),
    ("accepted", ["true", "false"]),
    ("verdict", ["yes", "no"]),
    ("verdict", ["rejected"]),
    ("preference", [1, 0]),
    ("metadata.label", [1, 0]),
    ("messages[].rating", [1, -1]),
    ("is_bad", [True, False]),
    ("is_correct_answer", [True, False]),
    ("label", ["win", "lose"]),
    ("vote", ["up", "down"]),
    ("preference", ["preferred", "dispreferred"]),
    ("verdict", ["Correct.", "INCORRECT"]),
    ("response_quality", ["High", "Low"]),
    ("label", ["+", "-"]),
)
OTHERS: tuple[tuple[str, list[Any]], ...] = (
    ("label", ["geography", "spelling"]),
    ("label", [0, 1, 2]),
    ("label", [0, 0.5, 1]),
    ("label", ["good", "fair", "bad"]),
    ("label", ["geography"]),
    ("label", ["high"]),
    ("split", ["train", "test"]),
    ("lang", ["en", "no"]),
    ("language", ["no"]),
    ("source_id", [0, 1]),
    ("is_english", [True, False]),
    ("has_code", ["yes", "no"]),
    ("multi_turn", [1, 0]),
    ("direction", ["up", "down"]),
    ("sentiment", ["positive", "negative"]),
    ("side", ["left", "right"]),
    ("score", [1, 5]),
    ("score", [1]),
    ("is_correct", [True]),
    ("like_count", [0, 1]),
    ("gold_label", [0, 1]),
    ("correct_answer", ["yes", "no"]),
    ("passage", ["yes", "no"]),
    ("rating", list(range(MOST_VALUES + 3))),
    ("feedback", ["It could have been shorter, I think.", "good"]),
    ("label", [["good"], ["bad"]]),
    ("label", [None, ""]),
)


def counted(column: str, values: list[Any], answer: str = "") -> dict[str, int]:
    noted = Values()
    for value in values:
        noted.note(column, value, answer)
    return noted.seen.get(column, {})


@pytest.mark.parametrize(("column", "values"), VERDICTS)
def test_a_verdict_is_seen(column: str, values: list[Any]) -> None:
    assert verdict_of(column, counted(column, values)) is not None


@pytest.mark.parametrize(("column", "values"), OTHERS)
def test_another_column_is_none(column: str, values: list[Any]) -> None:
    assert verdict_of(column, counted(column, values)) is None


def test_the_good_ones_are_named() -> None:
    verdict = verdict_of("label", counted("label", ["No", "yes", "no", "Yes", "yes"]))
    assert verdict is not None
    assert verdict.good == {'"yes"': 2, '"Yes"': 1}
    assert verdict.bad == {'"No"': 1, '"no"': 1}
    assert 'the rows whose label is "yes" or "Yes" to a file of their own' in verdict.change
    turned = verdict_of("is_wrong", counted("is_wrong", [True, False, False]))
    assert turned is not None
    assert turned.good == {"false": 2}


def test_what_the_answer_says_is_no_verdict_on_it() -> None:
    assert counted("label", ["true", "True"], "True, it is.") == {}
    assert counted("label", ["false"], "True, it is.") == {'"false"': 1}


def test_values_are_kept_while_they_are_few_and_short() -> None:
    assert OTHER in counted("label", ["x" * 100, 1])
    assert len(counted("label", list(range(1000)))) == MOST_VALUES + 1


def test_values_inside_of_json_text_and_of_lists_of_one_are_noted() -> None:
    values = Values()
    values.note("meta", '{"label": 1, "of": ["a", "b"]}', "")
    values.note("feedback", [{"value": "good"}], "")
    values.note("text", "{not JSON", "")
    assert values.seen == {
        "meta.label": {"1": 1},
        "meta.of": {OTHER: 1},
        "feedback[].value": {'"good"': 1},
        "text": {'"{not JSON"': 1},
    }


def test_a_label_of_plain_text_says_what_it_is_about() -> None:
    assert verdict_of("label", counted("label", [0, 1]), plain_text=True) is None
    assert verdict_of("label", counted("label", ["good", "bad"]), plain_text=True) is not None


def test_values_of_messages_and_of_objects_are_noted() -> None:
    reader = Reader(Form("messages"))
    asked = {"role": "user", "content": "Which day?"}
    for rating in (1, -1):
        answer = {"role": "assistant", "content": "Friday.", "rating": rating}
        reader.read({"messages": [asked, answer], "meta": {"label": rating, "lang": "en"}})
    assert reader.values.seen == {
        "messages[].rating": {"1": 1, "-1": 1},
        "meta.label": {"1": 1, "-1": 1},
        "meta.lang": {'"en"': 2},
    }


def rows_of(form: str, column: str, values: list[Any]) -> list[dict[str, Any]]:
    def row(number: int, value: Any) -> dict[str, Any]:
        asked, said = f"Which day, {number}?", f"Day {number}."
        match form:
            case "messages":
                turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
                return {"messages": turns, column: value}
            case "alpaca":
                return {"instruction": asked, "output": said, column: value}
        return {"prompt": asked, "completion": said, column: value}

    return [row(number, value) for number, value in enumerate(values)]


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
@pytest.mark.parametrize("form", ["messages", "alpaca", "completion", "csv"])
def test_rows_with_a_verdict_are_refused(form: str, on_bad_row: Any, tmp_path: Path, tokenizer: Any) -> None:
    def prepared(column: str, values: list[Any], **carrying: Any) -> Counter[str]:
        rows = [{**row, **({"number": 3} if carrying else {})} for row in rows_of(form, column, values)]
        path = tmp_path / f"{column}.{'csv' if form == 'csv' else 'jsonl'}"
        if form == "csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = Data(train=(Source(path=str(path)),), max_length=512, on_bad_row=on_bad_row, **carrying)
        return Counter(prepare(options, tokenizer, cache=tmp_path / "cache").account.total.unread)

    # All good ones come first: a look at the first rows is not enough.
    with pytest.raises(DataError) as refused:
        prepared("label", [1] * 100 + [0])
    assert "a field 'label' that says whether the answer is a good one" in refused.value.problems[0].found
    with pytest.raises(DataError, match="feedback"):
        prepared("feedback", ["thumbs_up", "thumbs_down"])
    assert prepared("topic", [1] * 100 + [0])["topic"] == 101
    if form != "csv":  # whose values are texts
        assert prepared("label", [1, 0], carry=("number",))["label"] == 2


def test_a_verdict_is_seen_over_all_files_of_a_source(tmp_path: Path, tokenizer: Any) -> None:
    for name, value in (("a", 1), ("b", 0)):
        lines = [json.dumps(row) + "\n" for row in rows_of("completion", "score", [value])]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    with pytest.raises(DataError, match=r"a field 'score'.*\(1 in 1, 0 in 1 rows\)"):
        prepare(
            Data(train=(Source(path=str(tmp_path / "*.jsonl")),), max_length=64), tokenizer, cache=tmp_path / "cache"
        )
