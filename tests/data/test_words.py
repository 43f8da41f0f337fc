"""Words, tokens and borders against ``tokenizers`` itself: every short text, and many long ones."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from data.conftest import TEXTS
from tonnage.data.text.masks import Marked
from tonnage.data.tokens import encoder as tokens
from tonnage.data.tokens import words
from tonnage.data.tokens.encoder import Document, Encoder, plain_json
from tonnage.data.tokens.words import PATTERNS, Scanner

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACES = [AddedToken(" " * count, normalized=True) for count in range(24, 1, -1)]
MARKS = ["<|end|>", "<|en", "<|end|>x", "### End", "|>"]
"""Special tokens that begin alike, lie in one another and hold spaces."""


def split_by(pattern: str) -> Any:
    if pattern == GPT_2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def trained(pre_tokenizer: Any, normalizer: Any = None, model: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model or models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, "  a\n\n  b\n \n", "it's we'll we're I've", "été “quoted” 日本語"], trainer)
    return tokenizer


def short_texts() -> list[str]:
    characters = [chr(code) for code in range(128)]
    pairs = map("".join, itertools.product(characters, repeat=2))
    kinds = ["a", "s", "r", "e", "L", "7", " ", "\n", "\r", "\t", "'", "."]
    return [*pairs, *map("".join, itertools.product(kinds, repeat=4)), *(f"a{c} {c}.{c}\n{c}" for c in characters)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_words_of_every_short_text(pattern: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split_by(pattern)
    scanner = Scanner.of(tokenizer)
    assert scanner is not None
    for text in short_texts():
        expected = [text[start:stop] for _, (start, stop) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert scanner.cut(text, []) == [expected]


PIECES = [
    *(
        "the",
        "fox",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "'s",
        "'ll",
        "'S",
        "'",
        "...",
        "<|",
        "|>",
        "<|end",
        "x",
        "12345",
        "3.14",
    ),
    *("### End", " ###", "\r\n", "\u00a0", "{}", "\x1c", "\x0b", "\0", "_", "A", " ?", "!?", "é", "e\u0301", "\u0301"),
    *("日本語", "🦊", "’s", "“", "\u3000", "\u0085", "K", "\u037e", "été ", "ſ", *MARKS, " " * 25),
]


def texts(count: int) -> list[str]:
    chance = random.Random(0)
    return [
        "".join(chance.choice(PIECES) + chance.choice(["", "", " "]) for _ in range(chance.randint(1, 14)))
        for _ in range(count)
    ]


def checked(encoder: Encoder, tokenizer: Tokenizer, count: int) -> tuple[int, int, int]:
    """Texts of all kinds, every other one with a border anywhere in it: what the tokenizer makes of the text and of its
    beginning decides. Returns how many texts were cut into words, and how many borders held and did not."""
    chance = random.Random(1)
    some = texts(count)
    spans = [[(chance.randrange(len(text)) * (number % 2), len(text), 1.0)] for number, text in enumerate(some)]
    cut = held = failed = 0
    for at in range(0, count, 50):
        batch = encoder.begin([Marked(*pair) for pair in zip(some[at : at + 50], spans[at : at + 50], strict=True)])
        encoder.run(batch)
        for (text, marked), found in zip(batch.texts, encoder.documents(batch), strict=True):
            whole = tokenizer.encode(text, add_special_tokens=False).ids
            alone = tokenizer.encode(text[: marked[0][0]], add_special_tokens=False).ids
            assert isinstance(found, Document), text
            assert found.tokens.tolist() == whole, text
            holds = whole[: len(alone)] == alone
            same = next((n for n, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b), len(alone))
            first, last = max(same, 1), len(whole)
            assert found.spans == ([(first, last, 1.0)] if first < last else []), text
            assert found.moved == (not holds), text
            held, failed = held + holds, failed + (not holds)
        cut += sum(batch.by_word)
    return cut, held, failed


TOKENIZERS = {
    **{f"pattern {number}": (split_by(pattern), None) for number, pattern in enumerate(PATTERNS)},
    "composed": (split_by(GPT_2), normalizers.NFC()),
}


@pytest.mark.parametrize("added", ["nothing added", "spaces", "marks", "both"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_and_borders(name: str, added: str) -> None:
    tokenizer = trained(*TOKENIZERS[name])
    if added in ("spaces", "both"):
        tokenizer.add_tokens(SPACES)
    if added in ("marks", "both"):
        tokenizer.add_special_tokens(MARKS)
    cut, held, failed = checked(Encoder(plain_json(tokenizer)), tokenizer, 1000)
    assert cut > 400
    assert held > 400
    assert failed > 20


FOREIGN = ["日本語", "中文，", "。", "！\n", "ไทย", "é", "한국", "ㅎ", "’s", "'s", "K", " \n", "7", *MARKS[:2]]
DECOMPOSED = ["e\u0301", "\u0301", "\u1112\u1161", "\u1161"]


@pytest.mark.parametrize("pieces", [FOREIGN, [*FOREIGN, *DECOMPOSED]], ids=["composed", "decomposed"])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: f"pattern {list(PATTERNS).index(pattern)}")
def test_borders_in_text_without_spaces(
    pattern: str, normalizer: Any, pieces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each border is where the tokenizer has it when given all of the text before; and unless the normaliser changes
    the text, it is not given all of it."""
    tokenizer = trained(split_by(pattern), normalizer)
    tokenizer.add_special_tokens(MARKS)
    encoder = Encoder(plain_json(tokenizer))
    plainly = encoder.ids
    asked: list[int] = []

    def counted(text: str) -> list[int]:
        asked.append(len(text))
        return plainly(text)

    monkeypatch.setattr(encoder, "ids", counted)
    chance = random.Random(2)
    held = given = 0
    for _ in range(50):
        text = "日本語" * (words.LONG_WORD // 2) + "".join(chance.choices(pieces, k=200))
        border = chance.randrange(len(text) // 2, len(text))
        asked.clear()
        batch = encoder.begin([Marked(text, [(border, len(text), 1.0)])])
        encoder.run(batch)
        (found,) = encoder.documents(batch)
        assert isinstance(found, Document)
        assert batch.by_word == [False]
        whole, alone = plainly(text), plainly(text[:border])
        same = next((n for n, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b), len(alone))
        assert found.tokens.tolist() == whole
        assert found.spans == [(same, len(whole), 1.0)]
        if whole[: len(alone)] == alone:
            held += 1
            given += max(asked, default=0) > border // 2
    assert held > 20
    if normalizer is None or pieces is FOREIGN:
        assert given < held // 10


def test_words_are_found_in_most_of_what_people_write() -> None:
    scanner = Scanner.of(trained(split_by(GPT_2), normalizers.NFC()))
    assert scanner is not None
    assert scanner.cut("It’s “quoted”, été—and more.", [4]) == [["It’s"], [" “quoted”,", " été—and", " more", "."]]
    assert scanner.cut("日本語" * 200, []) is None, "a script without spaces has no words to remember"
    assert scanner.cut("e\u0301", []) is None, "the normaliser would change it"
    assert scanner.cut("\ud800", []) is None


OTHERS: dict[str, tuple[Any, list[AddedToken]]] = {
    "a space before the first word": (pre_tokenizers.ByteLevel(add_prefix_space=True), []),
    "an unknown pattern": (split_by(r"\S+|\s+"), []),
    "a token that takes the space before it": (split_by(GPT_2), [AddedToken("<|end|>", lstrip=True)]),
    "a token that takes the space after it": (split_by(GPT_2), [AddedToken("<|end|>", rstrip=True)]),
    "a token that stands alone": (split_by(GPT_2), [AddedToken("x", single_word=True)]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_tokenizers_encode_their_texts_whole(name: str) -> None:
    pre_tokenizer, added = OTHERS[name]
    tokenizer = trained(pre_tokenizer)
    tokenizer.add_tokens(added)
    cut, held, _ = checked(Encoder(plain_json(tokenizer)), tokenizer, 500)
    assert cut == 0
    assert held > 100


def test_a_pattern_that_is_not_what_we_take_it_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = next(pattern for pattern in PATTERNS if pattern != GPT_2)
    monkeypatch.setitem(words.PATTERNS, pattern, PATTERNS[GPT_2].replace("[0-9]++", "[0-9]"))
    assert Scanner.of(trained(split_by(pattern))) is None
    assert Scanner.of(trained(split_by(GPT_2))) is not None


def test_added_tokens_that_are_found_in_another_way_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained(split_by(GPT_2))
    tokenizer.add_special_tokens(MARKS)
    assert checked(Encoder(plain_json(tokenizer)), tokenizer, 100)[0] > 0
    monkeypatch.setattr(
        words, "_splitter", lambda tokens: re.compile("(" + "|".join(map(re.escape, MARKS)) + ")").split
    )
    assert checked(Encoder(plain_json(tokenizer)), tokenizer, 100)[0] == 0


def test_a_full_vocabulary_starts_again_between_batches_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "VOCABULARY_CHARACTERS", 100)
    tokenizer = trained(split_by(GPT_2))
    encoder = Encoder(plain_json(tokenizer))
    batches = []
    for first in range(0, 60, 10):
        some = texts(60)[first : first + 10]
        batches.append(encoder.begin([Marked(text, [(0, len(text), 1.0)]) for text in some]))
    assert len({id(batch.vocabulary) for batch in batches}) > 1
    for batch in batches:
        encoder.run(batch)
    for batch in batches:
        for (text, _), found in zip(batch.texts, encoder.documents(batch), strict=True):
            assert isinstance(found, Document)
            assert found.tokens.tolist() == tokenizer.encode(text).ids


def test_settings_of_the_tokenizer_for_other_uses_change_nothing() -> None:
    plain = trained(split_by(GPT_2))
    plain.add_special_tokens(["<|end|>"])
    set_up = Tokenizer.from_str(plain.to_str())
    set_up.enable_truncation(3)
    set_up.enable_padding(length=1000)
    assert plain_json(set_up) == plain_json(plain)
    set_up.model.dropout = 0.9
    end = plain.token_to_id("<|end|>")
    set_up.post_processor = processors.TemplateProcessing(
        single="<|end|> $A <|end|>", special_tokens=[("<|end|>", end)]
    )
    checked(Encoder(plain_json(set_up)), plain, 300)
