"""Documents longer than a pack in pieces: borders, context, each supervised token once, beside a plain reference."""

from __future__ import annotations

import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.conftest import make_tokenizer, write_rows
from tonnage.config import Data, Source
from tonnage.data import Prepared, prepare
from tonnage.data.packs.pieces import Borders, Piece, pieces

ROOM = 64
END_OF_SENTENCE = re.compile(r"[.!?]+[\"')]*(?=\s)|[。！？]|\n+(?!\n)")


def text_of(seed: int, sentences: int = 60) -> str:
    """Sentences of all lengths, in paragraphs, with quotes, and a run without any border."""
    draw = random.Random(seed)
    words = ["fox", "dog", "lazy", "Paris", "quick", "def", "add", "2.5", "e.g", "sold"]
    made = []
    for number in range(sentences):
        made.append(" ".join(draw.choices(words, k=draw.randint(1, 14))) + draw.choice([".", "!", "?", '."', ".)"]))
        made.append(draw.choice([" ", " ", " ", "\n", "\n\n"]))
        if number == sentences // 2:
            made.append("fox" * 200 + " ")
    return "".join(made)


def pieces_in(prepared: Prepared) -> list[tuple[int, int, list[int], list[float]]]:
    """Document, first token, ids and weights of every piece, in order."""
    made = []
    dataset = prepared.train
    for index in range(dataset.num_packs):
        pack, at = dataset.pack(index), 0
        for document, start, length in zip(pack.documents, pack.starts, pack.lengths, strict=True):
            ids, weights = pack.input_ids[at : at + length], pack.weights[at : at + length]
            made.append((int(document), int(start), ids.tolist(), weights.tolist()))
            at += length
    return sorted(made)


def prepared_of(path: Path, tokenizer: Any, **changes: Any) -> Prepared:
    keys: dict[str, Any] = {"max_length": ROOM, "over_length": "split", "max_loss": 1.0, "template": "chatml"} | changes
    return prepare(Data(train=(Source(path=str(path)),), **keys), tokenizer, cache=path.parent / "cache", processes=1)


QUICK = {(0, "tokens", True), (13, "sentences", False), (32, "sentences", True)}


@pytest.mark.parametrize(
    ("overlap", "at", "pack"),
    [
        pytest.param(*cut, marks=() if cut in QUICK else pytest.mark.matrix)
        for cut in product([0, 1, 13, 32], ["tokens", "sentences"], [True, False])
    ],
)
def test_texts_beside_a_plain_reference(tmp_path: Path, tokenizer: Any, overlap: int, at: str, pack: bool) -> None:
    texts = [text_of(seed) for seed in range(3)]
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    prepared = prepared_of(path, tokenizer, overlap=overlap, split_at=at, pack=pack, template="auto")
    found = pieces_in(prepared)
    supervised = context = 0
    for document, text in enumerate(texts):
        encoding = tokenizer(text + tokenizer.eos_token, return_offsets_mapping=True, add_special_tokens=False)
        ids, ends = encoding["input_ids"], [stop for _, stop in encoding["offset_mapping"]]
        borders = {match.end() for match in END_OF_SENTENCE.finditer(text)}
        own = 0
        of_document = [piece for piece in found if piece[0] == document]
        for number, (_, start, seen, weights) in enumerate(of_document):
            assert start == max(own - overlap, 0)
            stop = start + len(seen)
            assert len(seen) <= ROOM
            assert seen == ids[start:stop]
            first = max(own, start + 1)
            assert weights == [0.0] * (first - start) + [1.0] * (stop - first)
            supervised, context = supervised + stop - first, context + own - start
            if at == "tokens":
                assert stop == min(len(ids), start + ROOM)
            elif number < len(of_document) - 1 and stop < start + ROOM:
                assert ends[stop - 1] in borders, text[ends[stop - 1] - 30 : ends[stop - 1] + 9]
            later = range(own + (start + ROOM - own) // 2 + 1, min(start + ROOM, len(ids)))
            if at == "sentences" and stop == start + ROOM and stop < len(ids):
                assert ends[stop - 1] in borders or not any(ends[place - 1] in borders for place in later)
            own = stop
        assert own == len(ids)
    account = prepared.account
    assert account.train.supervised == supervised
    total = account.total
    assert (total.rows_split, total.pieces, total.context_tokens) == (3, len(found), context)
    assert total.tokens.repeated == context
    lost = 3 if overlap else len(found)  # without context before it, a token has nothing that predicts it
    assert total.supervised.cut == lost - 3
    assert total.tokens.cut == 0


def conversation(seed: int, turns: int = 12) -> dict[str, Any]:
    draw = random.Random(seed)
    said = []
    for _ in range(turns):
        said.append({"role": "user", "content": "dog " * draw.randint(1, 6)})
        said.append({"role": "assistant", "content": "The quick fox. " * draw.randint(1, 4)})
    return {"messages": said}


@pytest.mark.parametrize("overlap", [0, 16])
def test_conversations_are_cut_after_an_answer(tmp_path: Path, overlap: int) -> None:
    tokenizer = make_tokenizer(["<|im_start|>", "<|im_end|>"], vocab=400)
    rows = [conversation(seed) for seed in range(4)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    prepared = prepared_of(path, tokenizer, split_at="turns", overlap=overlap, max_length=160)
    whole = prepared_of(path, tokenizer, max_length=4096)
    documents = {number: (ids, weights) for number, _, ids, weights in pieces_in(whole)}
    times = {number: np.zeros(len(ids)) for number, (ids, _) in documents.items()}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for number, start, ids, weights in pieces_in(prepared):
        whole_ids, whole_weights = documents[number]
        stop = start + len(ids)
        assert ids == whole_ids[start:stop]
        times[number][start:stop] += np.array(weights) > 0
        if stop < len(whole_ids):
            assert ids[-1] == end
            assert whole_weights[stop - 1] > 0, "an answer, no question, is what a piece ends with"
    for number, (_, weights) in documents.items():
        assert np.array_equal(times[number], (np.array(weights) > 0) * 1.0)
    assert prepared.account.total.turns_without_end == 0
    assert prepared.account.total.pieces > 8


def test_pieces_that_supervise_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["<|im_start|>", "<|im_end|>"], vocab=400)
    row = {"messages": [{"role": "user", "content": "dog " * 400}, {"role": "assistant", "content": "fox"}]}
    path = write_rows(tmp_path / "rows.jsonl", [row])
    total = prepared_of(path, tokenizer, overlap=8).account.total
    assert (total.pieces, total.supervised.cut) == (1, 0)
    assert total.tokens.cut > 300


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_some_pieces_own(seed: int) -> None:
    draw = random.Random(seed)
    length, room = draw.randint(1, 500), draw.randint(2, 60)
    overlap = draw.randint(0, room // 2)
    kinds = [np.array(sorted(draw.sample(range(1, length + 1), draw.randint(0, length)))) for _ in range(2)]
    made = pieces(length, room, overlap, kinds)
    assert [own for _, own, _ in made] == [0, *(piece.stop for piece in made[:-1])]
    assert made[-1].stop == length
    assert all(own <= start + overlap and stop - start <= room and own < stop for start, own, stop in made)
    assert len({piece.start for piece in made}) == len(made)


def test_the_best_kind_that_lies_in_the_later_half() -> None:
    turns, sentences = np.array([10, 90]), np.array([40, 60, 95])
    assert pieces(120, 50, 0, [turns, sentences]) == [Piece(0, 0, 40), Piece(40, 40, 90), Piece(90, 90, 120)]
    assert pieces(120, 50, 5, [turns])[1] == Piece(45, 50, 90)


def test_what_tokens_end(tokenizer: Any) -> None:
    text = 'It is 2.5 km. "Go!" she said.\n\nA new one。Then 。\nEnd'
    ids = np.array(tokenizer(text)["input_ids"])
    ends = np.array([stop for _, stop in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]])
    paragraphs, others = Borders(tokenizer, "sentences").find(ids, [])
    assert [text[: ends[place - 1]][-8:] for place in paragraphs] == [" said.\n\n"]
    shown = [text[: ends[place - 1]][-8:] for place in others]  # a mark in several bytes is no token of this vocabulary
    assert shown == [" 2.5 km.", 'm. "Go!"', "he said.", " said.\n\n", "。Then 。\n"]
