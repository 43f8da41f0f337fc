"""Answers that are each good or bad, as TRL, LLaMA-Factory and Axolotl write them."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.forms.conversation import Conversation, RowError
from tonnage.forms.formats import FORMATS, Form, candidates, detect
from tonnage.forms.reader import Reader

Q = {"role": "user", "content": "Which day?"}
A = {"role": "assistant", "content": "Friday."}
EARLIER = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "look_up", "arguments": {}}]}


def read(row: dict[str, Any], **settings: Any) -> Conversation:
    (conversation,) = Reader(Form("labelled", **settings)).read(row)
    return conversation


def refused(row: dict[str, Any]) -> RowError:
    with pytest.raises(RowError) as raised:
        read(row)
    return raised.value


WRITTEN: dict[str, tuple[dict[str, Any], list[dict[str, Any]], int]] = {
    "TRL": ({"prompt": "Which day?", "completion": "Friday.", "label": True}, [Q, A], 1),
    "TRL, messages": ({"prompt": [*EARLIER, Q], "completion": [A], "label": False}, [*EARLIER, Q, A], 1),
    "LLaMA-Factory, alpaca": ({"instruction": "Which day?", "output": "Friday.", "kto_tag": True}, [Q, A], 1),
    "LLaMA-Factory, messages": ({"messages": [*EARLIER, Q, A], "label": False}, [*EARLIER, Q, A], 1),
    "LLaMA-Factory, ShareGPT": (
        {
            "conversations": [{"from": "human", "value": "Which day?"}, {"from": "gpt", "value": "Friday."}],
            "kto_tag": False,
        },
        [Q, A],
        1,
    ),
    "Axolotl, argilla": ({"instruction": "Which day?", "completion": "Friday.", "label": True}, [Q, A], 1),
    "Axolotl, argilla_chat": ({"completion": [Q, A], "label": False}, [Q, A], 1),
    "Axolotl, intel": (
        {"system": "Be brief.", "question": "Which day?", "completion": "Friday.", "label": True},
        [{"role": "system", "content": "Be brief."}, Q, A],
        1,
    ),
    "several messages": (
        {"prompt": [Q], "completion": [CALL, {"role": "tool", "content": "5"}, A], "label": True},
        [Q, {**CALL}, {"role": "tool", "content": "5"}, A],
        3,
    ),
    "text of CSV": ({"prompt": "Which day?", "completion": "Friday.", "label": "False"}, [Q, A], 1),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_rows_as_other_programs_write_them(name: str) -> None:
    row, messages, num_answer = WRITTEN[name]
    assert candidates(row, "verdicts") == ("labelled",)
    assert candidates(row, "pairs") == ()
    conversation = read(row)
    plain = [{key: message[key] for key in ("role", "content")} for message in conversation.messages]
    assert plain == [{key: message[key] for key in ("role", "content")} for message in messages]
    weights = [turn.weight for turn in conversation.turns]
    trained = [float(message["role"] == "assistant") for message in messages[-num_answer:]]
    assert weights == [0.0] * (len(messages) - num_answer) + trained
    label = row.get("label", row.get("kto_tag"))
    assert conversation.carried == (float(label in (True, "True")),)


def test_labels() -> None:
    row = {"prompt": "a", "completion": "b"}
    for label, carried in ((1, 1.0), (0, 0.0), (1.0, 1.0), ("true", 1.0), (" FALSE ", 0.0), ("0", 0.0)):
        assert read({**row, "label": label}).carried == (carried,)
    assert read({**row, "label": True, "kto_tag": True}).carried == (1.0,)
    assert read({**row, "good": True}, columns={"label": "good"}).carried == (1.0,)
    assert detect([{**row, "label": 1}], "verdicts") == ()  # may be a topic
    assert detect([{**row, "label": True, "chosen": "c", "rejected": "d"}], "verdicts") == ()


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "a", "completion": "b", "label": "good"}, "wrong_type"),
        ({"prompt": "a", "completion": "b", "label": 2}, "wrong_type"),
        ({"prompt": "a", "completion": "b", "label": None}, "missing_field"),
        ({"prompt": "a", "completion": "b", "label": True, "kto_tag": False}, "two_verdicts"),
        ({"prompt": "a", "completion": "b", "output": "c", "label": True}, "two_answers"),
        ({"prompt": "a", "completion": "", "label": True}, "missing_field"),
        ({"completion": "b", "label": True}, "no_prompt"),
        ({"completion": [A], "label": True}, "no_prompt"),
        ({"prompt": [Q, A], "completion": "b", "label": True}, "answered_prompt"),
        ({"prompt": "Another", "completion": [Q, A], "label": True}, "other_prompt"),
        ({"messages": [Q, A, Q], "label": True}, "no_answer"),
        ({"prompt": "a", "completion": [A, Q, A], "label": True}, "no_answer"),
        ({"messages": [Q, {**A, "weight": 0.5}], "label": True}, "mask"),
        ({"prompt": "a", "completion": ["b", "c", "d"], "label": True}, "ranking"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(row: dict[str, Any], kind: str) -> None:
    assert refused(row).kind == kind


def test_what_is_not_read_is_counted() -> None:
    reader = Reader(Form("labelled"))
    reader.read({"messages": [Q, A], "prompt": "Which day?", "label": True, "score": 3})
    assert reader.unread == {"prompt": 1, "score": 1}
    assert reader.values.seen == {}


def test_other_objectives_name_the_one_for_labels() -> None:
    row = {"prompt": "a", "completion": "b", "label": True}
    for format in ("completion", "preference"):
        with pytest.raises(RowError) as raised:
            Reader(Form(format)).read(row)
        assert "objective: kto" in raised.value.change
    assert FORMATS["labelled"].purpose == "verdicts"
