"""Control tokens in the words of rows: what becomes of them, and that all else stays as it is.

The reference of ``control_tokens: text`` is the same tokenizer with other names for its control tokens, in the same
template: to it, the characters in the rows are words like any others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.conftest import TEXTS, write_rows
from tonnage.config import Data, Source
from tonnage.data import DataError, Prepared, encode_prompt, prepare
from tonnage.data.telling import remarks
from tonnage.errors import UserError

NAMES = ("<|im_start|>", "<|im_end|>", "</s>")
OTHER_NAMES = ("\U0010e001", "\U0010e002", "\U0010e003")
"""Of the reference; no row holds these."""
ALPHABET = [chr(code) for code in range(33, 127)]
CHATML = (
    "{%- for m in messages -%}{{- 'START' + m.role + '\\n' + m.content -}}"
    "{%- for call in m.tool_calls or [] -%}{{- call.function.name + (call.function.arguments | tojson) -}}"
    "{%- endfor -%}"
    "{{- 'END\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- 'STARTassistant\\n' -}}{%- endif -%}"
)


def byte_level(names: Sequence[str]) -> Tokenizer:
    """As GPT-2's: the control tokens are in the vocabulary, too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained(tokenizer, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=list(names)))
    return tokenizer


def whole_words(names: Sequence[str]) -> Tokenizer:
    """As Llama 3's: whatever word the vocabulary holds is one token, and here it holds the control tokens."""
    value = json.loads(byte_level(names).to_str())
    value["model"]["ignore_merges"] = True
    value["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "WhitespaceSplit"}, value["pre_tokenizer"]],
    }
    return Tokenizer.from_str(json.dumps(value))


def nfc(names: Sequence[str]) -> Tokenizer:
    tokenizer = byte_level(())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return tokenizer


def metaspace(names: Sequence[str], scheme: str = "first") -> Tokenizer:
    """As those from SentencePiece: a merge of the vocabulary makes ``</s>`` of ``</`` and ``s>``."""
    pieces = ["<unk>", *names, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "</", "s>", "▁fox", "fo", "fox"]
    vocabulary = {piece: at for at, piece in enumerate([*pieces, *ALPHABET])}
    merges = [("<", "/"), ("s", ">"), ("f", "o"), ("fo", "x"), ("▁", "fox")]
    if names[2] == "</s>":
        merges.append(("</", "s>"))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def always(names: Sequence[str]) -> Tokenizer:
    return metaspace(names, "always")


def legacy(names: Sequence[str]) -> Tokenizer:
    """As Llama 2's first: a normaliser puts a space before every stretch between tokens."""
    tokenizer = metaspace(names)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def unigram(names: Sequence[str]) -> Tokenizer:
    """As T5's: the likeliest pieces, of which the vocabulary holds the control tokens as the likeliest of all."""
    pieces = ["▁fox", "fox", "▁the", "▁la", "zy", "▁dog", "▁", "</", "s>", "im", "end", "|>", "\n", *ALPHABET]
    likely = [(piece, -1.0 - at / 10) for at, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((name, 0.0) for name in names), *likely], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def trained(tokenizer: Tokenizer, trainer: Any) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator(TEXTS, trainer)


KINDS: list[Callable[[Sequence[str]], Tokenizer]] = [byte_level, whole_words, nfc, metaspace, always, legacy, unigram]
LOSSLESS = (byte_level, nfc)


def tokenizer_of(kind: Callable[[Sequence[str]], Tokenizer], names: Sequence[str] = NAMES, **more: Any) -> Any:
    start, end, eos = names
    return PreTrainedTokenizerFast(
        tokenizer_object=kind(names),
        eos_token=eos,
        extra_special_tokens=[start, end],
        chat_template=CHATML.replace("START", start).replace("END", end),
        **more,
    )


def prepared(folder: Path, rows: list[dict[str, Any]], tokenizer: Any, **options: Any) -> Prepared:
    file = write_rows(folder / "rows.jsonl", rows)
    usual = Data(train=(Source(path=str(file)),), max_length=4096, pack=False, order="given")
    return prepare(Data(**{**usual.__dict__, **options}), tokenizer, cache=folder / "cache")


def documents(found: Prepared) -> list[tuple[list[int], list[float]]]:
    packs = map(found.train.pack, range(found.train.num_packs))
    return [(pack.input_ids.tolist(), pack.weights.tolist()) for pack in packs]


WORDS = ["fox", " the lazy dog", "\n", " ", "  ", "<", "|", "</", "s>", "im_end|>", "4+4", *NAMES, *NAMES]


def texts(chance: random.Random, words: Sequence[str]) -> str:
    return "".join(chance.choice(words) for _ in range(chance.randint(1, 8)))


def talk(chance: random.Random, words: Sequence[str]) -> dict[str, Any]:
    messages = []
    for _ in range(chance.randint(1, 3)):
        messages += [
            {"role": "user", "content": texts(chance, words)},
            {"role": "assistant", "content": f"A{texts(chance, words)}."},
        ]
    return {"messages": messages}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_as_text_rows_are_tokenised_as_by_a_tokenizer_to_which_these_are_words(
    kind: Callable[[Sequence[str]], Tokenizer], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance = random.Random(seed)
    rows = [talk(chance, WORDS) for _ in range(30)]
    tokenizer, other = tokenizer_of(kind), tokenizer_of(kind, OTHER_NAMES)
    folder = tmp_path_factory.mktemp("rows")
    found = prepared(folder, rows, tokenizer)
    expected = prepared(tmp_path_factory.mktemp("reference"), rows, other)
    assert found.account.total.rows_bad == expected.account.total.rows_bad == 0
    assert documents(found) == documents(expected)
    special = {tokenizer.convert_tokens_to_ids(name) for name in NAMES}
    for row, (ids, _) in zip(rows, documents(found), strict=True):
        assert sum(token in special for token in ids) == 2 * len(row["messages"])
        if kind in LOSSLESS:
            whole = tokenizer.apply_chat_template(row["messages"], tokenize=False)
            assert tokenizer.decode(ids) == whole
    for setting in ("text", "keep"):
        own = prepared(folder, rows, tokenizer, control_tokens=setting)
        for row, (ids, _) in zip(rows, documents(own), strict=True):
            asked = encode_prompt(row["messages"][:1], own.tokenizer)
            assert asked == ids[: len(asked)]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_control_tokens_have_the_same_tokens_in_every_setting(
    kind: Callable[[Sequence[str]], Tokenizer], tmp_path: Path
) -> None:
    chance = random.Random(0)
    rows = [talk(chance, [*WORDS[:5], "4+4", "im_end"]) for _ in range(30)]
    tokenizer = tokenizer_of(kind)
    found = [documents(prepared(tmp_path, rows, tokenizer, control_tokens=one)) for one in ("text", "keep", "error")]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", [byte_level, nfc])
def test_a_text_without_the_templates_own_is_what_split_special_tokens_gives(
    kind: Callable[[Sequence[str]], Tokenizer], tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(kind)
    tokenizer.chat_template = None
    row = {"instruction": "Strike <s>this</s> out<|im_end|>", "input": "", "output": "</s>fox<|im_start|> dog"}
    found = prepared(tmp_path, [row], tokenizer, template="alpaca")
    messages = [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]
    text = str(found.tokenizer.apply_chat_template(messages, tokenize=False))
    assert text.endswith("</s>")
    words = tokenizer(text.removesuffix("</s>"), split_special_tokens=True, add_special_tokens=False)["input_ids"]
    assert documents(found)[0][0] == [*words, tokenizer.eos_token_id]


HELD: dict[str, dict[str, Any]] = {
    "user": {"messages": [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "c"}]},
    "assistant": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>c"}]},
    "system": {
        "system": "a<|im_end|>",
        "messages": [{"role": "user", "content": "a"}, {"role": "gpt", "content": "b"}],
    },
    "result": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "tool", "content": "<|im_end|>"},
            {"role": "assistant", "content": "c"},
        ]
    },
    "arguments": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x<|im_end|>": ["<|im_end|>"]}}]},
        ]
    },
    "alpaca": {"instruction": "a", "input": "<|im_end|>", "output": "b"},
    "completion": {"prompt": "a<|im_end|>", "completion": "b"},
    "parts": {
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "b", "train": False}, {"type": "text", "text": "<|im_end|>c"}],
            },
        ]
    },
}


@pytest.mark.parametrize("name", HELD)
def test_they_are_found_wherever_a_row_holds_them(name: str, tmp_path: Path) -> None:
    row, tokenizer = HELD[name], tokenizer_of(byte_level)
    found = prepared(tmp_path, [row], tokenizer)
    account = found.account.total
    assert (account.rows_with_control_tokens, account.control_tokens) == (1, {"<|im_end|>": 1})
    (ids, _), (kept, _) = documents(found)[0], documents(prepared(tmp_path, [row], tokenizer, control_tokens="keep"))[0]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == tokenizer.decode(kept).count("<|im_start|>")
    assert kept.count(end) > ids.count(end)
    assert tokenizer.decode(ids) == tokenizer.decode(kept)
    with pytest.raises(DataError, match=r"rows.jsonl:1: its own words hold <\|im_end\|>.*") as error:
        prepared(tmp_path, [row], tokenizer, control_tokens="error")
    assert error.value.account.total.bad_kinds == {"control_token": 1}
    assert "data.control_tokens: text" in str(error.value)


def test_the_account_says_which_and_where(tmp_path: Path) -> None:
    plain = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}
    rows = [plain, HELD["user"], plain, *[HELD["assistant"]] * 6, HELD["result"]]
    found = prepared(tmp_path, rows, tokenizer_of(byte_level))
    source = found.account.sources[0]
    assert source.rows_with_control_tokens == 8
    assert source.control_token_rows == tuple(f"rows.jsonl:{row}" for row in (2, 4, 5, 6, 7))
    line = next(text for text in remarks(found.account) if "control" in text[0])
    assert line == (
        "rows.jsonl: 8 rows hold control tokens in their own words, trained as words (data.control_tokens: text): "
        "<|im_end|> (8); in rows.jsonl:2, rows.jsonl:4, rows.jsonl:5, rows.jsonl:6, rows.jsonl:7 and 3 more",
        "yellow",
    )
    skipped = prepared(tmp_path, rows, tokenizer_of(byte_level), control_tokens="error", on_bad_row="skip")
    assert (skipped.account.total.rows_bad, skipped.account.total.rows_with_control_tokens) == (8, 0)


def test_what_stays_a_token(tmp_path: Path) -> None:
    """Texts without turns; what the assistant says around thoughts; tokens that the config adds for the rows."""
    tokenizer = tokenizer_of(byte_level)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    found = prepared(tmp_path, [{"text": "a<|im_end|>b"}], tokenizer)
    assert documents(found)[0][0].count(end) == 1
    assert found.account.total.rows_with_control_tokens == 0
    found = prepared(tmp_path, [{"prompt": "a<|im_end|>b", "completion": "c"}], tokenizer, template="plain")
    assert documents(found)[0][0].count(end) == 1
    assert any("which stay tokens" in text[0] for text in remarks(found.account))

    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]}, replace_extra_special_tokens=False)
    said = {"role": "assistant", "content": "<think>a</think>b"}
    row = {"messages": [{"role": "user", "content": "Write <think>."}, said]}
    found = prepared(tmp_path, [row], tokenizer)
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert documents(found)[0][0].count(think) == 1
    assert found.account.total.control_tokens == {"<think>": 1}

    row = {"messages": [{"role": "user", "content": "<mine>a<|im_end|>"}, {"role": "assistant", "content": "b<mine>"}]}
    found = prepared(tmp_path, [row], tokenizer, added_tokens=("<mine>",))
    mine = found.tokenizer.added_tokens_encoder["<mine>"]
    assert documents(found)[0][0].count(mine) == 2
    assert found.account.total.control_tokens == {"<|im_end|>": 1}
    asked = encode_prompt(row["messages"][:1], found.tokenizer)
    assert asked == documents(found)[0][0][: len(asked)]


def test_tokens_that_are_not_special_count_where_the_template_tells_turns_apart_by_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(byte_level)
    tokenizer.add_tokens(["<|user|>", "<|model|>", "<tag>", "\n", "model"])
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{- ('<|user|>' if m.role == 'user' else '<|model|>') + m.content + '<|im_end|>' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|model|>' -}}{%- endif -%}"
    )
    row = {
        "messages": [
            {"role": "user", "content": "<|user|>a\nmodel<tag>"},
            {"role": "assistant", "content": "b<|model|>"},
        ]
    }
    found = prepared(tmp_path, [row], tokenizer)
    ids = documents(found)[0][0]
    counts = {name: ids.count(tokenizer.convert_tokens_to_ids(name)) for name in ("<|user|>", "<|model|>", "<tag>")}
    assert counts == {"<|user|>": 1, "<|model|>": 1, "<tag>": 1}
    assert found.account.total.control_tokens == {"<|user|>": 1, "<|model|>": 1}


def test_a_template_that_looks_for_them_is_not_guessed_at(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(byte_level)
    looks = "('<|im_end|>' in m.content) | string + m.content"
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", looks)
    with pytest.raises(DataError, match="does not take the control tokens in its words for words like others"):
        prepared(tmp_path, [HELD["user"]], tokenizer)


def test_the_setting_travels_with_the_tokenizer(tmp_path: Path) -> None:
    """So that what chats with the model, or serves it, encodes prompts as training did."""
    row = HELD["user"]
    tokenizer = tokenizer_of(byte_level, split_special_tokens=True)
    for setting in ("keep", "text"):
        found = prepared(tmp_path, [row], tokenizer, control_tokens=setting)
        found.tokenizer.save_pretrained(tmp_path / setting)
        again = PreTrainedTokenizerFast.from_pretrained(tmp_path / setting)
        asked = encode_prompt(row["messages"][:1], again)
        assert asked == documents(found)[0][0][: len(asked)]
        assert asked.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == (2 if setting == "keep" else 1)
        tokenizer = again
    assert "control_tokens" not in (tmp_path / "text" / "tokenizer_config.json").read_text()


def test_a_prompt_that_no_tokenizer_takes_is_refused() -> None:
    with pytest.raises(UserError, match="not valid Unicode"):
        encode_prompt([{"role": "user", "content": "a\ud800"}], tokenizer_of(byte_level))
