"""Pairs of answers: what comes of the rows of known data sets, and what refuses a row that could mean two things."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from hostile import mutations
from tonnage.forms.conversation import Conversation, RowError
from tonnage.forms.formats import FORMATS, Form, candidates, detect, form_of
from tonnage.forms.preferences import other_preference
from tonnage.forms.reader import Reader

Message = dict[str, Any]


def user(words: str) -> Message:
    return {"role": "user", "content": words}


def assistant(words: str) -> Message:
    return {"role": "assistant", "content": words}


def system(words: str) -> Message:
    return {"role": "system", "content": words}


Q, GOOD, BAD = user("Which day?"), assistant("Friday."), assistant("Monday.")
EARLIER = [user("Hello?"), assistant("Hello!")]
CALL = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": {"a": "b"}}}
CALLING, RESULT = {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "5"}
SCHEMA = {"name": "look_up", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
HH = "\n\nHuman: Hello?\n\nAssistant: Hello!\n\nHuman: Which day?\n\nAssistant: {}"


def read(row: dict[str, Any], format: str = "preference", **changes: Any) -> Conversation:
    (conversation,) = Reader(Form(format, **changes)).read(row)
    return conversation


def refused(row: dict[str, Any], format: str = "preference", **changes: Any) -> RowError:
    with pytest.raises(RowError) as error:
        read(row, format, **changes)
    return error.value


def check(
    pair: Conversation, context: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message]
) -> None:
    """A pair is these messages: a context of weight 0, and answers whose every word of the assistant's has weight 1."""
    assert pair.rejected is not None
    assert pair.rejected.rejected is None
    assert pair.rejected.tools == pair.tools
    for side, answer in ((pair, chosen), (pair.rejected, rejected)):
        assert side.messages == [*context, *answer]
        weights = [0.0] * len(context) + [float(message["role"] == "assistant") for message in answer]
        assert [turn.weight for turn in side.turns] == weights
        assert all(turn.pieces is None for turn in side.turns)


Answers = Sequence[Message]
MODELS = {"chosen_model": "a", "rejected_model": "b"}
DATA_SETS: dict[str, tuple[dict[str, Any], str, tuple[Answers, Answers, Answers]]] = {
    "Anthropic/hh-rlhf": (
        {"chosen": HH.format("Friday."), "rejected": HH.format("Monday.")},
        "preference",
        ([*EARLIER, Q], [GOOD], [BAD]),
    ),
    "Dahoas/full-hh-rlhf": (
        {"prompt": HH.format("").rstrip(), "response": " Friday.", "chosen": " Friday.", "rejected": " Monday."},
        "preference",
        ([*EARLIER, Q], [assistant(" Friday.")], [assistant(" Monday.")]),
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (
        {
            "prompt": "Which day?",
            "prompt_id": "1f",
            "messages": [Q, GOOD],
            "chosen": [Q, GOOD],
            "rejected": [Q, BAD],
            "score_chosen": 8.5,
            "score_rejected": 4.0,
        },
        "preference",
        ([Q], [GOOD], [BAD]),
    ),
    "trl-lib/ultrafeedback_binarized": (
        {"chosen": [Q, GOOD], "rejected": [Q, BAD], "score_chosen": 9, "score_rejected": 7},
        "preference",
        ([Q], [GOOD], [BAD]),
    ),
    "argilla/ultrafeedback-binarized-preferences-cleaned": (
        {
            "source": "flan",
            "prompt": "Which day?",
            "chosen": [Q, GOOD],
            "chosen-rating": 4.75,
            "chosen-model": "a",
            "rejected": [Q, BAD],
            "rejected-rating": 2.0,
            "rejected-model": "b",
        },
        "preference",
        ([Q], [GOOD], [BAD]),
    ),
    "argilla/distilabel-capybara-dpo-7k-binarized": (
        {
            "source": "x",
            "conversation": [{"input": "Hello?", "output": "Hello!"}, {"input": "Which day?"}],
            "prompt": "Which day?",
            "chosen": [*EARLIER, Q, GOOD],
            "rejected": [*EARLIER, Q, BAD],
            "rating_chosen": 5,
            "rating_rejected": 3,
            **MODELS,
        },
        "preference",
        ([*EARLIER, Q], [GOOD], [BAD]),
    ),
    "argilla/dpo-mix-7k": (
        {
            "dataset": "x",
            "chosen": [system("Be brief."), Q, GOOD],
            "rejected": [system("Be brief."), Q, BAD],
            "chosen_rating": 5,
            "rejected_rating": 4,
        },
        "preference",
        ([system("Be brief."), Q], [GOOD], [BAD]),
    ),
    "argilla/distilabel-math-preference-dpo": (
        {
            "metadata": None,
            "instruction": "Which day?",
            "chosen_response": "Friday.",
            "chosen_rating": 9.0,
            "rejected_response": "Monday.",
            "rejected_rating": 7.0,
        },
        "preference",
        ([Q], [GOOD], [BAD]),
    ),
    "argilla/distilabel-intel-orca-dpo-pairs": (
        {
            "system": "Be brief.",
            "input": "Which day?",
            "chosen": "Friday.",
            "rejected": "Monday.",
            "order": ["a", "b"],
            "rating": [9.0, 6.0],
            "status": "unchanged",
            "chosen_score": 9.0,
        },
        "preference",
        ([system("Be brief."), Q], [GOOD], [BAD]),
    ),
    "Intel/orca_dpo_pairs": (
        {"system": "", "question": "Which day?", "chosen": "Friday.", "rejected": "Monday."},
        "preference",
        ([Q], [GOOD], [BAD]),
    ),
    "mlabonne/orpo-dpo-mix-40k": (
        {
            "source": "x",
            "prompt": "Which day?",
            "question": "Which day?",
            "chosen": [Q, GOOD],
            "rejected": [Q, BAD],
        },
        "preference",
        ([Q], [GOOD], [BAD]),
    ),
    "Magpie-Align/Magpie-Llama-3.1-Pro-DPO-100K-v0.1": (
        {
            "uuid": "1",
            "instruction": "Which day?",
            "gen_responses": ["x", "y", "z"],
            "chosen": [Q, GOOD],
            "rejected": [Q, BAD],
        },
        "preference",
        ([Q], [GOOD], [BAD]),
    ),
    "jondurbin/truthy-dpo-v0.1": (
        {
            "id": "1",
            "source": "x",
            "system": "Be brief.",
            "prompt": "Which day?",
            "chosen": "Friday.",
            "rejected": "Monday.",
        },
        "preference",
        ([system("Be brief."), Q], [GOOD], [BAD]),
    ),
    "trl-lib/tldr-preference": (
        {"prompt": "Which day?", "chosen": "Friday.", "rejected": "Monday."},
        "preference",
        ([Q], [GOOD], [BAD]),
    ),
    "Skywork/Skywork-Reward-Preference-80K-v0.2": (
        {"chosen": [Q, GOOD], "rejected": [Q, BAD], "source": "magpie_ultra"},
        "preference",
        ([Q], [GOOD], [BAD]),
    ),
    "hiyouga/DPO-En-Zh-20k": (
        {
            "conversations": [{"from": "human", "value": "Which day?"}],
            "chosen": {"from": "gpt", "value": "Friday."},
            "rejected": {"from": "gpt", "value": "Monday."},
        },
        "preference",
        ([Q], [GOOD], [BAD]),
    ),
    "LLaMA-Factory, alpaca": (
        {
            "instruction": "Which?",
            "input": "Or not.",
            "system": "Be brief.",
            "history": [["Hello?", "Hello!"]],
            "chosen": "Friday.",
            "rejected": "Monday.",
        },
        "preference",
        (
            [
                *(system("Be brief."), *EARLIER),
                {**user("Which?\n\nOr not."), "instruction": "Which?", "input": "Or not."},
            ],
            [GOOD],
            [BAD],
        ),
    ),
    "LLaMA-Factory, two outputs": (
        {"instruction": "Which day?", "input": "", "output": ["Friday.", "Monday."]},
        "preference",
        ([Q], [GOOD], [BAD]),
    ),
    "Axolotl, chat_template.default": (
        {"messages": [system("Be brief."), Q], "chosen": GOOD, "rejected": BAD},
        "preference",
        ([system("Be brief."), Q], [GOOD], [BAD]),
    ),
    "TRL, conversational": (
        {"prompt": [*EARLIER, Q], "chosen": [GOOD], "rejected": [BAD]},
        "preference",
        ([*EARLIER, Q], [GOOD], [BAD]),
    ),
    "TRL, with tools": (
        {"prompt": [Q], "chosen": [CALLING, RESULT, GOOD], "rejected": [BAD], "tools": [SCHEMA]},
        "preference",
        ([Q], [CALLING, RESULT, GOOD], [BAD]),
    ),
    "PKU-Alignment/PKU-SafeRLHF": (
        {
            "prompt": "Which day?",
            "prompt_source": "x",
            "response_0": "Monday.",
            "response_1": "Friday.",
            "is_response_0_safe": False,
            "is_response_1_safe": True,
            "better_response_id": 1,
            "safer_response_id": 1,
        },
        "saferlhf",
        ([Q], [GOOD], [BAD]),
    ),
    "stanfordnlp/SHP": (
        {
            "post_id": "x",
            "history": "Which day?",
            "human_ref_A": "Monday.",
            "human_ref_B": "Friday.",
            "labels": 0,
            "score_A": 3,
            "score_B": 30,
            "score_ratio": 10.0,
            "upvote_ratio": 0.9,
        },
        "shp",
        ([Q], [GOOD], [BAD]),
    ),
    "lmsys/chatbot_arena_conversations": (
        {
            "question_id": "x",
            "model_a": "a",
            "model_b": "b",
            "winner": "model_b",
            "judge": "c",
            "conversation_a": [Q, BAD],
            "conversation_b": [Q, GOOD],
            "turn": 1,
            "anony": True,
        },
        "arena",
        ([Q], [GOOD], [BAD]),
    ),
    "nvidia/HelpSteer3": (
        {
            "domain": "general",
            "language": "english",
            "context": [*EARLIER, Q],
            "response1": "Friday.",
            "response2": "Monday.",
            "overall_preference": -2,
        },
        "helpsteer",
        ([*EARLIER, Q], [GOOD], [BAD]),
    ),
}


@pytest.mark.parametrize("name", DATA_SETS)
@pytest.mark.parametrize("as_text", [False, True])
def test_rows_of_known_data_sets_are_told_and_read(name: str, as_text: bool) -> None:
    row, format, expected = DATA_SETS[name]
    if as_text and name != "LLaMA-Factory, two outputs":  # as CSV and Parquet files hold lists and numbers
        row = {field: json.dumps(value) if isinstance(value, list | dict) else value for field, value in row.items()}
        row = {field: str(value) if isinstance(value, int | float) else value for field, value in row.items()}
    assert detect([row], purpose="pairs") == (format,)
    pair = read(row, format)
    check(pair, *expected)
    assert (pair.tools is not None) == ("tools" in row)


def test_weights_count_for_both_answers() -> None:
    pair = read({"prompt": "Which day?", "chosen": "Friday.", "rejected": "Monday.", "loss_weight": 0.5})
    assert pair.rejected is not None
    assert [turn.weight for turn in pair.turns] == [turn.weight for turn in pair.rejected.turns] == [0.0, 0.5]


def test_a_system_message_is_dropped_from_both_conversations() -> None:
    row = {"chosen": [system("Be brief."), Q, GOOD], "rejected": [system("Be brief."), Q, BAD]}
    check(read(row, drops_system=True), [Q], [GOOD], [BAD])


def test_what_both_answers_begin_with_is_context() -> None:
    row = {"prompt": [Q], "chosen": [CALLING, RESULT, GOOD], "rejected": [CALLING, RESULT, BAD]}
    check(read(row), [Q, CALLING, RESULT], [GOOD], [BAD])
    check(read({"chosen": [*EARLIER[1:], Q, GOOD], "rejected": [*EARLIER[1:], Q, BAD]}), [EARLIER[1], Q], [GOOD], [BAD])


def test_columns_say_which_of_two_prompts_is_meant() -> None:
    row = {"prompt": "Which?", "question": "Which day?", "chosen": "Friday.", "rejected": "Monday."}
    error = refused(row)
    assert error.kind == "two_prompts"
    assert "columns: {question: question}" in error.change
    check(read(row, columns={"question": "question"}), [Q], [GOOD], [BAD])
    check(read(row, columns={"prompt": "prompt"}), [user("Which?")], [GOOD], [BAD])
    reader = Reader(Form("preference", {"question": "question"}))
    reader.read(row)
    assert reader.unread == {"prompt": 1}


# What refuses a row


TEXT = {"prompt": "Which day?", "chosen": "Friday.", "rejected": "Monday."}
LONG = "Which of the seven days of the week is it today?"
REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "equal texts": ({**TEXT, "rejected": "Friday."}, "equal_answers", "'chosen' and 'rejected' are equal"),
    "equal but for space": ({**TEXT, "rejected": "Friday.\n"}, "equal_answers", "are equal"),
    "equal conversations": ({"chosen": [Q, GOOD], "rejected": [Q, GOOD]}, "equal_answers", "are equal"),
    "an empty answer": ({**TEXT, "chosen": ""}, "empty_answer", "'chosen' is empty"),
    "a blank answer": ({**TEXT, "rejected": " \n"}, "empty_answer", "'rejected' is empty"),
    "a null": ({**TEXT, "rejected": None}, "empty_answer", "'rejected' is empty"),
    "an empty message": ({"messages": [Q], "chosen": GOOD, "rejected": assistant("")}, "empty_answer", "rejected[0]"),
    "an empty answer in a text": (
        {"chosen": HH.format("Friday."), "rejected": HH.format("")},
        "empty_answer",
        "'rejected': an 'Assistant:' with nothing behind it",
    ),
    "no rejected": ({"prompt": "a", "chosen": "b"}, "missing_field", "no field 'rejected'"),
    "no answers": ({"prompt": "a"}, "missing_field", "no 'chosen' and no 'rejected'"),
    "an answer of the user's": ({"messages": [Q], "chosen": Q, "rejected": BAD}, "not_an_answer", "(roles: user)"),
    "a number": ({**TEXT, "chosen": 3}, "wrong_type", "'chosen' is a number"),
    "a message without a role": ({"prompt": "a", "chosen": {"x": "b"}, "rejected": BAD}, "missing_field", "no 'role'"),
    "no prompt": ({"chosen": "Friday.", "rejected": "Monday."}, "no_prompt", "no prompt before the answers"),
    "no prompt, answers alone": ({"chosen": [GOOD], "rejected": [BAD]}, "no_prompt", "no prompt before"),
    "a text that begins otherwise": (
        {"chosen": "Human: a\n\nAssistant: b", "rejected": "Human: a\n\nAssistant: c"},
        "no_prompt",
        "no prompt before",
    ),
    "one text that begins otherwise": (
        {"chosen": HH.format("Friday."), "rejected": "Monday."},
        "mixed_answers",
        "'chosen' is a conversation with its prompt, and 'rejected' an answer alone",
    ),
    "a conversation and an answer": (
        {"prompt": "Which day?", "chosen": [GOOD], "rejected": [Q, BAD]},
        "mixed_answers",
        "'rejected' is a conversation with its prompt, and 'chosen' an answer alone",
    ),
    "nothing in common": ({"chosen": [Q, GOOD], "rejected": [user("Why?"), BAD]}, "nothing_shared", "no first message"),
    "two questions": (
        {"chosen": [*EARLIER, Q, GOOD], "rejected": [*EARLIER, user("Why?"), BAD]},
        "different_prompts",
        "message 2 of 'chosen' and of 'rejected' differ",
    ),
    "several turns": (
        {"chosen": [*EARLIER, Q, GOOD], "rejected": [EARLIER[0], BAD, Q, BAD]},
        "multi_turn",
        "goes on behind the answers that differ (roles from message 1 on: assistant, user, assistant)",
    ),
    "several turns as text": (
        {"chosen": HH.format("Friday."), "rejected": HH.format("x").replace("Hello!", "Go away.")},
        "multi_turn",
        "goes on behind the answers that differ",
    ),
    "a beginning": (
        {"chosen": [*EARLIER, Q, GOOD], "rejected": EARLIER},
        "one_answer",
        "'rejected' is the beginning of",
    ),
    "a call at the end": (
        {"prompt": [Q], "chosen": [CALLING, RESULT], "rejected": [BAD]},
        "no_answer",
        "the role tool",
    ),
    "a message not to be trained": (
        {"prompt": "Which day?", "chosen": [{**GOOD, "train": False}], "rejected": [BAD]},
        "mask",
        "message 1 of 'chosen' has a weight of its own",
    ),
    "a part of a message": (
        {"prompt": "a", "chosen": GOOD, "rejected": assistant("x") | {"content": [{"text": "x", "loss": 0.5}]}},
        "mask",
        "of 'rejected' has a weight of its own",
    ),
    "another prompt beside": (
        {"prompt": "Why?", "chosen": [Q, GOOD], "rejected": [Q, BAD]},
        "other_prompt",
        "'prompt' is not what the conversation 'chosen' begins with",
    ),
    "another prompt of messages": (
        {"prompt": [user("Why?")], "chosen": [Q, GOOD], "rejected": [Q, BAD]},
        "other_prompt",
        "'prompt' is not what",
    ),
    "two prompts": ({**TEXT, "question": "Why?"}, "two_prompts", "'prompt' and 'question' differ"),
    "a prompt and messages": ({**TEXT, "messages": [system("x"), Q]}, "two_prompts", "'prompt' and 'messages' differ"),
    "a history and messages": (
        {"prompt": [Q], "history": [["a", "b"]], "chosen": "c", "rejected": "d"},
        "two_prompts",
        "'history' beside a prompt that is messages",
    ),
    "a prompt with its answer": (
        {"messages": [Q, GOOD], "chosen": GOOD, "rejected": BAD},
        "answered_prompt",
        "the prompt 'messages' ends with an answer",
    ),
    "a prompt with the rejected answer": (
        {"messages": [Q, BAD], "chosen": [Q, GOOD], "rejected": [Q, BAD]},
        "answered_prompt",
        "the prompt 'messages' ends with an answer",
    ),
    "the prompt once more": (
        {"prompt": LONG, "chosen": f"{LONG} Friday.", "rejected": f"{LONG} Monday."},
        "repeated_prompt",
        "the answers begin with the prompt 'prompt'",
    ),
    "a prompt that the assistant begins, once more": (
        {"prompt": [EARLIER[1], Q], "chosen": [EARLIER[1], Q, GOOD], "rejected": [EARLIER[1], Q, BAD]},
        "repeated_prompt",
        "the answers begin with the prompt",
    ),
    "two system prompts": (
        {"system": "x", "chosen": [system("y"), Q, GOOD], "rejected": [system("y"), Q, BAD]},
        "wrong_type",
        "two system prompts",
    ),
    "steps": (
        {**TEXT, "initial_reason_steps": "One.", "full_chosen": "a", "full_rejected": "b"},
        "partial_answers",
        "'full_chosen' and 'full_rejected' beside",
    ),
    "several rejected answers": ({**TEXT, "rejected": ["a", "b", "c"]}, "ranking", "'rejected' is a list of 3 answers"),
    "an answer in a list": ({**TEXT, "rejected": ["a"]}, "wrong_type", "'rejected' is a list with one text in it"),
    "three outputs": ({"instruction": "a", "output": ["b", "c", "d"]}, "ranking", "'output' is a list of 3 answers"),
    "scores": (
        {**TEXT, "score_chosen": 3, "score_rejected": 4.5},
        "score_order",
        "'score_chosen' is 3 and 'score_rejected' is 4.5",
    ),
    "ratings as text": (
        {**TEXT, "chosen-rating": "3", "rejected-rating": "10"},
        "score_order",
        "'chosen-rating' is 3 and 'rejected-rating' is 10",
    ),
    "a score that is none": (
        {**TEXT, "score_chosen": "high", "score_rejected": 1},
        "wrong_type",
        "'high', not a number",
    ),
    "a label": ({**TEXT, "label": False}, "two_verdicts", "a field 'label' that says whether an answer is a good one"),
    "a picture": ({**TEXT, "images": ["a.png"]}, "media", "only text is trained"),
    "a picture in the prompt": ({**TEXT, "prompt": "<image>\nWhich day?"}, "media", "<image>"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_rows_that_could_mean_two_things_are_refused(name: str) -> None:
    row, kind, reason = REFUSALS[name]
    error = refused(row)
    assert (error.kind, reason in error.reason) == (kind, True), error
    assert error.change or kind in ("missing_field", "wrong_type", "empty_answer", "not_an_answer", "no_answer"), error


SAFER, SHP = DATA_SETS["PKU-Alignment/PKU-SafeRLHF"][0], DATA_SETS["stanfordnlp/SHP"][0]
ARENA, HELPSTEER = DATA_SETS["lmsys/chatbot_arena_conversations"][0], DATA_SETS["nvidia/HelpSteer3"][0]


@pytest.mark.parametrize(
    ("format", "row", "kind", "reason"),
    [
        ("saferlhf", {**SAFER, "better_response_id": 2}, "wrong_type", "'better_response_id' is 2, not 0 or 1"),
        ("saferlhf", {**SAFER, "better_response_id": True}, "wrong_type", "is true/false, not a number"),
        ("saferlhf", {**SAFER, "better_response_id": None}, "missing_field", "says nothing"),
        ("saferlhf", {**SAFER, "response_0": "Friday."}, "equal_answers", "are equal"),
        ("saferlhf", {**SAFER, "response_0": ""}, "empty_answer", "'response_0' is empty"),
        ("saferlhf", {**SAFER, "prompt": ""}, "empty_prompt", "'prompt' is empty"),
        ("shp", {**SHP, "labels": 1}, "score_order", "'score_A' is 3 and 'score_B' is 30"),
        ("shp", {**SHP, "history": None}, "wrong_type", "'history' is nothing"),
        (
            "arena",
            {**ARENA, "winner": "tie (bothbad)"},
            "tie",
            "'winner' is 'tie (bothbad)': neither answer is preferred",
        ),
        ("arena", {**ARENA, "winner": "both_bad"}, "tie", "neither answer is preferred"),
        ("arena", {**ARENA, "winner": "a"}, "wrong_type", "'winner' is 'a', not model_a, model_b or a tie"),
        ("arena", {**ARENA, "conversation_a": None}, "missing_field", "'conversation_a' holds nothing"),
        ("arena", {**ARENA, "conversation_a": [BAD], "conversation_b": [GOOD]}, "nothing_shared", "no first message"),
        ("arena", {**ARENA, "conversation_a": [Q, BAD, Q, BAD]}, "multi_turn", "'conversation_a' goes on behind"),
        ("helpsteer", {**HELPSTEER, "overall_preference": 0}, "tie", "'overall_preference' is 0"),
        ("helpsteer", {**HELPSTEER, "context": [Q, GOOD]}, "answered_prompt", "'context' ends with an answer"),
    ],
)
def test_comparisons_without_a_preference_are_refused(format: str, row: dict[str, Any], kind: str, reason: str) -> None:
    error = refused(row, format)
    assert (error.kind, reason in error.reason) == (kind, True), error
    assert kind != "tie" or "data.on_bad_row: skip" in error.change


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}, "stepwise"),
        ({"prompt": "a", "completion": "b", "label": True}, "kto"),
        ({"prompt": "a", "completion": [GOOD], "label": False, "rating": 3}, "kto"),
        ({"source": "x", "instruction": "a", "models": ["m"], "completions": [{"response": "b"}] * 4}, "ranking"),
        ({"prompt": "\n\nHuman: a\n\nAssistant: ", "answers": [{"answer": "b", "rank": 1.0}] * 7}, "ranking"),
    ],
)
def test_other_preferences_are_refused_by_name(row: dict[str, Any], kind: str) -> None:
    assert detect([row], purpose="pairs") == ()
    error = other_preference(row)
    assert error is not None
    assert (error.kind, bool(error.change)) == (kind, True)
    assert refused(row).kind == kind
    assert other_preference(TEXT) is None


# What is counted


def test_ties_are_counted_and_read() -> None:
    reader = Reader(Form("preference"))
    for scores in ((5, 5), (5, 4), (None, None), ("4.0", 4)):
        reader.read({**TEXT, "score_chosen": scores[0], "score_rejected": scores[1]})
    with pytest.raises(RowError):
        reader.read({**TEXT, "rejected": "Friday.", "score_chosen": 1, "score_rejected": 1})
    assert (reader.ties, reader.unread) == (2, {})


def test_what_is_not_read_of_a_pair_is_counted_and_judges_nothing() -> None:
    row = {**TEXT, "completion": "x", "output": "y", "chosen_score": 3, "chat": "z", "is_good": False, "status": "bad"}
    reader = Reader(Form("preference"))
    reader.read(row)
    assert reader.unread == {"completion": 1, "output": 1, "chosen_score": 1, "chat": 1, "is_good": 1, "status": 1}
    assert reader.values.seen == {}
    reader = Reader(Form("saferlhf"))
    reader.read(SAFER)
    assert reader.values.seen == {}
    assert reader.unread["safer_response_id"] == 1


def test_presets_are_pairs_of_other_columns() -> None:
    row = {**SAFER, "better_response_id": 0}
    check(read(row, "saferlhf"), [Q], [BAD], [GOOD])
    (pair,) = Reader(form_of("saferlhf_safety", {}, {})).read(row)
    check(pair, [Q], [GOOD], [BAD])


# Whatever a row holds


@pytest.mark.parametrize("name", DATA_SETS)
def test_nothing_is_swapped_in_silence(name: str) -> None:
    """With its answers changed into one another a row gives the opposite pair or, where scores contradict, none."""
    row, format, (context, chosen, rejected) = DATA_SETS[name]
    text = json.dumps(row)
    swapped = json.loads(text.replace("Friday.", "\0").replace("Monday.", "Friday.").replace("\0", "Monday."))
    if name == "TRL, with tools":
        swapped = {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
        check(read(swapped), context, rejected, chosen)
    else:
        check(read(swapped, format), context, rejected, chosen)
    fields = {"score_chosen": "score_rejected", "chosen-rating": "rejected-rating", "chosen_rating": "rejected_rating"}
    for first, second in {**fields, "rating_chosen": "rating_rejected"}.items():
        if second in row:
            assert refused({**row, first: row[second], second: row[first]}, format).kind == "score_order"


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_row_changed_by_chance_is_a_pair_or_refused_by_a_sentence(name: str) -> None:
    row, format, _ = DATA_SETS[name]
    chance = random.Random(name)
    for _ in range(200):
        changed = mutations.changed(chance, row, chance.choice((1, 1, 2, 3)))
        if not isinstance(changed, dict):
            continue
        candidates(changed, purpose="pairs")
        with suppress(RowError, RecursionError):
            check_sound(read(changed, format))


def check_sound(pair: Conversation) -> None:
    """A pair has one context, and two answers of the assistant's that differ."""
    assert pair.rejected is not None
    sides = (pair, pair.rejected)
    starts = [next(at for at, turn in enumerate(side.turns) if turn.weight) for side in sides]
    assert starts[0] == starts[1] > 0
    assert pair.messages[: starts[0]] == pair.rejected.messages[: starts[0]]
    assert pair.messages[starts[0]] != pair.rejected.messages[starts[0]]
    assert pair.tools == pair.rejected.tools
    for side in sides:
        answer = side.turns[starts[0] :]
        assert {turn.role for turn in answer} <= {"assistant", "tool"}
        assert answer[-1].role == "assistant"
        assert {turn.weight for turn in answer if turn.role == "assistant"} == {answer[0].weight}
        assert all(turn.weight == 0 for turn in side.turns if turn.role != "assistant")


@pytest.mark.parametrize("name", FORMATS)
def test_only_pairs_have_a_rejected_answer(name: str) -> None:
    assert (FORMATS[name].purpose == "pairs") == (name in {format for _, format, _ in DATA_SETS.values()})
