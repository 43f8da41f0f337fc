"""Documents of answers with a label: each with the answer of another row behind its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.conftest import write_rows
from tiny import byte_tokenizer
from tonnage.config import Config
from tonnage.data import DataError, PackedDataset, Prepared, prepare
from tonnage.data.building.mates import Result, mated, with_mates
from tonnage.data.tokens.encoder import Document
from tonnage.forms.conversation import RowError


def document(prompt: list[int], answer: list[int], weight: float = 1.0) -> Document:
    tokens = np.array([*prompt, *answer], np.int32)
    return Document(tokens, [(len(prompt), len(tokens), weight)], carried=(1.0,))


def test_a_document_with_its_mate() -> None:
    own, mate = document([1, 2, 3], [4, 5], 2.0), document([6, 7], [8, 9, 10])
    both = mated(own, mate)
    assert both.tokens.tolist() == [1, 2, 3, 4, 5, 8, 9, 10]
    assert both.fork == (3, 5)
    assert both.spans == [(3, 5, 2.0), (5, 8, 2.0)]
    assert (both.carried, both.has_mate, own.has_mate) == ((1.0,), True, False)


def test_the_mate_is_the_next_row_with_another_prompt() -> None:
    bad = RowError("x", "y")
    rows: list[Result] = [
        (1, document([1, 2], [3])),
        (2, document([1, 2], [4])),
        (3, bad),
        (4, document([5, 6], [7])),
        (5, document([8, 6], [9])),
        (6, document([8, 6], [10])),
    ]
    mates = {
        row: result.tokens[result.fork.second :].tolist()
        for row, result in with_mates(rows)
        if isinstance(result, Document)
    }
    assert mates == {1: [7], 2: [7], 4: [9], 5: [7], 6: [7]}
    assert [row for row, _ in with_mates(rows)] == [3, 1, 2, 4, 5, 6]


@pytest.mark.parametrize("rows", [[(1, document([1, 2], [3]))], [(1, document([1], [3])), (2, document([1], [4]))]])
def test_without_another_prompt_there_is_no_mate(rows: list[Any]) -> None:
    for _, result in with_mates(rows):
        assert isinstance(result, RowError)
        assert result.kind == "no_mate"


def prepared(tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> Prepared:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    text = {"train": str(file), "max_length": 64, "template": "plain", "duplicates": "drop"} | data
    config = Config.model_validate({"model": "m", "data": text, "objective": "kto"})
    return prepare(config.data, byte_tokenizer(), cache=tmp_path / "cache", purpose="verdicts", processes=1)


def test_rows_become_documents_with_labels(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": "yes", "label": True},
        {"prompt": "b", "completion": "no", "label": False},
        {"prompt": "c", "completion": "so", "label": True},
        {"prompt": "a", "completion": "yes", "label": True},  # again, before another mate
        {"prompt": "a", "completion": "yes", "label": False},  # of which nobody knows what it is
    ]
    all_rows = prepared(tmp_path, rows)
    account, data = all_rows.account.total, all_rows.train
    assert (account.rows_desirable, account.rows_undesirable) == (3, 2)
    assert account.rows_duplicate_dropped == 1
    assert data.pairs
    own: dict[str, float] = {}
    for number in range(data.num_packs):
        pack, at = data.pack(number), 0
        assert pack.forks is not None
        for length, fork, label in zip(pack.lengths, pack.forks.tolist(), pack.carried["desirable"], strict=True):
            tokens = pack.input_ids[at : at + length]
            text = all_rows.tokenizer.decode(tokens[: fork[1]], skip_special_tokens=True)
            own[f"{text} {label:g}"] = label
            assert (pack.weights[at : at + length] > 0).tolist() == [place >= fork[0] for place in range(length)]
            at += length
    assert len(own) == 4


def test_a_row_alone_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no other row of its part of the file has another prompt"):
        prepared(tmp_path, [{"prompt": "a", "completion": "yes", "label": True}])


@pytest.mark.parametrize("kind", ["kto", "dpo"])
def test_rows_of_one_prompt_are_on_one_side(kind: str, tmp_path: Path) -> None:
    """A model that has seen a prompt's other answers knows more of it than of one that is new."""
    answers: dict[str, list[dict[str, Any]]] = {
        "kto": [{"completion": "yes", "label": True}, {"completion": "no", "label": False}],
        "dpo": [{"chosen": "yes", "rejected": "no"}, {"chosen": "yes", "rejected": "never"}],
    }
    rows = [{"prompt": f"question {number}"} | answer for number in range(40) for answer in answers[kind]]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    data = {"train": str(file), "max_length": 64, "template": "plain", "validation": 0.2}
    config = Config.model_validate({"model": "m", "data": data, "objective": kind})
    purpose = config.objective.rows
    both = prepare(config.data, byte_tokenizer(), cache=tmp_path / "cache", purpose=purpose, processes=1)
    assert both.validation is not None
    prompts = [prompts_of(dataset) for dataset in (both.train, both.validation)]
    assert prompts[0] | prompts[1] == {f"question {number}" for number in range(40)}
    assert not prompts[0] & prompts[1]
    assert len(prompts[1]) == 8


def prompts_of(dataset: PackedDataset) -> set[str]:
    prompts = set()
    for number in range(dataset.num_packs):
        pack, at = dataset.pack(number), 0
        assert pack.forks is not None
        for length, (shared, _) in zip(pack.lengths.tolist(), pack.forks.tolist(), strict=True):
            text = str(byte_tokenizer().decode(pack.input_ids[at : at + shared], skip_special_tokens=True))
            prompts.add(text.strip())
            at += length
    return prompts
