"""Rows of every form to conversations: what comes of each, written down by hand, and what refuses a row."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest

from hostile import mutations
from hostile.groups.rows import FORMS
from tonnage.forms.conversation import Conversation, Message, Pieces, RowError, Turn
from tonnage.forms.formats import FORMATS, Form
from tonnage.forms.reader import Reader

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Which day?"}
SAID = {"role": "assistant", "content": "Friday."}
AGAIN = {"role": "user", "content": "Sure?"}
YES = {"role": "assistant", "content": "Yes."}
CHAT = [ASK, SAID]
SCHEMA = {"name": "look_up", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOL = {"type": "function", "function": SCHEMA}
WITH_INPUT = {"role": "user", "content": "Which?\n\na, b", "instruction": "Which?", "input": "a, b"}


def chat(
    messages: Sequence[Message],
    weights: Sequence[float],
    tools: list[dict[str, Any]] | None = None,
    *,
    pieces: Mapping[int, Pieces] | None = None,
    unsaid: Collection[int] = (),
) -> Conversation:
    """A conversation, with what its turns hold side by side."""
    turns = enumerate(zip(messages, weights, strict=True))
    return Conversation(
        [Turn(message, weight, (pieces or {}).get(at), at in unsaid) for at, (message, weight) in turns], tools
    )


def read(form: str, row: dict[str, Any], **changes: Any) -> list[Conversation]:
    return Reader(Form(form, **changes)).read(row)


def one(form: str, row: dict[str, Any], **changes: Any) -> Conversation:
    (found,) = read(form, row, **changes)
    return found


def refused(form: str, row: dict[str, Any], **changes: Any) -> RowError:
    with pytest.raises(RowError) as error:
        read(form, row, **changes)
    return error.value


def unread(form: str, row: dict[str, Any], **changes: Any) -> dict[str, int]:
    reader = Reader(Form(form, **changes))
    reader.read(row)
    return dict(reader.unread)


CASES: dict[str, tuple[str, dict[str, Any], Conversation]] = {
    "alpaca": ("alpaca", {"instruction": "Which day?", "output": "Friday."}, chat(CHAT, [0.0, 1.0])),
    "alpaca, all fields": (
        "alpaca",
        {
            "instruction": "Which?",
            "input": "a, b",
            "output": "b",
            "system": "Be brief.",
            "history": [["Which day?", "Friday."]],
            "tools": [SCHEMA],
        },
        chat([SYSTEM, ASK, SAID, WITH_INPUT, {"role": "assistant", "content": "b"}], [0.0, 0.0, 1.0, 0.0, 1.0], [TOOL]),
    ),
    "alpaca, history as text, nulls": (
        "alpaca",
        {
            "instruction": "Sure?",
            "input": None,
            "output": "Yes.",
            "system": None,
            "history": json.dumps([["Which day?", "Friday."]]),
        },
        chat([ASK, SAID, AGAIN, YES], [0.0, 1.0, 0.0, 1.0]),
    ),
    "alpaca, the input alone": (
        "alpaca",
        {"instruction": "", "input": "Which day?", "output": "Friday."},
        chat([{**ASK, "instruction": "", "input": "Which day?"}, SAID], [0.0, 1.0]),
    ),
    "messages, system and tools beside": (
        "messages",
        {"messages": CHAT, "system": "Be brief.", "tools": json.dumps([SCHEMA])},
        chat([SYSTEM, *CHAT], [0.0, 0.0, 1.0], [TOOL]),
    ),
    "messages, the same system twice": (
        "messages",
        {"messages": [SYSTEM, *CHAT], "system": "Be brief. "},
        chat([SYSTEM, *CHAT], [0.0, 0.0, 1.0]),
    ),
    "messages, functions": (
        "messages",
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "function_call": {"name": "look_up", "arguments": '{"a": "b"}'}},
                {"role": "function", "name": "look_up", "content": "5"},
                SAID,
            ],
            "functions": [SCHEMA],
        },
        chat(
            [
                ASK,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"a": "b"}}}],
                },
                {"role": "tool", "content": "5", "name": "look_up"},
                SAID,
            ],
            [0.0, 1.0, 0.0, 1.0],
            [TOOL],
        ),
    ),
    "a flag moves with the system message before it": (
        "messages",
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": [{"text": "Fri", "train": 0}, {"text": "day."}]},
                AGAIN,
                {**YES, "loss": False},
                AGAIN,
                YES,
            ],
            "system": "Be brief.",
            "loss_weight": 0.5,
        },
        chat(
            [SYSTEM, ASK, SAID, AGAIN, YES, AGAIN, YES],
            [0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.5],
            pieces={2: [(3, 0.0), (4, 0.5)]},
            unsaid=frozenset([4]),
        ),
    ),
    "sharegpt": (
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Which day?"},
                {"from": "gpt", "value": "Friday."},
            ]
        },
        chat([SYSTEM, *CHAT], [0.0, 0.0, 1.0]),
    ),
    "completion": ("completion", {"prompt": "Which day?", "completion": "Friday."}, chat(CHAT, [0.0, 1.0])),
    "completion, messages": (
        "completion",
        {"prompt": [SYSTEM, ASK, SAID, AGAIN], "completion": [YES]},
        chat([SYSTEM, ASK, SAID, AGAIN, YES], [0.0, 0.0, 0.0, 0.0, 1.0]),
    ),
    "completion, one message each, as text": (
        "completion",
        {"prompt": json.dumps(ASK), "completion": json.dumps(SAID)},
        chat(CHAT, [0.0, 1.0]),
    ),
    "completion, text and messages": (
        "completion",
        {"prompt": "Which day?", "completion": [{**SAID, "train": 0}, AGAIN, YES], "tools": [TOOL]},
        chat([*CHAT, AGAIN, YES], [0.0, 0.0, 0.0, 1.0], [TOOL], unsaid=frozenset([1])),
    ),
    "completion, words that look like a list": (
        "completion",
        {"prompt": "[1, 2] and?", "completion": "{3}"},
        chat([{"role": "user", "content": "[1, 2] and?"}, {"role": "assistant", "content": "{3}"}], [0.0, 1.0]),
    ),
    "text": ("text", {"text": "Which day? Friday."}, Conversation(text="Which day? Friday.")),
    "pairs": (
        "pairs",
        {
            "conversation": [
                {"system": "Be brief.", "input": "Which day?", "output": "Friday."},
                {"input": "Sure?", "output": "Yes.", "output_with_loss": False},
                {"input": "Sure?", "output": "Yes.", "weight": 0.5},
            ]
        },
        chat([SYSTEM, ASK, SAID, AGAIN, YES, AGAIN, YES], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.5], unsaid=frozenset([4])),
    ),
    "strings": (
        "strings",
        {"data": ["Which day?", "Friday.", "Sure?", "Yes.", "Sure?"]},
        chat([ASK, SAID, AGAIN, YES, AGAIN], [0.0, 1.0, 0.0, 1.0, 0.0]),
    ),
    "gemini": (
        "gemini",
        {
            "systemInstruction": {"role": "system", "parts": [{"text": "Be "}, {"text": "brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "Which "}, {"text": "day?"}]},
                {
                    "role": "model",
                    "parts": [
                        {"text": "I look.", "thought": True},
                        {"functionCall": {"name": "look_up", "args": {"a": "b"}}},
                    ],
                },
                {
                    "role": "user",
                    "parts": [
                        {"functionResponse": {"name": "look_up", "response": {"day": 5}}},
                        {"text": "Which day?"},
                    ],
                },
                {"role": "model", "parts": [{"text": "Friday."}]},
            ],
            "tools": [{"functionDeclarations": [SCHEMA]}],
        },
        chat(
            [
                SYSTEM,
                ASK,
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "I look.",
                    "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"a": "b"}}}],
                },
                {"role": "tool", "name": "look_up", "content": '{"day": 5}'},
                ASK,
                SAID,
            ],
            [0.0, 0.0, 1.0, 0.0, 0.0, 1.0],
            [TOOL],
        ),
    ),
    "segments": (
        "segments",
        {"segments": [{"label": False, "text": "Day? "}, {"label": True, "text": "Friday."}]},
        Conversation(text="Day? Friday.", pieces=[(5, 0.0), (7, 1.0)]),
    ),
    "segments, weights": (
        "segments",
        {"segments": [{"label": None, "train": 0, "text": "Day? "}, {"weight": 0.5, "text": "Friday."}]},
        Conversation(text="Day? Friday.", pieces=[(5, 0.0), (7, 0.5)]),
    ),
    "tokens, labels": (
        "tokens",
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
        Conversation(ids=[5, 6, 7], ids_weights=[0.0, 1.0, 1.0]),
    ),
    "tokens, a mask and padding": (
        "tokens",
        {"input_ids": [0, 5, 6, 7, 0], "loss_mask": [0, 0, 1, True, 0], "attention_mask": [0, 1, 1, 1, 0]},
        Conversation(ids=[5, 6, 7], ids_weights=[0.0, 1.0, 1.0]),
    ),
    "tokens, weights": (
        "tokens",
        {"input_ids": [5, 6, 7], "completion_mask": [0, 0.5, 1], "loss_weight": 2},
        Conversation(ids=[5, 6, 7], ids_weights=(0.0, 1.0, 2.0)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_give_the_messages_weights_and_tools_that_one_expects(name: str) -> None:
    form, row, expected = CASES[name]
    assert one(form, row) == expected


def test_every_form_is_held() -> None:
    alone = {name for name, format in FORMATS.items() if format.purpose == "supervised"}  # others: test_preferences.py
    assert {form for form, _, _ in CASES.values()} | {"tree", "instances"} == alone


def test_every_instance_is_a_conversation() -> None:
    row = {
        "instruction": "Which?",
        "instances": [{"input": "a, b", "output": "b"}, {"input": "", "output": "c"}],
        "system": "Be brief.",
    }
    assert read("instances", row) == [
        chat([SYSTEM, WITH_INPUT, {"role": "assistant", "content": "b"}], [0.0, 0.0, 1.0]),
        chat([SYSTEM, {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "c"}], [0.0, 0.0, 1.0]),
    ]


def reply(role: str, text: str, *replies: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": role, "text": text, "replies": list(replies), **more}


def test_each_path_of_a_tree_to_a_leaf_is_there_once() -> None:
    tree = reply(
        "prompter",
        "Which day?",
        reply("assistant", "Friday.", reply("prompter", "Sure?", reply("assistant", "Yes.")), reply("prompter", "Oh.")),
        reply("assistant", "Monday.", lang="en", rank=None),
        reply("assistant", "Monday."),
    )
    monday = {"role": "assistant", "content": "Monday."}
    assert read("tree", {"prompt": tree}) == [
        chat([ASK, SAID, AGAIN, YES], [0.0, 1.0, 0.0, 1.0]),
        chat(CHAT, [0.0, 1.0]),  # what the user said last is not answered
        chat([ASK, monday], [0.0, 1.0]),
    ]
    assert unread("tree", {"prompt": tree, "tree_state": "ready"}) == {"tree_state": 1, "replies[].lang": 1}


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        ("no_answer", reply("prompter", "Which day?")),
        ("wrong_type", reply("prompter", "Which day?", {"role": "assistant", "replies": []})),
        ("unknown_role", reply("wizard", "Which day?", reply("assistant", "Friday."))),
        ("wrong_type", {"role": "prompter", "text": "x", "replies": "y"}),
        ("wrong_type", {"role": "prompter", "text": "x", "replies": [1]}),
        ("too_large", reply("prompter", "x", *[reply("assistant", str(number)) for number in range(2001)])),
    ],
)
def test_trees_that_are_refused(kind: str, tree: dict[str, Any]) -> None:
    assert refused("tree", {"prompt": tree}).kind == kind


@pytest.mark.parametrize(
    ("kind", "form", "row"),
    [
        ("missing_field", "alpaca", {"instruction": "a"}),
        ("wrong_type", "alpaca", {"instruction": "a", "output": None}),
        ("wrong_type", "alpaca", {"instruction": "a", "output": ["b"]}),
        ("wrong_type", "alpaca", {"instruction": "a", "input": 3, "output": "b"}),
        ("wrong_type", "alpaca", {"instruction": "a", "output": "b", "history": [["a"]]}),
        ("empty_answer", "alpaca", {"instruction": "a", "output": " \n"}),
        ("empty_prompt", "alpaca", {"instruction": " ", "output": "b"}),
        ("wrong_type", "messages", {"messages": [SYSTEM, *CHAT], "system": "Be long."}),
        ("wrong_type", "messages", {"messages": CHAT, "system": ["Be brief."]}),
        ("no_answer", "messages", {"messages": [ASK]}),
        ("nothing_supervised", "messages", {"messages": [ASK, {**SAID, "train": False}]}),
        (
            "nothing_supervised",
            "messages",
            {"messages": [ASK, {"role": "assistant", "content": [{"text": "x", "loss": 0}]}]},
        ),
        ("missing_field", "messages", {"turn": CHAT}),
        ("empty_prompt", "completion", {"prompt": "", "completion": "b"}),
        ("missing_field", "completion", {"prompt": [ASK], "completion": []}),
        ("wrong_type", "completion", {"prompt": [ASK], "completion": 3}),
        ("empty_answer", "text", {"text": " "}),
        ("wrong_type", "pairs", {"conversation": ["x"]}),
        ("missing_field", "pairs", {"conversation": [{"input": "a", "output": "b"}, {"input": "a"}]}),
        ("empty_answer", "strings", {"data": ["a", " "]}),
        ("wrong_type", "strings", {"data": "a"}),
        ("wrong_type", "gemini", {"contents": [{"role": "user", "parts": ["x"]}]}),
        ("media", "gemini", {"contents": [{"role": "user", "parts": [{"inlineData": {"data": "x"}}]}]}),
        ("wrong_type", "instances", {"instruction": "a", "instances": []}),
        ("missing_field", "segments", {"segments": [{"text": "a"}]}),
        ("wrong_type", "segments", {"segments": [{"label": "yes", "text": "a"}]}),
        ("nothing_supervised", "segments", {"segments": [{"label": False, "text": "a"}]}),
        ("missing_field", "tokens", {"input_ids": [1, 2]}),
        ("wrong_type", "tokens", {"input_ids": [1, -2], "labels": [1, -2]}),
        ("wrong_type", "tokens", {"input_ids": [1, True], "labels": [1, 1]}),
        ("wrong_type", "tokens", {"input_ids": [1, 2], "labels": [1]}),
        ("wrong_type", "tokens", {"input_ids": [1, 2], "labels": [1, 3]}),
        ("wrong_type", "tokens", {"input_ids": [1, 2], "labels": [-100, 2], "loss_mask": [1, 1]}),
        ("wrong_type", "tokens", {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "attention_mask": [1, 0, 1]}),
        ("wrong_type", "tokens", {"input_ids": [1, 2], "loss_mask": [0, 1], "attention_mask": [0, 0]}),
        ("nothing_supervised", "tokens", {"input_ids": [1, 2], "labels": [1, -100]}),
        ("wrong_type", "text", {"text": "a", "loss_weight": "much"}),
        ("wrong_type", "text", {"text": "a", "loss_weight": -1}),
    ],
)
def test_rows_that_are_refused(kind: str, form: str, row: dict[str, Any]) -> None:
    assert refused(form, row).kind == kind


# Rows that were made for something else


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("completion", {"prompt": "Which day?", "completion": "Friday.", "label": False}),
        ("completion", {"prompt": "Which day?", "completion": "Friday.", "label": True}),
        ("messages", {"messages": CHAT, "kto_tag": False}),
        ("alpaca", {"instruction": "a", "output": "b", "kto_tag": "false"}),
    ],
)
def test_labels_of_good_and_bad_answers_refuse_the_row(form: str, row: dict[str, Any]) -> None:
    error = refused(form, row)
    assert error.kind == "preference"
    assert "is true to a file of their own, without that field" in error.change


def test_other_labels_are_only_counted() -> None:
    for form, row in (
        ("text", {"text": "a", "label": 0}),
        ("completion", {"prompt": "Is it?", "completion": "True, it is.", "label": "true"}),
        ("alpaca", {"instruction": "Is it?", "output": "No.", "label": "False"}),
    ):
        assert unread(form, row) == {"label": 1}
    assert unread("text", {"text": "a", "label": None}) == {}


PREFERENCES: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": CHAT, "chosen": CHAT, "rejected": CHAT}),
    ("sharegpt", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "chosen": SAID}),
    ("completion", {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}),
]


@pytest.mark.parametrize(("form", "row"), PREFERENCES)
def test_preferences_and_their_histories_refuse_the_row(form: str, row: dict[str, Any]) -> None:
    assert refused(form, row).kind == "preference"
    assert unread("text", {"text": "a", "rejected": "b", "chosen": None}) == {"rejected": 1}


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("messages", {"messages": CHAT, "images": ["a.png"]}),
        ("alpaca", {"instruction": "a", "output": "b", "image": "a.png"}),
        ("text", {"text": "a", "audio": {"path": "x"}}),
        ("messages", {"messages": [{"role": "user", "content": "<image>\nWhat is it?"}, SAID]}),
        ("completion", {"prompt": "What is it?\n<image>", "completion": "b"}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "<audio>"}, {"from": "gpt", "value": "b"}]}),
        ("messages", {"messages": [{"role": "user", "content": "<video>And this?"}, SAID]}),
    ],
)
def test_pictures_sounds_and_what_stands_for_them_refuse_the_row(form: str, row: dict[str, Any]) -> None:
    error = refused(form, row)
    assert (error.kind, "on_bad_row: skip" in error.change) == ("media", True)


def test_words_about_pictures_are_words() -> None:
    ask = {"role": "user", "content": "What does the tag <image> mean in <image> elements?"}
    said = {"role": "assistant", "content": "<image>"}
    row = {"messages": [ask, said], "images": [], "image": None, "video": ""}
    assert one("messages", row).messages == [ask, said]


def test_train_detail_beside_messages_is_refused() -> None:
    assert refused("messages", {"messages": CHAT, "train_detail": [1]}).kind == "unsupported"


# What nobody reads


def test_fields_that_hold_something_and_are_not_read_are_counted() -> None:
    reader = Reader(Form("alpaca", {"output": "response"}))
    row = {"instruction": "a", "response": "b", "score": 0.5, "meta": {"x": None}, "tags": [], "note": "", "nan": None}
    for more in ({}, {"meta": {"x": 1}}, {"meta": False, "output": "x"}):
        reader.read({**row, **more})
    assert reader.unread == {"score": 3, "meta": 2, "output": 1}
    assert reader.columns == {"response": 3}


@pytest.mark.parametrize(
    ("form", "row", "expected"),
    [
        ("messages", {"messages": CHAT, "conversations": CHAT, "id": 1}, {"conversations": 1, "id": 1}),
        ("sharegpt", {"messages": CHAT, "conversations": CHAT}, {"messages": 1}),
        ("messages", {"conversations": CHAT}, {}),
        ("messages", {"messages": CHAT, "tools": [TOOL], "functions": [SCHEMA]}, {"functions": 1}),
        ("messages", {"messages": CHAT, "loss": 0.5, "weight": 2}, {"loss": 1, "weight": 1}),
        ("pairs", {"conversation": [{"input": "a", "output": "b", "mood": "c"}]}, {"conversation[].mood": 1}),
        ("segments", {"segments": [{"label": 1, "text": "a", "x": 1}]}, {"segments[].x": 1}),
        ("tokens", {"input_ids": [1, 2], "labels": [1, 2], "position_ids": [0, 1]}, {"position_ids": 1}),
        (
            "instances",
            {"instruction": "a", "instances": [{"output": "b", "x": 1}], "id": 1},
            {"id": 1, "instances[].x": 1},
        ),
        (
            "gemini",
            {
                "contents": [
                    {"parts": [{"text": "a", "videoMetadata": 1}]},
                    {"role": "model", "parts": [{"text": "b"}], "mood": "c"},
                ],
                "generationConfig": {"temperature": 1},
            },
            {"generationConfig": 1, "contents[].parts[].videoMetadata": 1, "contents[].mood": 1},
        ),
        ("text", {"text": "a", "meta": {"deep": [1]}}, {"meta": 1}),
    ],
)
def test_what_is_not_read_is_named_where_it_stands(form: str, row: dict[str, Any], expected: dict[str, int]) -> None:
    assert unread(form, row) == expected


def test_flags_of_geminis_messages_hold() -> None:
    row = {
        "contents": [
            {"role": "user", "parts": [{"text": "a"}]},
            {"role": "model", "parts": [{"text": "b"}], "weight": 0},
            {"role": "user", "parts": [{"text": "a"}]},
            {"role": "model", "parts": [{"text": "b"}]},
        ]
    }
    assert [turn.weight for turn in one("gemini", row).turns] == [0.0, 0.0, 0.0, 1.0]


def test_tools_from_arrow_files_are_without_nulls() -> None:
    filled = {
        **SCHEMA,
        "strict": None,
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": None}},
    }
    row = {"messages": CHAT, "tools": [filled]}
    (conversation,) = Reader(Form("messages"), fills_nulls=True).read(row)
    assert conversation.tools == [TOOL]


def test_a_column_in_the_place_of_a_field_that_is_there_is_seen() -> None:
    row = {"instruction": "Be brief.", "question": "Which day?", "output": "Friday."}
    assert unread("alpaca", row, columns={"instruction": "question"}) == {"instruction": 1}
    swapped = {"instruction": "Friday.", "output": "Which day?"}
    columns = {"instruction": "output", "output": "instruction"}
    assert unread("alpaca", swapped, columns=columns) == {}
    assert one("alpaca", swapped, columns=columns).messages == CHAT


def test_a_system_message_may_be_dropped() -> None:
    marked = [SYSTEM, ASK, {**SAID, "train": False}, AGAIN, YES]
    for form, row, expected in (
        ("messages", {"messages": marked}, chat([ASK, SAID, AGAIN, YES], [0.0, 0.0, 0.0, 1.0])),
        ("alpaca", {"instruction": "Which day?", "output": "Friday.", "system": "x"}, chat(CHAT, [0.0, 1.0])),
    ):
        found = one(form, row, drops_system=True)
        assert [(turn.message, turn.weight) for turn in found.turns] == [
            (turn.message, turn.weight) for turn in expected.turns
        ]
        assert [at for at, turn in enumerate(found.turns) if turn.is_unsaid] == ([1] if form == "messages" else [])
    parts = [{"type": "text", "text": "Fri", "train": False}, {"type": "text", "text": "day."}]
    split = one("messages", {"messages": [SYSTEM, ASK, {**SAID, "content": parts}]}, drops_system=True)
    assert [at for at, turn in enumerate(split.turns) if turn.pieces is not None] == [1]
    assert refused("messages", {"messages": [SYSTEM, ASK]}, drops_system=True).kind == "no_answer"


# Whatever a row holds


_GEMINI = {
    "contents": [
        {"role": "user", "parts": [{"text": "Which day?"}], "content": "What?"},
        {
            "role": "model",
            "parts": [{"text": "late", "thought": True}, {"functionCall": {"name": "look", "args": {"at": 1}}}],
            "reasoning_content": 3,
            "tool_calls": "look",
        },
        {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"day": "Friday"}}}]},
        {"role": "model", "parts": [{"text": "Friday."}]},
    ],
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
}


def test_fields_that_gemini_does_not_have_are_counted() -> None:
    assert unread("gemini", _GEMINI) == {
        "contents[].content": 1,
        "contents[].reasoning_content": 1,
        "contents[].tool_calls": 1,
    }


@pytest.mark.parametrize("form", [*FORMS, "gemini with calls"])
def test_a_row_changed_by_chance_is_read_or_refused_by_a_sentence(form: str) -> None:
    chance = random.Random(form)
    for _ in range(1000):
        row = FORMS[form](chance).row if form in FORMS else _GEMINI
        row = mutations.changed(chance, row, chance.choice((1, 1, 2, 3)))
        with suppress(RowError, RecursionError):
            if isinstance(row, dict):
                Reader(Form(form.split()[0])).read(row)
