"""Lists of messages as all kinds of programs write them: what comes of each, written down by hand."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tonnage.forms.conversation import Conversation, Pieces, RowError
from tonnage.forms.turns import TurnReader, read_tools
from tonnage.forms.values import MOST_UNREAD
from tonnage.forms.verdicts import Values

ASK = {"role": "user", "content": "Which day?"}
SAID = {"role": "assistant", "content": "Friday."}
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"day": 5, "deep": {"a": [1]}}}}
ARGUMENTS = CALL["function"]["arguments"]  # type: ignore[index]
INNER = {"name": "look_up", "arguments": ARGUMENTS}


def read(messages: object, **changes: Any) -> tuple[Conversation, dict[str, int]]:
    unread: Counter[str] = Counter()
    turns = TurnReader(changes.pop("roles", {}), unread, Values(), **changes).read(messages, "messages")
    return Conversation(turns), dict(unread)


def weights_in(conversation: Conversation) -> list[float]:
    return [turn.weight for turn in conversation.turns]


def pieces_in(conversation: Conversation) -> dict[int, Pieces]:
    return {at: turn.pieces for at, turn in enumerate(conversation.turns) if turn.pieces is not None}


def unsaid_in(conversation: Conversation) -> frozenset[int]:
    return frozenset(at for at, turn in enumerate(conversation.turns) if turn.is_unsaid)


def last(*messages: object, **changes: Any) -> dict[str, Any]:
    return read([ASK, *messages], **changes)[0].messages[-1]


def refused(messages: object, **changes: Any) -> RowError:
    with pytest.raises(RowError) as error:
        read(messages, **changes)
    return error.value


# Roles


@pytest.mark.parametrize(
    ("ours", "names"),
    {
        "system": "system System developer",
        "user": "user human Human prompter USER",
        "assistant": "assistant gpt chatgpt bot chatbot model ai AI bing bard claude",
        "tool": "tool tools observation ipython function tool_response function-response Tool_Result tool_output",
    }.items(),
)
def test_everybodys_names_of_roles(ours: str, names: str) -> None:
    for name in names.split():
        assert read([{"role": name, "content": "x"}])[0].messages == [{"role": ours, "content": "x"}], name
        assert read([{"from": name, "value": "x"}])[0].messages == [{"role": ours, "content": "x"}], name


def test_a_role_that_nobody_knows_is_refused_until_the_config_says_whose_it_is() -> None:
    turns = [ASK, {"role": "Old Wizard", "content": "Friday."}]
    error = refused(turns)
    assert (error.kind, error.change) == (
        "unknown_role",
        'say whose it is: roles: {"Old Wizard": assistant} (or system, user, tool)',
    )
    conversation, _ = read(turns, roles={"Old Wizard": "assistant"})
    assert (conversation.messages[1], weights_in(conversation)) == (SAID, [0.0, 1.0])
    swapped, _ = read([ASK, SAID], roles={"user": "assistant", "Assistant": "user"})
    assert [message["role"] for message in swapped.messages] == ["assistant", "user"]
    told = {"role": "function_call", "content": "6"}
    assert last(told, roles={"function_call": "tool"}) == {"role": "tool", "content": "6"}


@pytest.mark.parametrize("role", [None, 3, "", ["user"]])
def test_what_is_no_role_is_refused(role: object) -> None:
    assert refused([{"role": role, "content": "x"}]).kind == "unknown_role"


# Flags


@pytest.mark.parametrize("name", ["loss", "train", "weight", "loss_weight"])
@pytest.mark.parametrize(("value", "weight"), [(True, 1.0), (1, 1.0), (False, 0.0), (0, 0.0), (0.5, 0.5), (None, 1.0)])
def test_flags_of_messages(name: str, value: object, weight: float) -> None:
    conversation, unread = read([ASK, {**SAID, name: value}, ASK, SAID])
    assert weights_in(conversation) == [0.0, weight, 0.0, 1.0]
    assert unsaid_in(conversation) == (frozenset([1]) if weight == 0 else frozenset())
    assert (pieces_in(conversation), unread) == ({}, {})


def test_several_flags_of_a_message_hold_all() -> None:
    assert weights_in(read([ASK, {**SAID, "train": True, "weight": 0.5, "loss": 0.5}])[0]) == [0.0, 0.25]
    assert weights_in(read([ASK, {**SAID, "train": False, "weight": 1}])[0]) == [0.0, 0.0]


@pytest.mark.parametrize("value", ["true", "1", [True], {}, -1, float("nan"), float("inf"), 10**400, 1e7])
def test_what_is_no_flag_is_refused(value: object) -> None:
    assert refused([ASK, {**SAID, "loss": value}]).kind == "wrong_type"
    assert refused([ASK, {**SAID, "content": [{"type": "text", "text": "x", "train": value}]}]).kind == "wrong_type"


def test_only_the_assistant_is_trained() -> None:
    for name in ("loss", "train", "weight"):
        assert "only what the assistant says" in refused([{**ASK, name: 1}, SAID]).reason
    part = {"type": "text", "text": "x", "train": True}
    assert "only what the assistant says" in refused([{**ASK, "content": [part]}, SAID]).reason
    conversation, _ = read([{**ASK, "loss": False}, SAID])
    assert (weights_in(conversation), unsaid_in(conversation)) == ([0.0, 1.0], frozenset([0]))


@pytest.mark.parametrize("name", ["loss", "train", "weight"])
def test_flags_of_parts(name: str) -> None:
    parts = [
        {"type": "text", "text": "On "},
        {"type": "text", "text": "Friday", name: False},
        {"type": "text", "text": "!", name: 1},
    ]
    conversation, _ = read([ASK, {"role": "assistant", "content": parts}])
    assert conversation.messages[1] == {"role": "assistant", "content": "On Friday!"}
    assert pieces_in(conversation) == {1: [(3, 1.0), (6, 0.0), (1, 1.0)]}
    halved, _ = read([ASK, {"role": "assistant", "content": parts, "weight": 0.5}])
    assert pieces_in(halved) == {1: [(3, 0.5), (6, 0.0), (1, 0.5)]}
    plain, _ = read([ASK, {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}])
    assert (pieces_in(plain), plain.messages[1]["content"]) == ({}, "ab")


def test_train_detail_is_refused_and_its_advice_works() -> None:
    detail = [{"begin_offset": 0, "end_offset": 2, "train": False}]
    error = refused([ASK, {**SAID, "train_detail": detail}])
    assert (error.kind, error.reason) == ("unsupported", "messages[1]: train_detail is not read")
    parts = json.loads(error.change.split(": ", 1)[1])
    assert pieces_in(read([ASK, {"role": "assistant", "content": parts}])[0]) == {1: [(3, 0.0)]}
    assert read([ASK, {**SAID, "train_detail": None}])[1] == {}


# Contents


@pytest.mark.parametrize(
    "content",
    [
        "Friday.",
        [{"type": "text", "text": "Friday."}],
        [{"type": "text", "value": "Friday."}],
        [{"type": "text", "content": "Friday."}],
        [{"type": "text", "text": "Fri"}, {"type": "text", "text": "day."}],
        [{"type": "output_text", "text": "Friday."}],
        [{"text": "Friday."}],
    ],
)
def test_contents_and_parts(content: object) -> None:
    assert last({"role": "assistant", "content": content}) == SAID
    assert last({"from": "gpt", "value": content}) == SAID


def test_messages_as_json_text_and_one_alone() -> None:
    assert read(json.dumps([ASK, SAID]))[0].messages == [ASK, SAID]
    assert read(SAID)[0].messages == [SAID]
    assert "use json.dumps" in refused(str([ASK, SAID])).reason


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_under_every_name(name: str) -> None:
    assert last({**SAID, name: "It is late."}) == {**SAID, "reasoning_content": "It is late."}
    assert last({**SAID, name: None}) == last({**SAID, name: " "}) == SAID
    if name != "reasoning_content":
        parts = [{"type": name, name: "It is late."}, {"type": "text", "text": "Friday."}]
        for beside in ({}, {"reasoning_content": ""}):
            assert last({"role": "assistant", "content": parts, **beside}) == {
                **SAID,
                "reasoning_content": "It is late.",
            }


@pytest.mark.parametrize("kind", ["thinking", "reasoning", "reasoning_content"])
@pytest.mark.parametrize("name", ["thinking", "reasoning", "reasoning_content", "text", "value", "content"])
def test_thoughts_in_parts_stand_under_every_name(kind: str, name: str) -> None:
    parts = [{"type": kind, name: "It is late."}, {"type": "text", "value": "Friday."}]
    assert last({"role": "assistant", "content": parts}) == {**SAID, "reasoning_content": "It is late."}


def test_a_part_that_is_not_read_is_told_what_is() -> None:
    reason = refused([ASK, {"role": "assistant", "content": [{"type": "reasoning", "summary": ["x"]}]}]).reason
    assert "without its words (it has type, summary)" in reason
    assert reason.endswith("in one of reasoning, reasoning_content, thinking, text, value, content")
    reason = refused([ASK, {"role": "assistant", "content": [{"type": "text", "words": "x"}]}]).reason
    assert reason.endswith("in one of text, value, content")
    assert "thinking" in refused([ASK, {"role": "assistant", "content": [{"type": "thought", "text": "x"}]}]).change


def test_what_stands_under_a_second_name_is_counted_if_it_says_something_else() -> None:
    said = {**SAID, "reasoning_content": "late", "reasoning": "late", "value": "Friday."}
    assert read([ASK, said])[1] == {}
    said |= {"reasoning": "early", "value": "Monday."}
    assert read([ASK, said])[1] == {"messages[].reasoning": 1, "messages[].value": 1}
    assert read([ASK, {"role": "assistant", "content": None, "value": "Friday."}])[0].messages[1] == SAID


@pytest.mark.parametrize(
    ("kind", "messages"),
    {
        "missing_field": [],
        "wrong_type": ["x"],
        "missing_field ": [{"content": "x"}],
        "missing_field  ": [{"role": "user"}],
        "empty_answer": [ASK, {"role": "assistant", "content": " \n"}],
        "empty_answer ": [ASK, {"role": "assistant", "content": None}],
        "wrong_type ": [ASK, {"role": "assistant", "content": 3}],
        "wrong_type  ": [ASK, {"role": "assistant", "content": ["x"]}],
        "wrong_type   ": [ASK, {"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]}],
        "wrong_type    ": [ASK, {**SAID, "reasoning": ["x"]}],
        "too_large": [ASK] * 20_001,
        "wrong_type     ": 3,
        "wrong_type      ": None,
    }.items(),
)
def test_what_is_no_message_is_refused(kind: str, messages: object) -> None:
    assert refused(messages).kind == kind.strip()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "a"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video", "video": "a"},
    ],
)
def test_pictures_and_sounds_are_refused(part: dict[str, Any]) -> None:
    error = refused([{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}, SAID])
    assert error.kind == "media"
    assert "on_bad_row: skip" in error.change


# Calls of tools


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS), json.dumps(json.dumps(ARGUMENTS))])
def test_calls_in_five_ways(arguments: object) -> None:
    inner = {"name": "look_up", "arguments": arguments}
    expected = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    with_id = {**expected, "tool_calls": [{**CALL, "id": "c1"}]}
    assistant = {"role": "assistant", "content": ""}
    outer = {"id": "c1", "type": "function", "function": inner}
    assert last({**assistant, "tool_calls": [outer]}) == with_id, "OpenAI"
    assert last({"role": "assistant", "tool_calls": json.dumps([outer])}) == with_id, "as text, no content"
    assert last({**assistant, "tool_calls": [inner]}) == expected, "without the wrapping"
    assert last({"role": "assistant", "content": None, "function_call": inner}) == expected, "OpenAI, earlier"
    for role in ("function_call", "tool_call", "Tool-Calls"):
        assert last({"from": role, "value": json.dumps(inner)}) == expected, "ShareGPT"
        assert last({"from": role, "value": inner}) == expected, "ShareGPT, not as text"
    if isinstance(arguments, dict):
        use = {"type": "tool_use", "id": "c1", "name": "look_up", "input": arguments}
        assert last({"role": "assistant", "content": [use]}) == with_id, "Anthropic"
        said = [{"type": "text", "text": "I look."}, use]
        assert last({"role": "assistant", "content": said}) == {**with_id, "content": "I look."}


def test_several_calls_at_once_and_a_thought_before() -> None:
    both = [INNER, {"name": "wait", "arguments": {}}]
    expected = [CALL, {"type": "function", "function": {"name": "wait", "arguments": {}}}]
    assert last({"from": "function_call", "value": json.dumps(both)})["tool_calls"] == expected
    assert last({"from": "tool_calls", "value": [{"type": "function", "function": one} for one in both]}) == {
        "role": "assistant",
        "content": "",
        "tool_calls": expected,
    }
    thought = f"<think>\nI look.\n</think>\n{json.dumps(INNER)}"
    assert last({"from": "function_call", "value": thought}) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I look.",
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize("arguments", ["", None, {}, "{}", '"{}"'])
def test_calls_without_arguments(arguments: object) -> None:
    call = last({"role": "assistant", "content": "", "tool_calls": [{"name": "wait", "arguments": arguments}]})
    assert call["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("name", ["parameters", "args", "input"])
def test_arguments_under_another_name(name: str) -> None:
    for beside in ({}, {"arguments": None}):
        said = {"role": "assistant", "tool_calls": [{"name": "look_up", name: ARGUMENTS, **beside}]}
        assert last(said)["tool_calls"] == [CALL]


def test_arguments_of_arrow_files_are_without_the_nulls_that_arrow_fills_in() -> None:
    filled = {"id": None, "function": {"name": "look_up", "arguments": {"day": 5, "deep": {"a": [1], "b": None}}}}
    said = {"role": "assistant", "content": None, "tool_calls": [filled]}
    assert last(said, fills_nulls=True)["tool_calls"] == [CALL]
    assert last(said)["tool_calls"][0]["function"]["arguments"]["deep"] == {"a": [1], "b": None}, "JSON's are meant"


@pytest.mark.parametrize(
    "call",
    [
        *({"arguments": {"a": 1}}, {"name": 3}, "look_up", {"function": "look_up"}, {"name": "f", "arguments": [1]}),
        *({"name": "f", "arguments": "{"}, {"name": "f", "arguments": "{'a': 1}"}, {"name": "f", "arguments": "3"}),
    ],
)
def test_what_is_no_call_is_refused(call: object) -> None:
    assert refused([ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]).kind == "wrong_type"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("6", "6"),
        ({"sum": 6, "of": ["ä"]}, '{"sum": 6, "of": ["ä"]}'),
        ([{"sum": 6}], '[{"sum": 6}]'),
        ([1, 2], "[1, 2]"),
        ([{"type": "text", "text": "6"}], "6"),
        (None, ""),
    ],
)
def test_results_of_tools(content: object, text: str) -> None:
    result = {"role": "observation", "content": content, "name": "look_up", "tool_call_id": "c1"}
    assert last(SAID, result) == {"role": "tool", "content": text, "name": "look_up", "tool_call_id": "c1"}


def test_results_among_the_parts_of_a_question_are_messages_of_tools() -> None:
    parts = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "6"}]},
        {"type": "tool_result", "tool_use_id": "c2", "content": "7"},
    ]
    results = [
        {"role": "tool", "content": "6", "tool_call_id": "c1"},
        {"role": "tool", "content": "7", "tool_call_id": "c2"},
    ]
    conversation, _ = read([ASK, {"role": "user", "content": parts}, SAID])
    assert conversation.messages == [ASK, *results, SAID]
    assert weights_in(conversation) == [0.0, 0.0, 0.0, 1.0]
    said = {"role": "user", "content": [*parts, {"type": "text", "text": "Which day?"}]}
    assert read([ASK, said, {**SAID, "loss": False}])[0].messages == [ASK, *results, ASK, SAID]
    assert unsaid_in(read([ASK, said, {**SAID, "loss": False}])[0]) == frozenset([4])


SCHEMA = {"name": "look_up", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": SCHEMA}],
        [{"function": SCHEMA}],
        [SCHEMA],
        SCHEMA,
        [{"name": "look_up", "description": "Looks.", "input_schema": SCHEMA["parameters"]}],
        json.dumps([SCHEMA]),
        [json.dumps(SCHEMA)],
    ],
)
def test_tools_in_every_form(tools: object) -> None:
    assert read_tools(tools) == [{"type": "function", "function": SCHEMA}]


def test_no_tools_and_what_is_none() -> None:
    assert read_tools(None) is read_tools([]) is read_tools("") is read_tools("[]") is None
    for tools in ("{", [3], [{"description": "x"}], [{"function": {"description": "x"}}]):
        with pytest.raises(RowError):
            read_tools(tools)


# What nobody reads


def test_fields_that_nobody_reads_are_counted_by_name() -> None:
    conversation, unread = read(
        [
            {**ASK, "id": 3, "empty": None, "none": [], "blank": ""},
            {**SAID, "id": 4, "score": 0.5},
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "result": "6", "index": 0, "function": {**INNER, "cost": 1}}],
            },
            {"role": "tool", "content": "6", "tool_call_id": 7},
            {"role": "assistant", "content": [{"type": "text", "text": "6", "lang": "en"}]},
        ]
    )
    assert [message["role"] for message in conversation.messages] == ["user", *("assistant",) * 2, "tool", "assistant"]
    assert unread == {
        "messages[].id": 2,
        "messages[].score": 1,
        "messages[].tool_calls[].result": 1,
        "messages[].tool_calls[].cost": 1,
        "messages[].tool_call_id": 1,
        "messages[].content[].lang": 1,
    }


def test_names_without_end_are_not_kept_one_by_one() -> None:
    _, unread = read([{**ASK, f"field {number}" + "x" * 500: 1} for number in range(3 * MOST_UNREAD)])
    assert len(unread) == MOST_UNREAD + 1
    assert sum(unread.values()) == 3 * MOST_UNREAD
    assert max(map(len, unread)) <= 80
