"""Very long texts: the tokens of the whole, from pieces."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from data.conftest import make_tokenizer
from tonnage.data.text.masks import Marked
from tonnage.data.tokens import encoder, long_texts
from tonnage.data.tokens.encoder import Document, Encoder
from tonnage.data.tokens.words import PATTERNS

ALPHABET = [
    "a",
    "ab",
    "fox",
    "é",
    "中文字",
    "。",
    ".",
    "!",
    "'s",
    " ",
    "  ",
    "\n",
    "\n\n",
    " \n",
    "\t",
    "12345",
    "e\u0301",
    "\u0301",
]
LLAMA_3 = next(pattern for pattern in PATTERNS if "{1,3}" in pattern)


def tokenizers() -> dict[str, Any]:
    gpt_2, llama_3, composed = (make_tokenizer(["<|im_end|>"]) for _ in range(3))
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    llama_3.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    composed.backend_tokenizer.normalizer = normalizers.NFC()
    return {"gpt-2": gpt_2, "llama 3": llama_3, "nfc": composed}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "LONG", 200)
    monkeypatch.setattr(long_texts, "PIECE", 50)
    monkeypatch.setattr(long_texts, "AROUND", 16)


@pytest.mark.parametrize("name", ["gpt-2", "llama 3", "nfc"])
def test_pieces_give_the_tokens_of_the_whole(small: None, name: str) -> None:
    tokenizer = tokenizers()[name]
    own = Encoder(tokenizer.backend_tokenizer.to_str())
    own._scanner = None  # else most of these texts are cut into words
    draw, in_pieces = random.Random(0), 0
    for _ in range(60):
        text = "".join(draw.choices([*ALPHABET, "<|im_end|>"], k=draw.randint(100, 400)))
        document = own.document(Marked(text, [(0, len(text), 1.0)]))
        assert isinstance(document, Document)
        assert document.tokens.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert document.spans == [(1, len(document.tokens), 1.0)]
        in_pieces += len(text) >= 200 and long_texts.ids_in_pieces(text, own.ids) is not None
    assert in_pieces > 30


def test_a_cut_that_changes_tokens_is_left_out(small: None) -> None:
    own = Encoder(make_tokenizer().backend_tokenizer.to_str())
    text = "fox. " * 60
    places = {place for place in range(1, len(text)) if text[place] == " "}

    def across(piece: str) -> list[int]:
        return [0] if piece.startswith(" ") else own.ids(piece)

    assert places
    assert long_texts.ids_in_pieces(text, across) is None
    tokens = long_texts.ids_in_pieces(text, own.ids)
    assert tokens is not None
    assert np.array_equal(tokens, own.ids(text))


def test_tokens_that_take_white_space_along_forbid_cuts() -> None:
    tokenizer = make_tokenizer().backend_tokenizer
    assert long_texts.may_be_cut(tokenizer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    assert not long_texts.may_be_cut(tokenizer)
