"""What chat templates do, construct by construct: each in a small template of our own, marked by hand.

The constructs are those of about two hundred public templates (the folders of llama.cpp, vLLM, TRL and others). In an
expectation, what is supervised stands between ⟦ and ⟧.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tonnage.config import Data, Source
from tonnage.data import DataError, Prepared, encode_prompt, prepare
from tonnage.errors import UserError

SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
ASK: dict[str, Any] = {"role": "user", "content": "What is 2+2?"}
FOUR: dict[str, Any] = {"role": "assistant", "content": "It is 4."}
AGAIN: dict[str, Any] = {"role": "user", "content": "And 3+3?"}
SIX: dict[str, Any] = {"role": "assistant", "content": "It is 6."}
THINK_FOUR = {**FOUR, "reasoning_content": "Two and two."}
THINK_SIX = {**SIX, "reasoning_content": "Three and three."}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}],
}
RESULT: dict[str, Any] = {"role": "tool", "content": "6"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]

HEAD = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
TAIL = "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
OPENER = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
CHATML = HEAD + "{{- m.content -}}" + TAIL + OPENER
LAST_USER = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
SPLIT = (
    "{%- set said = m.content -%}{%- set thought = m.reasoning_content or '' -%}"
    "{%- if '</think>' in said -%}{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip() -%}"
    "{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
)
OPENED_THOUGHT = (
    LAST_USER
    + HEAD
    + "{%- if m.role == 'assistant' -%}"
    + SPLIT
    + "{%- if loop.index0 > ns.last -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}{{- said -}}"
    + "{%- else -%}{{- m.content -}}{%- endif -%}"
    + TAIL
    + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"
)
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""By which Qwen's tokenizers cut words."""
U, A = "<|im_start|>user\n", "<|im_start|>assistant\n"


@dataclass
class Construct:
    """A template, what a row holds, and what comes of it."""

    template: str | dict[str, str]
    messages: list[dict[str, Any]]
    expected: str
    tools: list[dict[str, Any]] | None = None
    specials: tuple[str, ...] = QWEN
    bos: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] | None = None
    """What generation stops at, where that is not just the token that closes turns and the end of text."""
    prompt: bool = True
    """Whether the prompt of the first answer is what stands before it."""


CALLS = (
    "{%- for c in m.tool_calls or [] -%}"
    "{{- '<tool_call>' + c.function.name + c.function.arguments | tojson + '</tool_call>' -}}{%- endfor -%}"
)

CONSTRUCTS: dict[str, Construct] = {
    "the prompt opens a thought, and a finished turn closes it": Construct(
        OPENED_THOUGHT,
        [ASK, FOUR],
        f"{U}What is 2+2?<|im_end|>\n{A}<think>⟦\n\n</think>\n\nIt is 4.<|im_end|>⟧\n",
        prompt=False,
    ),
    "the prompt opens a thought, and the row has one": Construct(
        OPENED_THOUGHT,
        [ASK, THINK_FOUR],
        f"{U}What is 2+2?<|im_end|>\n{A}<think>\n⟦Two and two.\n</think>\n\nIt is 4.<|im_end|>⟧\n",
    ),
    "earlier turns have no thought, which the prompt opened": Construct(
        OPENED_THOUGHT,
        [ASK, FOUR, AGAIN, THINK_SIX],
        f"{U}What is 2+2?<|im_end|>\n{A}⟦It is 4.<|im_end|>⟧\n{U}And 3+3?<|im_end|>\n"
        f"{A}<think>\n⟦Three and three.\n</think>\n\nIt is 6.<|im_end|>⟧\n",
        prompt=False,
    ),
    "thoughts of earlier turns are left out, from a field": Construct(
        OPENED_THOUGHT,
        [ASK, THINK_FOUR, AGAIN, THINK_SIX],
        f"{U}What is 2+2?<|im_end|>\n{A}⟦It is 4.<|im_end|>⟧\n{U}And 3+3?<|im_end|>\n"
        f"{A}<think>\n⟦Three and three.\n</think>\n\nIt is 6.<|im_end|>⟧\n",
        prompt=False,
    ),
    "thoughts of earlier turns are left out, from the words": Construct(
        OPENED_THOUGHT,
        [
            ASK,
            {**FOUR, "content": "<think>\nTwo and two.\n</think>\n\nIt is 4."},
            AGAIN,
            {**SIX, "content": "<think>\nThree and three.\n</think>\n\nIt is 6."},
        ],
        f"{U}What is 2+2?<|im_end|>\n{A}⟦It is 4.<|im_end|>⟧\n{U}And 3+3?<|im_end|>\n"
        f"{A}<think>\n⟦Three and three.\n</think>\n\nIt is 6.<|im_end|>⟧\n",
        prompt=False,
    ),
    "a finished turn closes the opened thought in another way": Construct(
        HEAD
        + "{%- if m.role == 'assistant' -%}{{- '<think></think>' -}}{%- endif -%}{{- m.content -}}"
        + TAIL
        + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}",
        [ASK, FOUR, AGAIN, SIX],
        f"{U}What is 2+2?<|im_end|>\n{A}<think>⟦</think>It is 4.<|im_end|>⟧\n"
        f"{U}And 3+3?<|im_end|>\n{A}<think>⟦</think>It is 6.<|im_end|>⟧\n",
        prompt=False,
    ),
    "an argument turns thinking off": Construct(
        OPENED_THOUGHT.replace(
            "<think>\\n' -}}{%- endif -%}",
            "' -}}{%- if enable_thinking is not defined or enable_thinking -%}{{- '<think>\\n' -}}{%- else -%}"
            "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}{%- endif -%}",
        ),
        [ASK, FOUR],
        f"{U}What is 2+2?<|im_end|>\n{A}<think>\n\n</think>\n\n⟦It is 4.<|im_end|>⟧\n",
        options={"template_arguments": {"enable_thinking": False}},
    ),
    "thoughts under another name": Construct(
        HEAD
        + "{%- if m.thinking -%}{{- '<think>' + m.thinking + '</think>' -}}{%- endif -%}{{- m.content -}}"
        + TAIL
        + OPENER,
        [ASK, THINK_FOUR],
        f"{U}What is 2+2?<|im_end|>\n{A}⟦<think>Two and two.</think>It is 4.<|im_end|>⟧\n",
    ),
    "the last turn is closed by another token": Construct(
        "{%- for m in messages -%}{{- '<|start|>' + m.role -}}"
        "{%- if m.role == 'assistant' -%}"
        "{%- if m.thinking and loop.last -%}"
        "{{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' -}}{%- endif -%}"
        "{{- '<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') -}}"
        "{%- else -%}{{- '<|message|>' + m.content + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}",
        [ASK, FOUR, AGAIN, THINK_SIX],
        "<|start|>user<|message|>What is 2+2?<|end|><|start|>assistant⟦<|channel|>final<|message|>It is 4.<|end|>⟧"
        "<|start|>user<|message|>And 3+3?<|end|>"
        "<|start|>assistant⟦<|channel|>analysis<|message|>Three and three.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 6.<|return|>⟧",
        specials=("<|endoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        stops=("<|return|>", "<|endoftext|>"),
    ),
    "several tokens close a turn": Construct(
        "{%- for m in messages -%}{{- '<|open|>' + m.role + '<|text|>' + m.content + '<|text_end|><|close|>' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|open|>assistant<|text|>' -}}{%- endif -%}",
        [ASK, FOUR, AGAIN, SIX],
        "<|open|>user<|text|>What is 2+2?<|text_end|><|close|><|open|>assistant<|text|>⟦It is 4.<|text_end|><|close|>⟧"
        "<|open|>user<|text|>And 3+3?<|text_end|><|close|><|open|>assistant<|text|>⟦It is 6.<|text_end|><|close|>⟧",
        specials=("<|endoftext|>", "<|open|>", "<|text|>", "<|text_end|>", "<|close|>"),
    ),
    "the end of text stands behind the whole conversation": Construct(
        "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + '<|end|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- else -%}{{- eos_token -}}{%- endif -%}",
        [ASK, FOUR, AGAIN, SIX],
        "<|user|>What is 2+2?<|end|><|assistant|>⟦It is 4.<|end|>⟧"
        "<|user|>And 3+3?<|end|><|assistant|>⟦It is 6.<|end|>⟧<|endoftext|>",
        specials=("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "contents are trimmed": Construct(
        HEAD + "{{- m.content | trim -}}" + TAIL + OPENER,
        [ASK, {**FOUR, "content": " \nIt is 4.\n "}],
        f"{U}What is 2+2?<|im_end|>\n{A}⟦It is 4.<|im_end|>⟧\n",
    ),
    "an answer begins with a line break, which joins that of the header": Construct(
        CHATML,
        [ASK, {**FOUR, "content": "\nIt is 4."}],
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant⟦\n\nIt is 4.<|im_end|>⟧\n",
        prompt=False,
    ),
    "a row that already holds the closing token": Construct(
        CHATML,
        [ASK, {**FOUR, "content": "It is 4.<|im_end|>"}],
        f"{U}What is 2+2?<|im_end|>\n{A}⟦It is 4.<|im_end|>⟧\n",
    ),
    "a row that already holds the first token": Construct(
        "{{- bos_token -}}{%- for m in messages -%}{{- m.content -}}{%- if m.role == 'assistant' -%}"
        "{{- eos_token -}}{%- endif -%}{%- endfor -%}",
        [{**ASK, "content": "<s>What is 2+2?"}, FOUR],
        "<s>What is 2+2?⟦It is 4.</s>⟧",
        specials=("</s>", "<s>"),
        bos="<s>",
    ),
    "calls want ids of nine characters": Construct(
        HEAD + "{%- for c in m.tool_calls or [] -%}{%- if c.id is not defined or c.id | length != 9 -%}"
        "{{- raise_exception('ids of nine characters') -}}{%- endif -%}"
        "{{- c.function.name + (c.function.arguments | tojson) + c.id -}}{%- endfor -%}"
        "{%- if m.role == 'tool' -%}{{- m.tool_call_id + '=' -}}{%- endif -%}{{- m.content -}}" + TAIL + OPENER,
        [ASK, CALL, RESULT, SIX],
        f'{U}What is 2+2?<|im_end|>\n{A}⟦add{{"a": 3}}call00001<|im_end|>⟧\n'
        f"<|im_start|>tool\ncall00001=6<|im_end|>\n{A}⟦It is 6.<|im_end|>⟧\n",
    ),
    "a call and its words": Construct(
        HEAD + "{{- m.content -}}" + CALLS + TAIL + OPENER,
        [ASK, {**CALL, "content": "I add."}, RESULT, SIX],
        f'{U}What is 2+2?<|im_end|>\n{A}⟦I add.<tool_call>add{{"a": 3}}</tool_call><|im_end|>⟧\n'
        f"<|im_start|>tool\n6<|im_end|>\n{A}⟦It is 6.<|im_end|>⟧\n",
        specials=(*QWEN, "<tool_call>", "</tool_call>"),
    ),
    "the turn goes on behind the result of a call": Construct(
        "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '<|user|>' + m.content + '<|end|>' -}}"
        "{%- elif m.role == 'tool' -%}{{- '[' + m.content + ']' -}}"
        "{%- else -%}{%- if messages[loop.index0 - 1].role == 'user' -%}{{- '<|assistant|>' -}}{%- endif -%}"
        "{{- m.content -}}{%- for c in m.tool_calls or [] -%}"
        "{{- '<|call|>' + c.function.name + c.function.arguments | tojson + '<|called|>' -}}{%- endfor -%}"
        "{%- if not m.tool_calls -%}{{- '<|end|>' -}}{%- endif -%}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt and messages[-1].role == 'user' -%}{{- '<|assistant|>' -}}{%- endif -%}",
        [ASK, CALL, RESULT, SIX],
        '<|user|>What is 2+2?<|end|><|assistant|>⟦<|call|>add{"a": 3}<|called|>⟧[6]⟦It is 6.<|end|>⟧',
        specials=("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", "<|call|>", "<|called|>"),
        stops=("<|end|>", "<|called|>", "<|endoftext|>"),
    ),
    "a template that cannot do without tools": Construct(
        "{%- for t in tools -%}{{- t | tojson + '\\n' -}}{%- endfor -%}"
        + HEAD
        + "{{- m.content -}}"
        + CALLS
        + TAIL
        + OPENER,
        [ASK, CALL, RESULT, SIX],
        f'{json.dumps(TOOLS[0])}\n{U}What is 2+2?<|im_end|>\n{A}⟦<tool_call>add{{"a": 3}}</tool_call><|im_end|>⟧\n'
        f"<|im_start|>tool\n6<|im_end|>\n{A}⟦It is 6.<|im_end|>⟧\n",
        tools=TOOLS,
    ),
    "a template of its own for rows with tools": Construct(
        {
            "default": CHATML,
            "tool_use": "{{- 'Tools: ' + tools | tojson + '\\n' -}}"
            + HEAD
            + "{{- m.content -}}"
            + CALLS
            + TAIL
            + OPENER,
        },
        [ASK, CALL, RESULT, SIX],
        f'Tools: {json.dumps(TOOLS)}\n{U}What is 2+2?<|im_end|>\n{A}⟦<tool_call>add{{"a": 3}}</tool_call><|im_end|>⟧\n'
        f"<|im_start|>tool\n6<|im_end|>\n{A}⟦It is 6.<|im_end|>⟧\n",
        tools=TOOLS,
    ),
    "a template by name": Construct(
        {
            "default": CHATML,
            "short": "{%- for m in messages -%}{{- m.role[0] + m.content + '<|im_end|>' -}}{%- endfor -%}"
            "{%- if add_generation_prompt -%}{{- 'a' -}}{%- endif -%}",
        },
        [ASK, FOUR],
        "uWhat is 2+2?<|im_end|>a⟦It is 4.<|im_end|>⟧",
        options={"template": "short"},
    ),
    "the date": Construct(
        "{{- '<|im_start|>system\\nToday is ' + strftime_now('%d %b %Y') + '.<|im_end|>\\n' -}}" + CHATML,
        [ASK, FOUR],
        f"<|im_start|>system\nToday is 05 Mar 2024.<|im_end|>\n{U}What is 2+2?<|im_end|>\n{A}⟦It is 4.<|im_end|>⟧\n",
        options={"date": "2024-03-05"},
        prompt=False,
    ),
    "a system message that is refused, and folded": Construct(
        "{%- if messages[0].role == 'system' -%}{{- raise_exception('no system') -}}{%- endif -%}" + CHATML,
        [SYSTEM, ASK, FOUR],
        f"{U}Be brief.\n\nWhat is 2+2?<|im_end|>\n{A}⟦It is 4.<|im_end|>⟧\n",
        options={"fold_system": True},
        prompt=False,
    ),
    "a system message that is taken is not folded": Construct(
        CHATML,
        [SYSTEM, ASK, FOUR],
        f"<|im_start|>system\nBe brief.<|im_end|>\n{U}What is 2+2?<|im_end|>\n{A}⟦It is 4.<|im_end|>⟧\n",
        options={"fold_system": True},
    ),
    "generation tags": Construct(
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}{%- if m.role == 'assistant' -%}"
        "{%- generation -%}{{- m.content + '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}"
        "{%- else -%}{{- m.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}" + OPENER,
        [ASK, FOUR],
        f"{U}What is 2+2?<|im_end|>\n{A}⟦It is 4.<|im_end|>⟧\n",
    ),
    "a prompt with other white space than the header": Construct(
        "{%- for m in messages -%}{{- ('USER: ' if m.role == 'user' else 'BOT:  ') + m.content -}}"
        "{{- eos_token if m.role == 'assistant' else '\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- ' BOT: ' -}}{%- endif -%}",
        [ASK, FOUR, AGAIN, SIX],
        "USER: What is 2+2?\nBOT:⟦  It is 4.</s>⟧USER: And 3+3?\nBOT:⟦  It is 6.</s>⟧",
        specials=("</s>",),
        prompt=False,
    ),
    "an answer that begins like the thought that the prompt opens": Construct(
        HEAD
        + "{{- m.content -}}"
        + TAIL
        + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<|thought|>\\n' -}}{%- endif -%}",
        [ASK, {**FOUR, "content": "<b>It</b> is 4."}, AGAIN, SIX],
        f"{U}What is 2+2?<|im_end|>\n{A}⟦<b>It</b> is 4.<|im_end|>⟧\n{U}And 3+3?<|im_end|>\n{A}⟦It is 6.<|im_end|>⟧\n",
        specials=(*QWEN[:3], "<|thought|>"),
        prompt=False,
    ),
}


def tokenizer_of(one: Construct) -> Any:
    """A token for each byte, and one for two line breaks: what begins with one takes that of a header along."""
    vocabulary = {char: number for number, char in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=one.specials[0], pad_token=one.specials[0])
    tokenizer.add_special_tokens({"extra_special_tokens": list(one.specials[1:])})
    if one.bos:
        tokenizer.bos_token = one.bos
    tokenizer.chat_template = one.template
    return tokenizer


def prepared_as(one: Construct, tmp_path: Path, **changes: Any) -> Prepared:
    row: dict[str, Any] = {"messages": one.messages} | ({"tools": one.tools} if one.tools else {})
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    options = Data(train=(Source(path=str(file)),), pack=False, max_length=4096, **{**one.options, **changes})
    return prepare(options, tokenizer_of(one), cache=tmp_path / "cache")


def marked(prepared: Prepared) -> str:
    """The text of the only document, what is trained between ⟦ and ⟧."""
    pack, text, inside = prepared.train.pack(0), "", False
    run: list[int] = []
    for token, weight in [*zip(pack.input_ids.tolist(), pack.weights.tolist(), strict=True), (None, 0.0)]:
        if token is None or (weight > 0) != inside:
            text += (
                str(prepared.tokenizer.decode(run))
                + ("⟧" if inside else "")
                + ("⟦" if token is not None and weight > 0 else "")
            )
            run, inside = [], weight > 0
        if token is not None:
            run.append(token)
    return text


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_masks_are_as_marked_by_hand(name: str, tmp_path: Path) -> None:
    one = CONSTRUCTS[name]
    prepared = prepared_as(one, tmp_path)
    assert marked(prepared) == one.expected
    tokenizer = prepared.tokenizer
    if one.stops is not None:
        assert set(tokenizer.convert_ids_to_tokens(list(prepared.stop_tokens))) == set(one.stops)
    if one.prompt:
        first = next(at for at, message in enumerate(one.messages) if message["role"] == "assistant")
        text = tokenizer.decode(encode_prompt(prepared_messages(one, first), tokenizer))
        assert text == re.split("⟦", one.expected)[0]


def prepared_messages(one: Construct, upto: int) -> Any:
    from tonnage.forms.conversation import Conversation

    messages = [{**message, "content": message["content"].replace("<s>", "")} for message in one.messages[:upto]]
    return Conversation.of(messages, one.tools)


LEFT_OUT: dict[str, tuple[Construct, str]] = {
    "calls": (Construct(CHATML, [ASK, {**CALL, "content": "I add."}, RESULT, SIX], ""), "no place for calls of tools"),
    "results": (
        Construct(
            "{%- for m in messages if m.role != 'tool' -%}{{- '<|im_start|>' + m.role + '\\n' + m.content -}}"
            + CALLS
            + TAIL
            + OPENER,
            [ASK, CALL, RESULT, SIX],
            "",
        ),
        "no place for results of tools",
    ),
    "tools, though a call names one": (
        Construct(HEAD + "{{- m.content -}}" + CALLS + TAIL + OPENER, [ASK, CALL, RESULT, SIX], "", tools=TOOLS),
        "leaves out the tool 'add'",
    ),
    "tools": (Construct(CHATML, [ASK, FOUR], "", tools=TOOLS), "leaves out the tool 'add'"),
    "a thought in a field": (Construct(CHATML, [ASK, THINK_FOUR], ""), "'Two and two.'"),
    "a thought in the words": (
        Construct(
            HEAD + "{{- m.content.split('</think>')[-1] -}}" + TAIL + OPENER,
            [ASK, {**FOUR, "content": "<think>Two and two.</think>It is 4."}],
            "",
        ),
        "'Two and two.'",
    ),
    "words beside a call": (
        Construct(
            HEAD + "{%- if not m.tool_calls -%}{{- m.content -}}{%- endif -%}" + CALLS + TAIL + OPENER,
            [ASK, {**CALL, "content": "I add."}, RESULT, SIX],
            "",
        ),
        "'I add.'",
    ),
    "a system message": (
        Construct(
            "{%- for m in messages if m.role != 'system' -%}"
            + HEAD.removeprefix("{%- for m in messages -%}")
            + "{{- m.content -}}"
            + TAIL
            + OPENER,
            [SYSTEM, ASK, FOUR],
            "",
        ),
        "message 0 (system)",
    ),
    "tools that only the last question shows": (
        Construct(
            LAST_USER
            + "{%- for m in messages -%}{%- if loop.index0 == ns.last and tools -%}{{- tools | tojson -}}{%- endif -%}"
            + HEAD.removeprefix("{%- for m in messages -%}")
            + "{{- m.content -}}"
            + TAIL
            + OPENER,
            [ASK, FOUR, AGAIN, SIX],
            "",
            tools=TOOLS,
        ),
        "data.train_on: last",
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_template_leaves_out_refuses_the_row(name: str, tmp_path: Path) -> None:
    one, reason = LEFT_OUT[name]
    with pytest.raises(DataError) as refused:
        prepared_as(one, tmp_path)
    assert reason in str(refused.value)


def test_the_way_on_that_a_refusal_names_works(tmp_path: Path) -> None:
    one, _ = LEFT_OUT["tools that only the last question shows"]
    assert marked(prepared_as(one, tmp_path, train_on="last")).endswith(f"{A}⟦It is 6.<|im_end|>⟧\n")


def test_an_argument_that_no_template_looks_at_is_refused(tmp_path: Path) -> None:
    one = CONSTRUCTS["an argument turns thinking off"]
    with pytest.raises(
        UserError, match=r"never looks at: enable_thinkin\n  needed: arguments that it knows: enable_thinking"
    ):
        prepared_as(one, tmp_path, template_arguments={"enable_thinkin": False})


def test_the_date_is_part_of_the_key_where_it_is_asked_for(tmp_path: Path) -> None:
    dated, plain = CONSTRUCTS["the date"], CONSTRUCTS["contents are trimmed"]
    first, second = (prepared_as(dated, tmp_path, date=f"2024-03-0{day}") for day in (5, 6))
    assert (first.date, second.date) == ("2024-03-05", "2024-03-06")
    assert first.train.path != second.train.path
    same, again = (prepared_as(plain, tmp_path, date=f"2024-03-0{day}") for day in (5, 6))
    assert (same.date, same.train.path) == ("", again.train.path)


def test_several_templates_stay_on_the_tokenizer(tmp_path: Path) -> None:
    one = CONSTRUCTS["a template of its own for rows with tools"]
    prepared = prepared_as(one, tmp_path)
    assert prepared.tokenizer.chat_template == one.template
    named = prepared_as(CONSTRUCTS["a template by name"], tmp_path).tokenizer.chat_template
    assert isinstance(named, dict)
    assert named["default"] == named["short"], "what was trained with is what is used without a name"


ENDLESS: dict[str, str] = {
    "loops": "{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}",
    "text": "{%- for a in range(99999) -%}{%- for b in range(99999) -%}{{- 'word ' -}}{%- endfor -%}{%- endfor -%}",
    "doubling": "{%- set ns = namespace(x='ab') -%}{%- for a in range(60) -%}{%- set ns.x = ns.x + ns.x -%}"
    "{%- endfor -%}",
    "one long text": "{%- set x = 'a' * 9999999999 -%}",
    "one long text, of a template that may ask for lists": "{%- set type = 'a' * 9999999999 -%}",
    "macros": "{%- macro f(n) -%}{%- if n -%}{{- f(n - 1) + f(n - 1) -}}{%- endif -%}{%- endmacro -%}{{- f(90) -}}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_an_end_is_ended(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.data.text.rendering.SECONDS", 0.5)
    with pytest.raises(UserError, match=r"the template (was ended|raised)"):
        prepared_as(Construct(ENDLESS[name] + CHATML, [ASK, FOUR], ""), tmp_path)


def test_a_template_that_has_no_end_for_some_rows_names_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.data.text.rendering.SECONDS", 0.5)
    loops = "{%- if messages[0].content == 'And 3+3?' -%}" + ENDLESS["loops"] + "{%- endif -%}"
    with pytest.raises(DataError, match=r"rows.jsonl:1: the template was ended: it went on for more than 0.5 s"):
        prepared_as(Construct(loops + CHATML, [AGAIN, SIX], ""), tmp_path)


def test_a_date_has_a_short_format(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the template raised: a format of 2,000,000 characters for a date"):
        prepared_as(Construct("{{- strftime_now('%Y' * 10**6) -}}" + CHATML, [ASK, FOUR], ""), tmp_path)


CODE = "{{- ''.__class__.__mro__[1].__subclasses__() -}}"


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the template raised: access to attribute '__class__'"):
        prepared_as(Construct(CODE + CHATML, [ASK, FOUR], ""), tmp_path)
    touch: Callable[[], bool] = (tmp_path / "touched").exists
    with pytest.raises(UserError):
        prepared_as(Construct("{{- messages.append(1) -}}" + CHATML, [ASK, FOUR], ""), tmp_path)
    assert not touch()
