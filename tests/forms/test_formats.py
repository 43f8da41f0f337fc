"""By what a form is told, and what presets and columns make of a row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tonnage.forms.formats import FORMAT_NAMES, FORMATS, PRESETS, Form, candidates, detect, fields_of, form_of, rename
from tonnage.forms.reader import Reader

TURNS = [{"role": "user", "content": "Which day?"}, {"role": "assistant", "content": "Friday."}]
SHARED = [{"from": "human", "value": "Which day?"}, {"from": "gpt", "value": "Friday."}]

ROWS: dict[str, list[dict[str, Any]]] = {
    "alpaca": [{"instruction": "Which day?", "output": "Friday."}, {"instruction": "a", "input": "", "output": "b"}],
    "messages": [
        *({name: TURNS} for name in ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")),
        {"turns": TURNS},
        {"messages": json.dumps(TURNS)},
        {"messages": TURNS, "prompt": "Which day?"},
    ],
    "sharegpt": [{"conversations": SHARED}, {"messages": SHARED}, {"conversation": json.dumps(SHARED)}],
    "completion": [{"prompt": "Which day?", "completion": "Friday."}, {"prompt": TURNS[:1], "completion": TURNS[1:]}],
    "text": [{"text": "Which day? Friday."}],
    "pairs": [
        {"conversation": [{"input": "Which day?", "output": "Friday."}]},
        {"conversation": [{"system": "Be brief.", "output": "Friday."}]},
        {"conversations": [{"human": "Which day?", "assistant": "Friday."}]},
        {"turns": [{"question": "Which day?", "answer": "Friday."}]},
    ],
    "strings": [{"data": ["Which day?", "Friday."]}, {"id": "1", "data": json.dumps(["Which day?", "Friday."])}],
    "gemini": [{"contents": [{"role": "user", "parts": [{"text": "Which day?"}]}]}],
    "instances": [{"instruction": "Say the day.", "instances": [{"input": "", "output": "Friday."}]}],
    "tree": [{"prompt": {"text": "Which day?", "role": "prompter", "replies": []}, "message_tree_id": "1"}],
    "segments": [{"segments": [{"text": "Which day?", "label": False}]}],
    "tokens": [{"input_ids": [1, 2], "labels": [-100, 2]}],
    "preference": [
        {"prompt": "Which day?", "chosen": "Friday.", "rejected": "Monday."},
        {"messages": TURNS[:1], "chosen": TURNS[1], "rejected": {"role": "assistant", "content": "Monday."}},
        {"prompt": "Which day?", "messages": TURNS, "chosen": TURNS, "rejected": [*TURNS[:1], TURNS[0]]},
        {"instruction": "Which day?", "output": "Friday.", "chosen": "Friday.", "rejected": None},
        {"instruction": "Which day?", "chosen_response": "Friday.", "rejected_response": "Monday."},
        {"instruction": "Which day?", "output": ["Friday.", "Monday."]},
    ],
    "saferlhf": [{"prompt": "Which day?", "response_0": "Friday.", "response_1": "Monday.", "better_response_id": 0}],
    "shp": [{"history": "Which day?", "human_ref_A": "Friday.", "human_ref_B": "Monday.", "labels": 1}],
    "arena": [{"conversation_a": TURNS, "conversation_b": TURNS, "winner": "model_a"}],
    "helpsteer": [{"context": TURNS[:1], "response1": "a", "response2": "b", "overall_preference": 2}],
    "labelled": [
        {"prompt": "Which day?", "completion": "Friday.", "label": True},
        {"prompt": TURNS[:1], "completion": TURNS[1:], "label": False},
        {"completion": TURNS, "label": "True"},
        {"instruction": "Which day?", "input": "", "output": "Friday.", "kto_tag": False},
        {"messages": TURNS, "label": True},
    ],
}


def test_every_form_is_here() -> None:
    assert set(ROWS) == set(FORMATS)
    assert set(FORMAT_NAMES) == {"auto", *FORMATS, *PRESETS}
    assert {name for name, _ in PRESETS.values()} <= set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_told_by_their_fields(name: str) -> None:
    for row in ROWS[name]:
        purpose = FORMATS[name].purpose
        assert candidates(row, purpose=purpose) == (name,), row
        assert detect([{"nothing": "known"}, row], purpose=purpose) == (name,)


@pytest.mark.parametrize(
    "row",
    [
        *({}, {"question": "a", "answer": "b"}, {"prompt": "a"}, {"text": 3}, {"text": None}, {"messages": "x"}),
        *({"messages": []}, {"data": "x"}, {"data": ["only one"]}, {"data": ["a", 3]}, {"input_ids": "1 2"}),
        *({"text": "a", "message_id": "1", "parent_id": "0", "role": "prompter"}, {"messages": "[{"}),
        *({"conversation": [{"input": "no answer"}]}, {"segments": ["x"]}, {"contents": "x"}),
    ],
)
def test_rows_that_fit_nothing(row: dict[str, Any]) -> None:
    assert candidates(row) == ()
    assert candidates(row, purpose="pairs") == ()


@pytest.mark.parametrize(
    "row",
    [
        *({"prompt": "a", "chosen": "b"}, {"prompt": "a", "chosen": None, "rejected": None}, {"output": ["a", "b"]}),
        *({"instruction": "a", "output": '["a", "b"]'}, {"instruction": "a", "output": [1, 2]}),
        {"prompt": "a", "completion": "b", "label": True},
    ],
)
def test_rows_that_are_no_pairs(row: dict[str, Any]) -> None:
    assert candidates(row, purpose="pairs") == ()


def test_nothing_is_guessed_between_two_forms() -> None:
    both = {"instruction": "a", "output": "b", "text": "a b"}
    assert detect([both]) == ("alpaca", "text")
    assert detect([both, ROWS["alpaca"][0]]) == ("alpaca",), "the rows that fit one form tell"
    assert detect([ROWS["alpaca"][0], ROWS["completion"][0]]) == ("alpaca", "completion")
    assert detect([]) == ()


PRESET_ROWS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "codefeedback": ({"query": "q", "answer": "a"}, [("user", "q"), ("assistant", "a")]),
    "dolly": ({"instruction": "q", "context": "c", "response": "a"}, [("user", "q\n\nc"), ("assistant", "a")]),
    "firefly": ({"kind": "QA", "input": "q", "target": "a"}, [("user", "q"), ("assistant", "a")]),
    "gpteacher": ({"instruction": "q", "input": "c", "response": "a"}, [("user", "q\n\nc"), ("assistant", "a")]),
    "gsm8k": ({"question": "q", "answer": "a"}, [("user", "q"), ("assistant", "a")]),
    "metamath": ({"query": "q", "response": "a", "type": "GSM"}, [("user", "q"), ("assistant", "a")]),
    "numina": ({"source": "x", "problem": "q", "solution": "a"}, [("user", "q"), ("assistant", "a")]),
    "openorca": (
        {"system_prompt": "s", "question": "q", "response": "a"},
        [("system", "s"), ("user", "q"), ("assistant", "a")],
    ),
    "ultrachat": (
        {"id": "1", "data": ["q", "a", "r", "b"]},
        [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")],
    ),
    "oasst": (
        {"prompt": {"role": "prompter", "text": "q", "replies": [{"role": "assistant", "text": "a"}]}},
        [("user", "q"), ("assistant", "a")],
    ),
    "seed_tasks": (
        {"instruction": "q", "instances": [{"input": "c", "output": "a"}]},
        [("user", "q\n\nc"), ("assistant", "a")],
    ),
    "xtuner": (
        {"conversation": [{"system": "s", "input": "q", "output": "a"}]},
        [("system", "s"), ("user", "q"), ("assistant", "a")],
    ),
    "step_dpo": (
        {
            "prompt": "q",
            "initial_reason_steps": "One. ",
            "chosen": "Two.",
            "rejected": "Three.",
            "full_chosen": "a",
            "full_rejected": "b",
            "answer": "2",
        },
        [("user", "q"), ("assistant", "a")],
    ),
    "saferlhf_safety": (
        {"prompt": "q", "response_0": "b", "response_1": "a", "better_response_id": 0, "safer_response_id": 1},
        [("user", "q"), ("assistant", "a")],
    ),
    "helpsteer2": (
        {"prompt": "q", "response_1": "a", "response_2": "b", "preference_strength": -2, "split": "train"},
        [("user", "q"), ("assistant", "a")],
    ),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    row, expected = PRESET_ROWS[name]
    form = form_of(name, {}, {})
    (conversation,) = Reader(form).read(row)
    assert [(message["role"], message["content"]) for message in conversation.messages] == expected
    assert [turn.weight for turn in conversation.turns] == [float(role == "assistant") for role, _ in expected]
    assert (conversation.rejected is not None) == (FORMATS[form.format].purpose == "pairs")
    if conversation.rejected is not None:
        assert [message["content"] for message in conversation.rejected.messages] == ["q", "b"]


def test_columns_stand_over_those_of_a_preset() -> None:
    form = form_of("gsm8k", {"output": "solution"}, {"bot": "assistant"})
    assert form == Form(
        "alpaca", {"instruction": "question", "output": "solution"}, {"bot": "assistant"}, ("instruction",)
    )
    (conversation,) = Reader(form).read({"question": "q", "answer": "x", "solution": "a"})
    assert [message["content"] for message in conversation.messages] == ["q", "a"]


def test_renaming_takes_the_columns_in_the_place_of_ours() -> None:
    row = {"question": "q", "answer": "a", "more": 1}
    assert rename(row, {"instruction": "question", "output": "answer"}) == {
        "more": 1,
        "instruction": "q",
        "output": "a",
    }
    swap = {"instruction": "output", "output": "instruction"}
    assert rename({"instruction": "a", "output": "q"}, swap) == {"instruction": "q", "output": "a"}
    assert rename({"a": 1}, {"instruction": "not there"}) == {"a": 1}


@pytest.mark.parametrize("name", FORMATS)
def test_every_row_may_have_a_weight(name: str) -> None:
    assert {*FORMATS[name].must, "loss_weight"} <= set(fields_of(name))
