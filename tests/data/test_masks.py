"""What of a conversation is trained: ``train_on`` and what rows say themselves, marked by hand.

Where turns begin and end in all kinds of templates is held by ``test_constructs``.
"""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data.conftest import write_rows
from data.test_constructs import (
    AGAIN,
    ASK,
    CHATML,
    FOUR,
    OPENED_THOUGHT,
    SIX,
    SYSTEM,
    THINK_FOUR,
    THINK_SIX,
    A,
    Construct,
    U,
    marked,
    prepared_as,
    tokenizer_of,
)
from tonnage.config import Data, Source
from tonnage.data import DataError, Prepared, encode_prompt, prepare

CHAT = [ASK, FOUR, AGAIN, SIX]
BOTH = f"{U}What is 2+2?<|im_end|>\n{A}⟦It is 4.<|im_end|>⟧\n{U}And 3+3?<|im_end|>\n{A}⟦It is 6.<|im_end|>⟧\n"
PARTS: list[dict[str, Any]] = [
    {"type": "text", "text": "It is "},
    {"type": "text", "text": "4", "train": False},
    {"type": "text", "text": "."},
]

MARKED: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "assistant": ("assistant", CHAT, BOTH),
    "assistant, one not": (
        "assistant",
        [ASK, {**FOUR, "loss": False}, AGAIN, SIX],
        BOTH.replace("⟦It is 4.<|im_end|>⟧", "It is 4.<|im_end|>"),
    ),
    "assistant, a part not": (
        "assistant",
        [ASK, {**FOUR, "content": PARTS}, AGAIN, SIX],
        BOTH.replace("⟦It is 4.<|im_end|>⟧", "⟦It is ⟧4⟦.<|im_end|>⟧"),
    ),
    "assistant, the last part not, nor what closes the turn": (
        "assistant",
        [ASK, {**FOUR, "content": [*PARTS[:1], {**PARTS[2], "text": "4.", "train": 0}]}, AGAIN, SIX],
        BOTH.replace("⟦It is 4.<|im_end|>⟧", "⟦It is ⟧4.<|im_end|>"),
    ),
    "last": ("last", CHAT, BOTH.replace("⟦It is 4.<|im_end|>⟧", "It is 4.<|im_end|>")),
    "last, a part of it not": (
        "last",
        [AGAIN, SIX, ASK, {**FOUR, "content": PARTS}],
        f"{U}And 3+3?<|im_end|>\n{A}It is 6.<|im_end|>\n{U}What is 2+2?<|im_end|>\n{A}⟦It is ⟧4⟦.<|im_end|>⟧\n",
    ),
    "all": ("all", CHAT, "<|im_start|>⟦" + BOTH.replace("⟦", "").replace("⟧", "").removeprefix("<|im_start|>") + "⟧"),
    "all, an answer not": (
        "all",
        [ASK, {**FOUR, "train": 0}, AGAIN, SIX],
        f"<|im_start|>⟦user\nWhat is 2+2?<|im_end|>\n{A}⟧It is 4.<|im_end|>⟦\n{U}And 3+3?<|im_end|>\n"
        f"{A}It is 6.<|im_end|>\n⟧",
    ),
    "all, a part of an answer not": (
        "all",
        [ASK, {**FOUR, "content": PARTS}],
        f"<|im_start|>⟦user\nWhat is 2+2?<|im_end|>\n{A}It is ⟧4⟦.<|im_end|>\n⟧",
    ),
}


@pytest.mark.parametrize("name", MARKED)
def test_what_is_trained_is_as_marked_by_hand(name: str, tmp_path: Path) -> None:
    train_on, messages, expected = MARKED[name]
    assert marked(prepared_as(Construct(CHATML, messages, ""), tmp_path, train_on=train_on)) == expected


@pytest.mark.parametrize(
    ("train_on", "messages", "reason"),
    [
        ("assistant", [ASK, {**FOUR, "loss": 0}], "nothing_supervised"),
        ("last", [ASK, FOUR, AGAIN, {**SIX, "weight": 0}], "nothing_supervised"),
        ("last", [ASK, FOUR, AGAIN, {**SIX, "content": [{**PARTS[1], "train": 0}]}], "nothing_supervised"),
        ("all", [{**ASK, "train": False}, FOUR], "unsupported"),
    ],
)
def test_a_row_of_which_nothing_may_be_trained_is_refused(
    train_on: str, messages: list[dict[str, Any]], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as error:
        prepared_as(Construct(CHATML, messages, ""), tmp_path, train_on=train_on)
    assert error.value.account.total.bad_kinds == {reason: 1}


def test_weights_of_messages_parts_and_rows_are_multiplied(tmp_path: Path) -> None:
    messages = [ASK, {**FOUR, "content": [{**PARTS[0], "weight": 0.5}, PARTS[2]], "loss": 0.5}, AGAIN, SIX]
    file = write_rows(tmp_path / "rows.jsonl", [{"messages": messages, "loss_weight": 0.5}])
    options = Data(train=(Source(path=str(file)),))
    pack = prepare(options, tokenizer_of(Construct(CHATML, [], "")), cache=tmp_path / "cache").train.pack(0)
    runs = [float(one) for at, one in enumerate(pack.weights) if at and one and one != pack.weights[at - 1]]
    assert runs == [0.125, 0.25, 0.5]


def of_rows(tmp_path: Path, rows: list[dict[str, Any]], **changes: Any) -> Prepared:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    tokenizer = changes.pop("tokenizer", None) or tokenizer_of(Construct(CHATML, [], ""))
    return prepare(Data(train=(Source(path=str(file)),), pack=False, **changes), tokenizer, cache=tmp_path / "cache")


def test_text_segments_and_tokens_are_trained_as_they_say(tmp_path: Path) -> None:
    assert marked(of_rows(tmp_path, [{"text": "One two."}])) == "O⟦ne two.<|endoftext|>⟧"
    assert marked(of_rows(tmp_path, [{"text": "One two.<|endoftext|>"}])) == "O⟦ne two.<|endoftext|>⟧"
    segments = [("Ask: ", False), ("four", True), (" or ", False), ("five.", True)]
    for ends, closed in (("", True), ("<|endoftext|>", True)):
        row: dict[str, Any] = {"segments": [{"text": text, "label": label} for text, label in segments]}
        row["segments"][-1]["text"] += ends
        assert marked(of_rows(tmp_path, [row])) == "Ask: ⟦four⟧ or ⟦five.<|endoftext|>⟧", closed
    row["segments"].append({"text": "", "label": False})
    assert marked(of_rows(tmp_path, [row])) == "Ask: ⟦four⟧ or ⟦five.<|endoftext|>⟧"
    last = {"segments": [{"text": "four", "label": 1}, {"text": " ask", "label": 0}]}
    assert marked(of_rows(tmp_path, [last])) == "f⟦our⟧ ask<|endoftext|>"
    ids = tokenizer_of(Construct(CHATML, [], ""))("Ask: four", add_special_tokens=False)["input_ids"]
    row = {"input_ids": [*ids, 0, 0], "labels": [*[-100] * 5, *ids[5:], -100, -100]}
    row["attention_mask"] = [1] * len(ids) + [0, 0]
    assert marked(of_rows(tmp_path, [row])) == "Ask: ⟦four⟧"


def test_a_token_that_the_tokenizer_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:1: token 1000000, and the tokenizer's highest is \d+"):
        of_rows(tmp_path, [{"input_ids": [1, 10**6], "labels": [1, 10**6]}])


# What the account says of templates


def test_the_account_counts_what_was_trimmed_moved_and_left_out(tmp_path: Path) -> None:
    closed = of_rows(tmp_path, [{"messages": [ASK, {**FOUR, "content": "It is 4.<|im_end|>"}]}, {"messages": CHAT}])
    assert closed.account.total.rows_trimmed == 1
    moved = of_rows(tmp_path, [{"messages": [ASK, {**FOUR, "content": "\nIt is 4."}]}])
    assert moved.account.total.turns_moved == 1
    thought = Construct(OPENED_THOUGHT, [ASK, THINK_FOUR, AGAIN, THINK_SIX], "")
    left = prepared_as(thought, tmp_path)
    assert left.account.total.rows_without_thoughts == 1
    assert prepared_as(replace(thought, messages=CHAT), tmp_path).account.total.rows_without_thoughts == 0


DATED = "{{- '<|im_start|>system\\n' + strftime_now('%Y-%m-%d') + (style or '') + '<|im_end|>\\n' -}}" + CHATML


def test_date_and_arguments_are_in_the_account_and_the_key(tmp_path: Path) -> None:
    one = Construct(DATED, [ASK, FOUR], "")
    day = "2024-03-05"
    first = prepared_as(one, tmp_path, date=day, template_arguments={"style": "short"})
    assert marked(first).startswith("<|im_start|>system\n2024-03-05short<|im_end|>")
    shown = first.account.to_json()["options"]
    assert (shown["date"], shown["template_arguments"]) == ("2024-03-05", {"style": "short"})
    other = prepared_as(one, tmp_path, date=day, template_arguments={"style": "long"})
    assert first.train.path != other.train.path
    today = prepared_as(one, tmp_path)
    assert today.account.options["date"] == today.date == datetime.date.today().isoformat()
    assert prepared_as(replace(one, template=CHATML), tmp_path, date=day).account.options["date"] == ""


@pytest.mark.parametrize("value", [True, False, None, 3, 0.5, "a 'b' \"c\" {% %} {{ d }}\n\u00e9", ""])
@pytest.mark.parametrize("begins", ["", "\n", "  ", "  {% set y = 1 %}"])
def test_what_a_template_was_told_it_is_told_ever_after(value: object, begins: str, tmp_path: Path) -> None:
    one = Construct(f"{begins}{{% if x is defined %}}<{{{{ x }}}}>{{% endif %}}{CHATML}", [ASK, FOUR], "")
    prepared = prepared_as(one, tmp_path, template_arguments={"x": value})
    text = tokenizer_of(one).apply_chat_template([ASK, FOUR], tokenize=False, x=value)
    assert marked(prepared).replace("⟦", "").replace("⟧", "") == text
    assert prepared.tokenizer.apply_chat_template([ASK, FOUR], tokenize=False) == text, "as anybody renders it"
    other = tokenizer_of(one).apply_chat_template([ASK, FOUR], tokenize=False, x="other")
    assert prepared.tokenizer.apply_chat_template([ASK, FOUR], tokenize=False, x="other") == other
    prompt = prepared.tokenizer.decode(encode_prompt([ASK], prepared.tokenizer))
    assert prompt == marked(prepared).split("⟦")[0]


def test_every_template_by_name_is_kept_with_the_tokenizer(tmp_path: Path) -> None:
    both: dict[str, str] = {"default": CHATML, "tool_use": DATED, "short": CHATML.replace("user", "u")}
    for name, kept in (("auto", both), ("short", {"default": both["short"], "short": both["short"]})):
        prepared = prepared_as(Construct(both, [ASK, FOUR], ""), tmp_path, template=name)
        prepared.tokenizer.save_pretrained(tmp_path / name)
        again = PreTrainedTokenizerFast.from_pretrained(tmp_path / name).chat_template
        assert {one: again[one] for one in kept} == kept
        assert ("tool_use" in again) == (name == "auto"), "a row with tools would be written with it"
        assert f"{'default' if name == 'auto' else name!r}" in prepared.account.template_reason


def test_a_system_message_is_folded_where_the_template_takes_none_and_the_user_says_so(tmp_path: Path) -> None:
    refuses = "{%- if messages[0].role == 'system' -%}{{- raise_exception('no system') -}}{%- endif -%}" + CHATML
    one = Construct(refuses, [SYSTEM, ASK, {**FOUR, "train": 0}, AGAIN, {**SIX, "content": PARTS}], "")
    with pytest.raises(DataError, match="no system") as error:
        prepared_as(one, tmp_path)
    assert "data.fold_system: true" in str(error.value)
    folded = prepared_as(one, tmp_path, fold_system=True)
    assert marked(folded) == (
        f"{U}Be brief.\n\nWhat is 2+2?<|im_end|>\n{A}It is 4.<|im_end|>\n"
        f"{U}And 3+3?<|im_end|>\n{A}⟦It is ⟧4⟦.<|im_end|>⟧\n"
    )
    assert folded.account.options["fold_system"] is True
