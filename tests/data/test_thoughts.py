"""Thoughts in an answer's words: which rows hold one that was cut, or nothing else, and which only mention a tag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.test_constructs import (
    AGAIN,
    ASK,
    FOUR,
    HEAD,
    OPENED_THOUGHT,
    OPENER,
    TAIL,
    A,
    Construct,
    U,
    marked,
    prepared_as,
)
from tonnage.data import DataError
from tonnage.data.text.thoughts import TAGS, check_thoughts
from tonnage.forms.conversation import RowError

THOUGHT = "Two and two."
ALWAYS_WRITES_ONE = (
    HEAD + "{%- if m.role == 'assistant' -%}{%- set body = m.content -%}{%- set thought = m.reasoning_content or '' -%}"
    "{%- if '<think>' in body and '</think>' in body -%}"
    "{%- set thought = body.split('</think>')[0].split('<think>')[-1] | trim -%}"
    "{%- set body = body.split('</think>')[-1] | trim -%}{%- endif -%}"
    "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + body -}}{%- else -%}{{- m.content -}}{%- endif -%}"
    + TAIL
    + OPENER
)


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(("opening", "closing"), TAGS)
def test_what_is_cut_or_nothing_but_a_thought_is_refused(opening: str, closing: str) -> None:
    for content in (
        f"{opening}{THOUGHT}",
        f" \n{opening}\n{THOUGHT}\n",
        f"{opening}a{closing}\n{opening}{THOUGHT}",
        f"{THOUGHT}{closing}\n\n{opening}again",
        opening,
    ):
        with pytest.raises(RowError, match=r"message 3 opens a thought with .* and never closes it") as error:
            check_thoughts(said(content), 3)
        assert error.value.kind == "cut_thought"
    with pytest.raises(RowError, match="nothing but a thought"):
        check_thoughts(said(f"{opening}\n{THOUGHT}\n{closing}\n"), 3)
    for reasoning in (f"{opening}{THOUGHT}", f"{opening}{THOUGHT}{closing}"):
        with pytest.raises(RowError, match="its reasoning holds the tag"):
            check_thoughts(said("4.", reasoning_content=reasoning), 3)


@pytest.mark.parametrize(
    "message",
    [
        said("<think>Two.</think>4."),
        said("Two and two make four.\n</think>\n\nFour."),
        said("Write <think> first"),
        said("`<think>` opens a thought, and what closes it is </think>"),
        said("<think>Say <think>.</think>4. <think>"),
        said("4.", reasoning_content="The user says <think> and </think> a lot."),
        said("<think>Two.</think>", tool_calls=[{"function": {"name": "add", "arguments": {}}}]),
        said("4.<|end|>"),
        said("A thought, <thinking>, in the middle"),
    ],
)
def test_whole_thoughts_and_tags_within_a_sentence_are_not(message: dict[str, Any]) -> None:
    check_thoughts(message, 0)


@pytest.mark.parametrize(
    "messages",
    [
        [ASK, said(f"<think>\n{THOUGHT}")],
        [ASK, said(f"<think>\n{THOUGHT}"), AGAIN, FOUR],
        [ASK, said(f"<think>\n{THOUGHT}", train=False), AGAIN, FOUR],
        [ASK, said("4.", reasoning_content=f"<think>\n{THOUGHT}")],
    ],
)
def test_a_row_with_a_cut_thought_is_bad(messages: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        prepared_as(Construct(OPENED_THOUGHT, messages, ""), tmp_path)
    assert error.value.account.total.bad_kinds == {"cut_thought": 1}


def test_a_thought_that_the_template_takes_for_words_is_refused(tmp_path: Path) -> None:
    """One that looks for both tags writes an empty thought before a thought that has but the closing one."""
    closed = [ASK, said(f"{THOUGHT}\n</think>\n\nIt is 4.")]
    expected = f"{U}What is 2+2?<|im_end|>\n{A}<think>\n⟦{THOUGHT}\n</think>\n\nIt is 4.<|im_end|>⟧\n"
    assert marked(prepared_as(Construct(OPENED_THOUGHT, closed, ""), tmp_path)) == expected
    with pytest.raises(DataError, match="does not see the thought that </think> ends"):
        prepared_as(Construct(ALWAYS_WRITES_ONE, closed, ""), tmp_path)
    mentions = [ASK, said("The tag </think> ends it.", reasoning_content=THOUGHT)]
    expected = f"{U}What is 2+2?<|im_end|>\n{A}⟦<think>\n{THOUGHT}\n</think>\n\nThe tag </think> ends it.<|im_end|>⟧\n"
    assert marked(prepared_as(Construct(ALWAYS_WRITES_ONE, mentions, ""), tmp_path)) == expected
