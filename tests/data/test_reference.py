"""Trained tokens against a reference of its own, for rows of every form with whatever else rows hold, and wrong ones.

Each row is made from what it means: a conversation with weights. It is written in one of the forms, gets fields that
nobody knows, odd characters and nested values, and some are broken in one place. What must hold of every row:

* it is trained as the reference has it, token for token and weight for weight, or it is named;
* one that was not broken is never named;
* every field that nobody reads is counted.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data.conftest import TEXTS
from data.reference import trained
from data.test_chat_templates import PUBLIC, by_hand, tokenizer_of
from data.test_constructs import CHATML, CONSTRUCTS, OPENED_THOUGHT, PATTERN, marked
from data.test_constructs import tokenizer_of as construct_tokenizer
from tonnage.config import Data, Source
from tonnage.data import Prepared, prepare

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


# The reference itself

CHECKED = {
    name: shape
    for name, shape in PUBLIC.items()
    if name not in ("vicuna-unopened", "llama-2", "mistral", "deepseek-r1")
}
"""Shapes that open a turn on request: the reference knows no other."""
CLOSING = {
    "llama-3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi-3": "<|end|>",
    "zephyr": "</s>",
    "vicuna": "</s>",
    "command-r": "<|END_OF_TURN_TOKEN|>",
}
BY_HAND = [
    "the prompt opens a thought, and a finished turn closes it",
    "the prompt opens a thought, and the row has one",
    "earlier turns have no thought, which the prompt opened",
    "a finished turn closes the opened thought in another way",
    "an answer begins with a line break, which joins that of the header",
    "several tokens close a turn",
    "the end of text stands behind the whole conversation",
    "contents are trimmed",
    "a call and its words",
    "thoughts under another name",
    "generation tags",
    "a system message that is taken is not folded",
    "an answer that begins like the thought that the prompt opens",
]


@pytest.mark.parametrize("name", CHECKED)
def test_the_reference_marks_as_a_hand_does(name: str) -> None:
    shape = CHECKED[name]
    tokenizer = tokenizer_of(shape, False)
    weights = [float(message["role"] == "assistant") for message in shape.messages]
    messages = shape.messages
    if name == "qwen-3":  # which leaves the thought of the earlier turn out
        messages = [{k: v for k, v in m.items() if n != 2 or k != "reasoning_content"} for n, m in enumerate(messages)]
    found = trained(tokenizer, messages, weights, [CLOSING.get(name, "<|im_end|>")], shape.tools)
    assert found == by_hand(shape, tokenizer)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_reference_marks_constructs_as_a_hand_does(name: str) -> None:
    one = CONSTRUCTS[name]
    tokenizer = construct_tokenizer(one)
    closing = {
        "several tokens close a turn": "<|close|>",
        "the end of text stands behind the whole conversation": "<|end|>",
    }
    weights = [float(message["role"] == "assistant") for message in one.messages]
    ids, found = trained(tokenizer, one.messages, weights, [closing.get(name, "<|im_end|>")])
    text = "".join(
        f"{'⟦' if weight and not before else ''}{tokenizer.decode([token])}{'⟧' if weight and not after else ''}"
        for token, weight, before, after in zip(ids, found, [0.0, *found], [*found[1:], 0.0], strict=False)
    )
    assert text == one.expected


def test_twenty_rows_and_more_are_marked_by_hand() -> None:
    assert len(CHECKED) + len(BY_HAND) >= 20


# Rows

PIECES = [
    *(
        "fox",
        "the dog",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "4",
        "'s",
        "'",
        "...",
        "a" * 50,
        "é",
        "e\u0301",
        "\u00a0",
        "\u200b",
    ),
    *(
        "日本語",
        "\u3000",
        "๐ไทย",
        "🦊",
        "👩\u200d👧",
        "\u202e",
        "{{ x }}",
        "{% x %}",
        "<b>",
        "<|",
        "\\n",
        '"',
        "\x1b[31m",
        "\r\n",
    ),
    *("<|im_start|>assistant\n", "<|endoftext|>", "[INST]", "</s>"),
]
WORDS = ["pear", "plum", "Fig", "Two words", "Ten", "日本"]


def words(chance: random.Random, least: int = 0) -> str:
    """Odd text that begins and ends with a word."""
    inner = "".join(chance.choice(PIECES) for _ in range(chance.randint(0, 6)))
    return f"{chance.choice(WORDS)}{inner}{chance.choice(WORDS)}" if least or chance.random() < 0.95 else ""


def meaning(chance: random.Random) -> tuple[list[dict[str, Any]], list[float]]:
    """A conversation and the weights of its messages."""
    messages: list[dict[str, Any]] = []
    weights: list[float] = []
    if chance.random() < 0.3:
        messages.append({"role": "system", "content": words(chance, 1)})
        weights.append(0.0)
    for _ in range(chance.randint(1, 3)):
        messages += [{"role": "user", "content": words(chance, 1)}, {"role": "assistant", "content": words(chance, 1)}]
        weights += [0.0, chance.choice([1.0, 1.0, 1.0, 0.0, 0.5])]
    if not any(weights):
        weights[-1] = 1.0
    return messages, weights


def flags(chance: random.Random, weight: float) -> dict[str, Any]:
    """A way to say a weight."""
    names = ["train", "loss", "weight", "loss_weight"]
    if weight == 1:
        return chance.choice([{}, {}, {chance.choice(names): chance.choice([True, 1, 1.0])}])
    if weight == 0:
        return {chance.choice(names): chance.choice([False, 0, 0.0])}
    return {chance.choice(names[2:]): weight}


ROLES = {
    "system": ["system", "developer", "System"],
    "user": ["user", "human", "Human", "prompter", "USER "],
    "assistant": ["assistant", "gpt", "ai", "model", "bot", "chatbot", "Assistant"],
}


def as_messages(
    chance: random.Random, messages: list[dict[str, Any]], weights: list[float], keys: tuple[str, str]
) -> list[Any]:
    role, content = keys
    found = []
    for message, weight in zip(messages, weights, strict=True):
        said: Any = message["content"]
        if chance.random() < 0.2 and role == "role":
            said = [{"type": "text", chance.choice(["text", "value"]): said}]
        turn = {role: chance.choice(ROLES[message["role"]]), content: said}
        found.append(turn | (flags(chance, weight) if message["role"] == "assistant" else {}))
    return found


def write(chance: random.Random, form: str, messages: list[dict[str, Any]], weights: list[float]) -> dict[str, Any]:
    """The row of a conversation in a form."""
    if form in ("messages", "sharegpt"):
        keys = ("role", "content") if form == "messages" else ("from", "value")
        row: dict[str, Any] = {}
        if messages[0]["role"] == "system" and chance.random() < 0.5:
            row["system"], messages, weights = messages[0]["content"], messages[1:], weights[1:]
        turns: Any = as_messages(chance, messages, weights, keys)
        name = chance.choice(["messages", "conversations", "conversation"]) if form == "messages" else "conversations"
        return row | {name: json.dumps(turns) if chance.random() < 0.1 else turns}
    if form == "pairs":
        pairs = []
        names = chance.choice([("human", "assistant"), ("input", "output")])
        system = {"system": messages[0]["content"]} if messages[0]["role"] == "system" else {}
        rest, heavy = messages[len(system) :], weights[len(system) :]
        for at in range(0, len(rest), 2):
            said = {names[0]: rest[at]["content"], names[1]: rest[at + 1]["content"]}
            pairs.append(said | flags(chance, heavy[at + 1]) | (system if at == 0 and names[0] == "input" else {}))
        return {"conversation": pairs} | (system if names[0] != "input" else {})
    raise AssertionError(form)


EXTRA: list[Callable[[random.Random], Any]] = [
    lambda chance: chance.randint(-5, 5),
    lambda chance: words(chance, 1),
    lambda chance: [1, {"a": [None, {"b": words(chance, 1)}]}],
    lambda chance: {"nested": {"deep": [[[[chance.random()]]]]}},
    lambda chance: True,
]
NAMES = ["id", "score", "meta", "source", "日本", "a b", "category", "lang", "tokens", "difficulty", "uid"]


def with_fields(chance: random.Random, row: dict[str, Any], unread: Counter[str]) -> dict[str, Any]:
    """The row with fields that nobody knows, in any place; those that hold something are counted."""
    items = list(row.items())
    for name in chance.sample(NAMES, chance.choice([0, 0, 1, 3])):
        value = chance.choice([None, "", [], *[make(chance) for make in EXTRA]])
        items.insert(chance.randint(0, len(items)), (name, value))
        if value not in (None, "", []):
            unread[name] += 1
    for name, turns in row.items():
        if (
            isinstance(turns, list)
            and turns
            and isinstance(turns[0], dict)
            and "role" in turns[0]
            and chance.random() < 0.2
        ):
            chance.choice(turns)["timestamp"] = chance.randint(1, 9)
            unread[f"{name}[].timestamp"] += 1
    return dict(items)


WRONG: list[Any] = [None, 3, 2.5, float("nan"), True, [], ["x"], {}, {"a": 1}, [[["x"]]], "", " \n"]


def broken(chance: random.Random, row: dict[str, Any]) -> dict[str, Any]:
    """The row with one value, anywhere in it, replaced or taken out."""
    row = copy.deepcopy(row)
    place: Any = row
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = chance.choice(keys)
        inner = place[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.8:
            place = inner
            continue
        if chance.random() < 0.2 and isinstance(place, dict):
            del place[key]
        else:
            place[key] = chance.choice(WRONG)
        return row


def documents(prepared: Prepared) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and weights by the number of the row."""
    found = {}
    for index in range(prepared.train.num_packs):
        pack = prepared.train.pack(index)
        (document,) = pack.documents.tolist()
        found[prepared.train.where(document)[1]] = pack.input_ids.tolist(), pack.weights.tolist()
    return found


def check(tokenizer: Any, template: str, count: int, seed: int, folder: Path) -> tuple[int, int]:
    """Make rows of all forms and hold what comes of them up against the reference; how many were named, and broken."""
    chance = random.Random(seed)
    tokenizer.chat_template = template
    named = damaged = 0
    for form in ("messages", "sharegpt", "pairs"):
        meanings, rows, hurt = [], [], []
        unread: Counter[str] = Counter()
        for _ in range(count // 3):
            one = meaning(chance)
            meanings.append(one)
            row, counts = write(chance, form, *one), Counter[str]()
            row = with_fields(chance, row, counts)
            hurt.append(chance.random() < 0.2)
            if hurt[-1]:
                row = broken(chance, row)
            else:
                unread += counts
            rows.append(row)
        file = folder / f"{form}.jsonl"
        file.write_text(
            "".join(json.dumps(row, ensure_ascii=chance.random() < 0.5) + "\n" for row in rows),
            "utf-8",
            "surrogatepass",
        )
        sources = (Source(path=str(file), format=form),)
        usual: dict[str, Any] = {"max_length": 1 << 16, "pack": False, "on_bad_row": "skip", "max_loss": 1.0}
        options = Data(train=sources, control_tokens="keep", **usual)
        prepared = prepare(options, tokenizer, cache=folder / "cache")
        bad: dict[int, str] = {}
        if prepared.account.bad_rows_file:
            lines = Path(prepared.account.bad_rows_file).read_text("utf-8").splitlines()
            bad = {one["row"]: one["reason"] for one in map(json.loads, lines)}
        found = documents(prepared)
        for number, ((messages, weights), row, was_hurt) in enumerate(zip(meanings, rows, hurt, strict=True), 1):
            assert (number in found) != (number in bad), row
            damaged += was_hurt
            if number in bad:
                named += 1
                assert was_hurt, (bad[number], row)
                continue
            expected = trained(tokenizer, messages, weights, ["<|im_end|>", "<|endoftext|>"])
            if was_hurt and found[number] != expected:
                # One value less may mean less, in a way that a reader of the row would agree with.
                assert means_as_read(row, form, tokenizer) == found[number], row
                continue
            assert found[number] == expected, row
        told = prepared.account.total.unread
        assert {name: told.get(name, 0) >= number for name, number in unread.items()} == dict.fromkeys(unread, True)
        assert prepared.account.total.rows_read == len(rows)
    return named, damaged


def means_as_read(row: dict[str, Any], form: str, tokenizer: Any) -> tuple[list[int], list[float]] | None:
    """What a row that was hurt says all the same, read by hand: a message less, another flag, no system prompt."""
    names = {name: role for role, several in ROLES.items() for name in several}
    messages: list[dict[str, Any]] = []
    weights: list[float] = []

    def weight_of(turn: dict[str, Any]) -> float:
        found = [turn[name] for name in ("train", "loss", "weight", "loss_weight") if turn.get(name) is not None]
        return float(found[0]) if found else 1.0

    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.append({"role": "system", "content": row["system"]})
        weights.append(0.0)
    name = next(name for name in ("messages", "conversations", "conversation") if row.get(name))
    turns = json.loads(row[name]) if isinstance(row[name], str) else row[name]
    for turn in turns:
        if form == "pairs":
            if isinstance(turn.get("system"), str) and turn["system"].strip():
                messages.append({"role": "system", "content": turn["system"]})
                weights.append(0.0)
            asked = turn.get("input", turn.get("human"))
            messages += [
                {"role": "user", "content": asked or ""},
                {"role": "assistant", "content": turn.get("output", turn.get("assistant"))},
            ]
            weights += [0.0, weight_of(turn)]
            continue
        said = turn.get("content", turn.get("value"))
        if isinstance(said, list):
            said = "".join(part.get("text", part.get("value", "")) for part in said)
        role = names[turn.get("role", turn.get("from"))]
        messages.append({"role": role, "content": said or ""})
        weights.append(weight_of(turn) if role == "assistant" else 0.0)
    return trained(tokenizer, messages, weights, ["<|im_end|>", "<|endoftext|>"])


# Rows of other forms

CALLING = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Trained = tuple[list[int], list[float]]
Meant = tuple[dict[str, Any], Callable[[Any], Trained]]
"""A row, and what of it is trained, given a tokenizer."""


def chat(messages: list[dict[str, Any]], weights: list[float], tools: Any = None) -> Callable[[Any], Trained]:
    return lambda tokenizer: trained(tokenizer, messages, weights, ["<|im_end|>", "<|endoftext|>"], tools)


def with_system(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The field of a row that holds the system message, if there is one, and the other messages."""
    if messages[0]["role"] == "system":
        return {"system": messages[0]["content"]}, messages[1:]
    return {}, messages


def alpaca(chance: random.Random) -> Meant:
    messages, weights = plain_meaning(chance)
    row, rest = with_system(messages)
    said = [message["content"] for message in rest]
    if len(rest) > 2:
        row["history"] = [said[at : at + 2] for at in range(0, len(said) - 2, 2)]
    if chance.random() < 0.5:
        row["input"] = words(chance, 1)
        messages[-2]["content"] += "\n\n" + row["input"]
    return {**row, "instruction": said[-2], "output": said[-1], **weighted(chance, weights)}, chat(messages, weights)


def completion(chance: random.Random) -> Meant:
    messages, weights = plain_meaning(chance)
    row, rest = with_system(messages)
    first = len(messages) - len(rest)
    if len(rest) == 2 and chance.random() < 0.5:
        sides: tuple[Any, Any] = rest[0]["content"], rest[1]["content"]
    else:
        sides = rest[:-1], rest[-1:]
    for at in range(first, len(messages) - 1):
        weights[at] = 0.0
    return {**row, "prompt": sides[0], "completion": sides[1], **weighted(chance, weights)}, chat(messages, weights)


def strings(chance: random.Random) -> Meant:
    messages, weights = plain_meaning(chance)
    row, rest = with_system(messages)
    said: Any = [message["content"] for message in rest]
    row["data"] = json.dumps(said) if chance.random() < 0.1 else said
    return {**row, **weighted(chance, weights)}, chat(messages, weights)


def gemini(chance: random.Random) -> Meant:
    messages, weights = plain_meaning(chance)
    row: dict[str, Any] = {}
    system, rest = with_system(messages)
    if system:
        row["systemInstruction"] = {"parts": [{"text": system["system"]}]}
    contents = []
    for message in rest:
        at = chance.randint(1, len(message["content"])) if chance.random() < 0.3 else len(message["content"])
        parts = [{"text": text} for text in (message["content"][:at], message["content"][at:]) if text]
        contents.append({"role": "model" if message["role"] == "assistant" else "user", "parts": parts})
    return {**row, "contents": contents, **weighted(chance, weights)}, chat(messages, weights)


def text(chance: random.Random) -> Meant:
    said = words(chance, 1)

    def expected(tokenizer: Any) -> Trained:
        ids = [*tokenizer(said)["input_ids"]]
        ids += [] if ids[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
        return ids, [0.0] + [1.0] * (len(ids) - 1)

    return {"text": said}, expected


def tokens(chance: random.Random) -> Meant:
    ids = [chance.randint(0, 99) for _ in range(chance.randint(2, 30))]
    mask = [chance.randint(0, 1) for _ in ids]
    mask[-1] = 1
    name = chance.choice(["labels", "loss_mask", "assistant_masks", "completion_mask", "train_mask"])
    held = [token if one else -100 for token, one in zip(ids, mask, strict=True)] if name == "labels" else mask
    row: dict[str, Any] = {"input_ids": ids, name: held}
    if chance.random() < 0.3:
        padding = chance.randint(0, 3)
        rest = -100 if name == "labels" else 0
        row = {
            "input_ids": ids + [0] * padding,
            name: held + [rest] * padding,
            "attention_mask": [1] * len(ids) + [0] * padding,
        }
    return row, lambda tokenizer: (ids, [0.0, *map(float, mask[1:])])


def calls(chance: random.Random) -> Meant:
    """Tools, calls of them in the ways that people write them, and results."""
    tool = {"type": "function", "function": {"name": "add", "description": words(chance, 1), "parameters": {}}}
    messages: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    weights: list[float] = []
    for _ in range(chance.randint(1, 2)):
        ask, answer = {"role": "user", "content": words(chance, 1)}, {"role": "assistant", "content": words(chance, 1)}
        function = {"name": "add", "arguments": {"a": chance.randint(0, 9), "b": words(chance, 1)}}
        written = {**function, "arguments": chance.choice([function["arguments"], json.dumps(function["arguments"])])}
        said = chance.choice(["", words(chance, 1)])
        result = {"role": "tool", "content": words(chance, 1)}
        called = {"role": "assistant", "content": said, "tool_calls": [{"type": "function", "function": function}]}
        field: dict[str, Any] = chance.choice(
            [
                {"tool_calls": [{"type": "function", "function": written}]},
                {"tool_calls": [written]},
                {"function_call": written},
            ]
        )
        flag = chance.choice([1.0, 1.0, 0.0])
        messages += [ask, called, result, answer]
        turns += [ask, {"role": "assistant", "content": said, **field, **flags(chance, flag)}, result, answer]
        weights += [0.0, flag, 0.0, 1.0]
    held: dict[str, Any] = chance.choice(
        [{"tools": [tool]}, {"tools": json.dumps([tool])}, {"functions": [tool["function"]]}]
    )
    return {"messages": turns, **held, **weighted(chance, weights)}, chat(messages, weights, [tool])


def plain_meaning(chance: random.Random) -> tuple[list[dict[str, Any]], list[float]]:
    """A conversation whose answers are all trained, in forms that cannot say otherwise."""
    messages, _ = meaning(chance)
    return messages, [float(message["role"] == "assistant") for message in messages]


def weighted(chance: random.Random, weights: list[float]) -> dict[str, Any]:
    """The weight of a whole row, which goes into the weights of its messages."""
    if chance.random() < 0.8:
        return {}
    weights[:] = [weight * 0.5 for weight in weights]
    return {"loss_weight": 0.5}


OTHERS: dict[str, Callable[[random.Random], Meant]] = {
    "alpaca": alpaca,
    "completion": completion,
    "strings": strings,
    "gemini": gemini,
    "text": text,
    "tokens": tokens,
    "messages": calls,
}


def check_others(tokenizer: Any, count: int, seed: int, folder: Path) -> None:
    """As ``check``, for the other forms; of rows that are broken, here in a way that leaves nothing to read, each is
    named."""
    chance = random.Random(seed)
    tokenizer.chat_template = CALLING
    for form, make in OTHERS.items():
        meant: list[Callable[[Any], Trained] | None] = []
        rows = []
        unread: Counter[str] = Counter()
        for _ in range(count // len(OTHERS)):
            row, expected = make(chance)
            counts = Counter[str]()
            row = with_fields(chance, row, counts)
            is_hurt = chance.random() < 0.15
            if is_hurt:
                needed = [name for name in NEEDED[form] if name in row]
                row = {**row, chance.choice(needed): chance.choice(WORTHLESS)}
            unread += Counter() if is_hurt else counts
            meant.append(None if is_hurt else expected)
            rows.append(row)
        file = folder / f"other-{form}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        options = Data(
            train=(Source(path=str(file), format=form),),
            max_length=1 << 16,
            pack=False,
            on_bad_row="skip",
            max_loss=1.0,
            control_tokens="keep",
        )
        prepared = prepare(options, tokenizer, cache=folder / "cache")
        found = documents(prepared)
        for number, (expected_of, row) in enumerate(zip(meant, rows, strict=True), 1):
            if expected_of is None:
                assert number not in found, row
            else:
                assert found.get(number) == expected_of(tokenizer), row
        told = prepared.account.total
        assert (told.rows_read, told.rows_bad) == (len(rows), meant.count(None))
        assert {name: told.unread.get(name, 0) >= number for name, number in unread.items()} == dict.fromkeys(
            unread, True
        )


NEEDED = {
    "alpaca": ("output", "history"),
    "completion": ("prompt", "completion"),
    "strings": ("data",),
    "gemini": ("contents",),
    "text": ("text",),
    "tokens": ("input_ids", "labels", "loss_mask"),
    "messages": ("messages", "tools"),
}
"""Fields without which, or with nonsense in which, a row cannot be read."""
WORTHLESS: list[Any] = [3, 2.5, True, ["x"], {"a": 1}, [[["x"]]]]


# Tokenizers


def wrapped(raw: Tokenizer, **names: Any) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token=names.pop("unk", None),
        **names,
    )
    tokenizer.add_special_tokens({"extra_special_tokens": list(SPECIALS[1:])})
    return tokenizer


def byte_level(split: str | None = None, normalizer: Any = None) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    raw.pre_tokenizer = (
        level if split is None else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), level])
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([*TEXTS, "assistant\n\nuser\n\n" * 9, "日本語 日本 ไทย" * 9], trainer)
    return raw


def sentence_piece(scheme: str, model: Any, trainer: Any) -> Tokenizer:
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    raw.decoder = decoders.Metaspace(prepend_scheme=scheme)
    raw.train_from_iterator([*TEXTS, "assistant\n\nuser\n\n" * 9], trainer)
    return raw


def sentence_piece_bpe(scheme: str) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<|endoftext|>", *map(chr, range(1))], show_progress=False
    )
    return sentence_piece(scheme, models.BPE(unk_token="<unk>", fuse_unk=False), trainer)


def ends_added(raw: Tokenizer, first: bool) -> Tokenizer:
    end = raw.token_to_id("<|endoftext|>")
    single = "<|endoftext|> $A" if first else "$A <|endoftext|>"
    raw.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<|endoftext|>", end)])
    return raw


LLAMA_3 = PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level, GPT-2's words": lambda: wrapped(byte_level()),
    "byte-level, Qwen's words, composed": lambda: wrapped(byte_level(PATTERN, normalizers.NFC())),
    "byte-level, Llama 3's words": lambda: wrapped(byte_level(LLAMA_3)),
    "first token added": lambda: wrapped(ends_added(byte_level(), True), bos_token="<|endoftext|>"),
    "last token added": lambda: wrapped(ends_added(byte_level(PATTERN), False)),
    "SentencePiece, a prefix space always": lambda: wrapped(sentence_piece_bpe("always"), unk="<unk>"),
    "SentencePiece, a prefix space first": lambda: wrapped(sentence_piece_bpe("first"), unk="<unk>"),
    "Unigram": lambda: wrapped(
        sentence_piece(
            "never",
            models.Unigram(),
            trainers.UnigramTrainer(
                vocab_size=300, special_tokens=["<unk>", "<|endoftext|>"], unk_token="<unk>", show_progress=False
            ),
        ),
        unk="<unk>",
    ),
    "a special token that takes white space along": lambda: with_strip(wrapped(byte_level())),
}


def with_strip(tokenizer: Any) -> Any:
    tokenizer.add_tokens([AddedToken("<|im_end|>", rstrip=True, special=True)], special_tokens=True)
    return tokenizer


THINKING = re.sub(
    r"\{\{- '<think>\\n' \+ thought.*?-\}\}",
    "{{- '<think>\\\\n' + thought + '\\\\n</think>\\\\n\\\\n' -}}",
    OPENED_THOUGHT,
)
TEMPLATES = {"ChatML": CHATML, "an opened thought": OPENED_THOUGHT}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_rows_are_trained_as_the_reference_has_them_or_named(name: str, template: str, tmp_path: Path) -> None:
    named, damaged = check(TOKENIZERS[name](), TEMPLATES[template], 45, 1, tmp_path)
    assert named <= damaged
    assert damaged > 0


@pytest.mark.matrix
@pytest.mark.parametrize("name", TOKENIZERS)
def test_ten_thousand_rows(name: str, tmp_path: Path) -> None:
    named, damaged = check(TOKENIZERS[name](), CHATML, 1200, 2, tmp_path)
    assert damaged // 2 < named <= damaged


@pytest.mark.parametrize("name", TOKENIZERS)
def test_rows_of_other_forms_are_trained_as_the_reference_has_them_or_named(name: str, tmp_path: Path) -> None:
    check_others(TOKENIZERS[name](), 84, 3, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("name", TOKENIZERS)
def test_ten_thousand_rows_of_other_forms(name: str, tmp_path: Path) -> None:
    check_others(TOKENIZERS[name](), 1200, 4, tmp_path)


def test_the_marks_of_a_document_are_those_of_its_text(tmp_path: Path) -> None:
    """The two ways in which tests show masks agree."""
    one = CONSTRUCTS["contents are trimmed"]
    from data.test_constructs import prepared_as

    assert marked(prepared_as(one, tmp_path)) == one.expected
