"""Whatever a row holds, it is a document or a bad row: nothing but ``UserError`` leaves a preparation.

Random rows of nasty contents go through all of it, from rendering to packs, in every format that holds conversations.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.test_constructs import ASK, CHATML, FOUR, OPENED_THOUGHT, Construct, prepared_as, tokenizer_of
from data.test_masks import of_rows
from data.test_properties import check_account
from tonnage.config import Data, Source
from tonnage.data import DataError, Packer, prepare
from tonnage.data.text.masks import _MARKS
from tonnage.errors import UserError

NASTY = [
    *("", " ", "\n", "\u00a0", "a", "fox ", "é", "e\u0301", "日本", "\ud800", "\udfff", "\x00", "\ufeff", "\U0010fffd"),
    *("\U00100000", "{{ x }}", "{% raw %}", "<|im_end|>", "<|im_start|>", "<|im_start|>assistant\n", "<|endoftext|>"),
    *("<think>", "</think>", "<think>\n", "\n</think>\n\n", "<tool_call>", "<image>", "".join(_MARKS), "x" * 5000),
    *("\n\n" * 50, "<|im_", "end|>", "'s", "\u2028", "\u202e"),
]
TEMPLATES = ["chatml", "alpaca", "plain", CHATML, OPENED_THOUGHT]


def nasty(chance: random.Random) -> str:
    return "".join(chance.choice(NASTY) for _ in range(chance.choice([1, 1, 2, 4, 10])))


def answer(chance: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": nasty(chance)}
    if chance.random() < 0.2:
        message["content"] = [{"type": "text", "text": nasty(chance), "train": chance.random() < 0.5} for _ in range(3)]
    if chance.random() < 0.2:
        message["reasoning_content"] = nasty(chance)
    if chance.random() < 0.2:
        message["tool_calls"] = [{"name": nasty(chance), "arguments": {nasty(chance): [nasty(chance), None]}}]
    return message


def row(chance: random.Random, form: str) -> dict[str, Any]:
    if form == "alpaca":
        return {name: nasty(chance) for name in ("instruction", "input", "output", "system")}
    if form == "completion":
        return {name: nasty(chance) for name in ("prompt", "completion")}
    if form == "text":
        return {"text": nasty(chance)}
    messages: list[dict[str, Any]] = []
    for _ in range(chance.randint(1, 3)):
        messages += [{"role": chance.choice(["user", "user", "tool", "system"]), "content": nasty(chance)}]
        messages.append(answer(chance))
    return {"messages": messages}


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    form=st.sampled_from(["messages", "messages", "alpaca", "completion", "text"]),
    template=st.sampled_from(TEMPLATES),
    over_length=st.sampled_from(["drop", "truncate", "split"]),
    train_on=st.sampled_from(["assistant", "last", "all"]),
    control_tokens=st.sampled_from(["text", "keep", "error"]),
)
def test_nothing_but_a_sentence_leaves_a_preparation(
    seed: int, form: str, tmp_path_factory: pytest.TempPathFactory, **options: Any
) -> None:
    chance = random.Random(seed)
    folder = tmp_path_factory.mktemp("rows")
    rows = [row(chance, form) for _ in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Source(path=str(folder / "rows.jsonl"), format=form)
    usual: dict[str, Any] = {"max_length": 300, "max_loss": 1.0, "validation": 0.1}
    chosen = Data(train=(source,), on_bad_row="skip", **usual, **options)
    tokenizer = tokenizer_of(Construct(CHATML, [], ""))
    try:
        account = prepare(chosen, tokenizer, cache=folder / "cache").account
    except DataError as error:  # such as that no row is left
        account = error.account
    account.check()
    assert account.total.rows_read == len(rows)
    assert "unexpected" not in account.total.bad_kinds


ONLY_ENDS = ["<|im_end|>", " <|im_end|>\n", "<|im_end|><|im_end|>", "<|endoftext|>", "<|im_end|>\n<|endoftext|>"]


@pytest.mark.parametrize("content", ONLY_ENDS)
def test_an_answer_that_is_only_what_closes_it_is_a_bad_row(content: str, tmp_path: Path) -> None:
    good = {"messages": [ASK, FOUR]}
    rows: list[dict[str, Any]] = [
        {"messages": [ASK, {**FOUR, "content": content}]},
        {"instruction": "q", "output": content},
        {"prompt": "q", "completion": content},
    ]
    also: list[dict[str, Any]] = [good, {"instruction": "q", "output": "a"}, {"prompt": "q", "completion": "a"}]
    for number, (bad, fine) in enumerate(zip(rows, also, strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(DataError, match=r"rows.jsonl:1: message 1: nothing but the token that closes it"):
            of_rows(folder, [bad, fine])
        found = of_rows(folder, [bad, fine], on_bad_row="skip")
        check_account(found)
        assert found.account.total.bad_kinds == {"empty_answer": 1}
        assert found.account.total.rows_trimmed == 0


def test_rows_of_a_step_are_refused_alike(tmp_path: Path) -> None:
    found = prepared_as(Construct(CHATML, [ASK, FOUR], ""), tmp_path)
    packer = Packer(found.recipe, found.forms, 300)
    for content, reason in (("<|im_end|>", "nothing but the token that closes it"), ("<think>a", "never closes it")):
        with pytest.raises(UserError, match=reason):
            packer.pack([{"messages": [ASK, {**FOUR, "content": content}]}])


def test_an_answer_whose_last_part_is_a_piece_of_its_end_is_a_bad_row(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "4<|im_"}, {"type": "text", "text": "end|>", "train": False}]
    with pytest.raises(DataError, match=r"rows.jsonl:1: message 1: its last part is a piece of the token"):
        prepared_as(Construct(CHATML, [ASK, {**FOUR, "content": parts}], ""), tmp_path)


def test_what_stands_behind_the_end_of_an_answer_goes_with_it(tmp_path: Path) -> None:
    for content in ("It is 4.<|im_end|>\n", "It is 4.<|im_end|>"):
        found = prepared_as(Construct(CHATML, [ASK, {**FOUR, "content": content}], ""), tmp_path)
        usual = prepared_as(Construct(CHATML, [ASK, FOUR], ""), tmp_path)
        assert found.train.pack(0).input_ids.tolist() == usual.train.pack(0).input_ids.tolist()


def test_whatever_a_row_raises_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what nobody has thought of; what the system refuses is not the row's."""

    def broken(*_: object) -> Any:
        raise ZeroDivisionError("by no means")

    for owner, name in (
        ("tonnage.forms.reader.Reader", "read"),
        ("tonnage.data.building.builder.PartBuilder", "_suited"),
        ("tonnage.data.text.masks.Borders", "find"),
        ("tonnage.data.tokens.encoder.Encoder", "_place"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr("tonnage.data.tokens.words.Scanner.of", lambda _: None)
            patch.setattr(f"{owner}.{name}", broken)
            with pytest.raises(
                DataError, match=r"rows.jsonl:1: it cannot be prepared \(ZeroDivisionError: by no means"
            ):
                of_rows(folder, [{"messages": [ASK, FOUR]}])

    def full(*_: object) -> Any:
        raise OSError(28, "full")

    monkeypatch.setattr("tonnage.data.building.builder.PartBuilder._suited", full)
    with pytest.raises(UserError, match="room on the disk"):
        of_rows(tmp_path, [{"messages": [ASK, FOUR]}])


def test_words_that_a_tokenizer_does_not_take_make_a_bad_row(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    rows = [{"prompt": "a ", "completion": "b"}, {"prompt": "a ", "completion": "c"}]
    found = of_rows(tmp_path, rows, tokenizer=own, on_bad_row="skip")
    assert found.account.total.bad_kinds == {"tokenizer": 1}


def test_words_that_hold_every_mark_are_told_from_others(tmp_path: Path) -> None:
    content = "<think>\n" + "".join(_MARKS) + "\n</think>\n\nIt is 4."
    found = prepared_as(Construct(OPENED_THOUGHT, [ASK, {**FOUR, "content": content}], ""), tmp_path)
    assert found.account.total.rows_bad == 0
