"""Preparation from end to end on small files: the packs, the masks, the account, the refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from data.conftest import alpaca_rows, make_tokenizer, write_rows
from tonnage.config import Data, Source
from tonnage.data import DataError, PackedDataset, Prepared, encode_prompt, prepare
from tonnage.errors import UserError


def options(*paths: Path, **changes: Any) -> Data:
    return Data(train=tuple(Source(path=str(path)) for path in paths), **{"max_length": 512, **changes})


def documents(prepared: Prepared) -> list[tuple[list[int], list[float]]]:
    """All documents of the training packs with their weights."""
    found = []
    for index in range(prepared.train.num_packs):
        pack = prepared.train.pack(index)
        at = 0
        for length in pack.lengths.tolist():
            found.append((pack.input_ids[at : at + length].tolist(), pack.weights[at : at + length].tolist()))
            at += length
        assert at == len(pack.input_ids) == len(pack.weights) <= prepared.train.max_length
    return found


def test_alpaca_rows_end_to_end(tmp_path: Path, tokenizer: Any) -> None:
    rows = alpaca_rows(50)
    prepared = prepare(options(write_rows(tmp_path / "a.json", rows)), tokenizer, cache=tmp_path / "cache")
    assert prepared.account.template == "alpaca"
    assert prepared.account.added_tokens == ()
    assert prepared.stop_tokens == (tokenizer.eos_token_id,)
    assert tokenizer.chat_template is None, "the tokenizer given is left alone"
    answers = set()
    for ids, weights in documents(prepared):
        said = [token for token, weight in zip(ids, weights, strict=True) if weight]
        assert said[-1] == tokenizer.eos_token_id, "the end of the turn is learned although it is the padding token too"
        answers.add(tokenizer.decode(said[:-1]))
        assert weights[0] == 0
    assert answers == {row["output"] for row in rows}
    account = prepared.account.total
    assert (account.rows_read, account.rows_train, account.rows_bad, account.rows_dropped) == (50, 50, 0, 0)
    assert account.tokens.read == prepared.train.num_tokens == sum(len(ids) for ids, _ in documents(prepared))
    assert prepared.train.supervised_tokens == sum(np.count_nonzero(w) for _, w in documents(prepared))


def test_the_prompt_is_what_stands_before_the_answer(tmp_path: Path, tokenizer: Any) -> None:
    rows = alpaca_rows(1)
    prepared = prepare(options(write_rows(tmp_path / "a.json", rows)), tokenizer, cache=tmp_path / "cache")
    ids, weights = documents(prepared)[0]
    message = {"role": "user", "content": "", "instruction": rows[0]["instruction"], "input": rows[0]["input"]}
    assert encode_prompt([message], prepared.tokenizer) == ids[: weights.index(1.0)]


def test_every_form_and_file_kind_gives_the_same_documents(tmp_path: Path, tokenizer: Any) -> None:
    import datasets

    pairs = [(f"question {n}", f"answer {n}") for n in range(20)]
    forms: dict[str, list[dict[str, Any]]] = {
        "alpaca": [{"instruction": q, "output": a} for q, a in pairs],
        "messages": [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in pairs
        ],
        "sharegpt": [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in pairs],
        "completion": [{"prompt": q, "completion": a} for q, a in pairs],
    }
    expected = None
    for form, rows in forms.items():
        table = datasets.Dataset.from_list(rows)
        files = [write_rows(tmp_path / f"{form}.json", rows), write_rows(tmp_path / f"{form}.jsonl", rows)]
        files.append(tmp_path / f"{form}.parquet")
        table.to_parquet(files[-1])
        table.save_to_disk(tmp_path / form)
        files.append(tmp_path / form)
        if form in ("alpaca", "completion"):
            files.append(tmp_path / f"{form}.csv")
            table.to_csv(files[-1])
        for file in files:
            prepared = prepare(options(file, template="chatml"), tokenizer, cache=tmp_path / "cache")
            assert prepared.account.sources[0].format == form
            found = sorted(documents(prepared))
            expected = expected or found
            assert found == expected, file


def test_bad_rows_are_named_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "rows.jsonl"
    good = [json.dumps(row) for row in alpaca_rows(3)]
    file.write_bytes(
        "\n".join([good[0], "{broken", good[1], '{"instruction": "a", "output": 3}', "", good[2]]).encode()
        + b'\n{"instruction": "\xff", "output": "x"}\n{"instruction": "cut'
    )
    with pytest.raises(DataError) as refused:
        prepare(options(file), tokenizer, cache=tmp_path / "cache")
    message = str(refused.value)
    for line in (2, 4, 7, 8):
        assert f"{file}:{line}: " in message
    prepared = prepare(options(file, on_bad_row="skip"), tokenizer, cache=tmp_path / "cache")
    account = prepared.account.total
    assert (account.rows_read, account.rows_train, account.rows_bad) == (7, 3, 4)
    listed = [json.loads(line) for line in Path(prepared.account.bad_rows_file).read_text().splitlines()]
    assert [(row["row"], row["kind"]) for row in listed] == [
        (2, "invalid_json"),
        (4, "wrong_type"),
        (7, "invalid_utf8"),
        (8, "truncated"),
    ]


def test_over_length_policies(tmp_path: Path, tokenizer: Any) -> None:
    rows = [*alpaca_rows(40, lambda n: 5), {"instruction": "long", "input": "", "output": "fox " * 400 + "end"}]
    file = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match="1 of 41 rows are longer than 256 tokens"):
        prepare(options(file, max_length=256), tokenizer, cache=tmp_path / "cache")
    for policy in ("drop", "truncate", "split"):
        changes = {"max_length": 256, "over_length": policy}
        if policy != "split":
            with pytest.raises(DataError, match="would lose"):
                prepare(options(file, **changes), tokenizer, cache=tmp_path / "cache")
        prepared = prepare(options(file, max_loss=1.0, **changes), tokenizer, cache=tmp_path / "cache")
        account = prepared.account.total
        assert account.tokens.read == account.tokens.packed + account.tokens.cut
        assert account.tokens.packed == prepared.train.num_tokens
        assert account.rows_dropped == (policy == "drop")
        assert account.turns_without_end == {"drop": 0, "truncate": 1, "split": account.turns_without_end}[policy]
        if policy == "split":
            assert account.tokens.cut == 0
            assert account.turns_without_end >= 1
        found = documents(prepared)
        assert sum(np.count_nonzero(weights) for _, weights in found) == account.supervised.packed


def test_validation_is_a_share_that_holds_no_training_row(tmp_path: Path, tokenizer: Any) -> None:
    rows = alpaca_rows(60) + alpaca_rows(30)
    file = write_rows(tmp_path / "a.jsonl", rows)

    def sides(seed: int) -> tuple[set[bytes], set[bytes]]:
        prepared = prepare(options(file, validation=0.1), tokenizer, seed=seed, cache=tmp_path / "cache")
        assert prepared.validation is not None
        assert 9 <= prepared.account.total.rows_validation <= 10
        assert prepared.account.total.rows_duplicate == 30
        train, validation = (
            {
                data.source.tokens(int(document)).tobytes()
                for index in range(data.num_packs)
                for document in data.pack(index).documents
            }
            for data in (prepared.train, prepared.validation)
        )
        assert not train & validation
        return train, validation

    assert sides(0) == sides(0)
    assert sides(0) != sides(1)


def test_validation_sources_of_their_own(tmp_path: Path, tokenizer: Any) -> None:
    rows = alpaca_rows(60)
    train, more = write_rows(tmp_path / "a.jsonl", rows[:40]), write_rows(tmp_path / "b.json", rows[40:45])
    held = write_rows(tmp_path / "held.jsonl", [*rows[45:60], *rows[:4]])
    held.write_text(held.read_text() + '{"instruction": "no answer"}\n')
    own = options(train, more, validation=(Source(path=str(held), weight=3.0),), on_bad_row="skip")
    prepared = prepare(own, tokenizer, cache=tmp_path / "cache")
    assert prepared.validation is not None
    account = prepared.account
    assert [(source.name, source.role) for source in account.sources] == [
        (str(train), "train"),
        (str(more), "train"),
        (str(held), "validation"),
    ]
    kept = account.sources[2]
    assert (kept.rows_read, kept.rows_train, kept.rows_validation, kept.rows_bad) == (20, 0, 19, 1)
    assert kept.rows_left_out == kept.tokens.repeated == kept.tokens.train == 0, "weights are for training"
    assert account.rows_in_both == 4
    assert account.validation is not None
    assert kept.tokens.validation == account.validation.tokens == prepared.validation.num_tokens
    assert kept.supervised.validation == account.validation.supervised == prepared.validation.supervised_tokens
    assert account.total.rows_train == 45 == prepared.train.num_documents
    assert account.total.tokens.train == prepared.train.num_tokens

    def files(data: PackedDataset) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for index in range(data.num_packs):
            for document in data.pack(index).documents.tolist():
                file, row = data.where(document)
                found.setdefault(file, set()).add(row)
        return found

    assert files(prepared.train) == {str(train): {*range(1, 41)}, str(more): {*range(1, 6)}}
    assert files(prepared.validation) == {str(held): {*range(1, 20)}}
    text = " ".join(
        str(prepared.tokenizer.decode(prepared.validation.pack(n).input_ids))
        for n in range(prepared.validation.num_packs)
    )
    assert all(row["instruction"] in text for row in rows[45:60])


def test_validation_sources_without_a_usable_row(tmp_path: Path, tokenizer: Any) -> None:
    train = write_rows(tmp_path / "a.jsonl", alpaca_rows(5))
    held = write_rows(tmp_path / "held.jsonl", [{"instruction": "a", "output": " "}])
    own = options(train, validation=(Source(path=str(held)),), on_bad_row="skip")
    with pytest.raises(DataError, match="no row is left to validate on"):
        prepare(own, tokenizer, cache=tmp_path / "cache")


def test_ambiguous_rows_name_the_choices(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{**row, "text": "all of it"} for row in alpaca_rows(3)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match=r"several forms: alpaca, text.*(?s:.*)format: alpaca\} \(or text\)"):
        prepare(options(file), tokenizer, cache=tmp_path / "cache")
    one = Data(train=(Source(path=str(file), format="text"),), max_length=512)
    assert prepare(one, tokenizer, cache=tmp_path / "cache").account.template == "plain"


def test_all_problems_of_sources_come_together(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    odd = write_rows(tmp_path / "odd.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(UserError) as refused:
        prepare(options(tmp_path / "empty.jsonl", tmp_path / "gone.json", odd), tokenizer, cache=tmp_path / "cache")
    assert len(refused.value.problems) == 3
    mapped = Source(path=str(odd), columns={"instruction": "question", "output": "answer"})
    prepared = prepare(Data(train=(mapped,), max_length=512), tokenizer, cache=tmp_path / "cache")
    assert prepared.account.sources[0].format == "alpaca"


def test_unpacked_is_one_document_per_pack(tmp_path: Path, tokenizer: Any) -> None:
    file = write_rows(tmp_path / "a.jsonl", alpaca_rows(12))
    prepared = prepare(options(file, pack=False), tokenizer, cache=tmp_path / "cache")
    assert prepared.train.num_packs == prepared.train.num_documents == 12


def test_new_special_tokens_are_reported(tmp_path: Path, tokenizer: Any) -> None:
    file = write_rows(tmp_path / "a.jsonl", alpaca_rows(3))
    prepared = prepare(options(file, template="chatml"), tokenizer, cache=tmp_path / "cache")
    assert prepared.account.added_tokens == ("<|im_start|>", "<|im_end|>")
    assert len(prepared.tokenizer) == len(tokenizer) + 2
    end = prepared.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert prepared.stop_tokens == (end, tokenizer.eos_token_id)
    for ids, weights in documents(prepared):
        assert [t for t, w in zip(ids, weights, strict=True) if w][-1] == end


def test_another_token_may_end_a_text_and_tokens_be_added(tmp_path: Path, tokenizer: Any) -> None:
    file = write_rows(tmp_path / "a.jsonl", [{"text": "This <a>that."}])
    given = options(file, eos_token="<|im_end|>", added_tokens=("<a>", "<|endoftext|>"))
    prepared = prepare(given, tokenizer, cache=tmp_path / "cache")
    own = prepared.tokenizer
    assert (own.eos_token, tokenizer.eos_token) == ("<|im_end|>", "<|endoftext|>")
    assert prepared.account.added_tokens == ("<a>", "<|im_end|>")
    assert len(own) == len(tokenizer) + 2
    assert prepared.stop_tokens == (own.eos_token_id,)
    ((ids, _),) = documents(prepared)
    said = [*tokenizer("This ")["input_ids"], len(tokenizer), *tokenizer("that.")["input_ids"], len(tokenizer) + 1]
    assert ids == said
    same = prepare(options(file), tokenizer, cache=tmp_path / "cache")
    assert same.tokenizer.eos_token == "<|endoftext|>"
    assert same.train.path != prepared.train.path


@pytest.mark.parametrize("pack", [True, False])
def test_documents_may_keep_the_order_in_which_they_are_given(pack: bool, tmp_path: Path, tokenizer: Any) -> None:
    sizes = np.random.default_rng(0).integers(1, 60, 40).tolist()
    first = write_rows(tmp_path / "b.jsonl", [{"text": f"{n} " + "x" * size} for n, size in enumerate(sizes)])
    second = write_rows(tmp_path / "a.jsonl", [{"text": f"{n + 40}" * 30} for n in range(10)])
    settings = {"pack": pack, "max_length": 48, "over_length": "split", "template": "plain"}
    given = prepare(options(first, second, order="given", **settings), tokenizer, cache=tmp_path / "cache").train
    shuffled = prepare(options(first, second, **settings), tokenizer, cache=tmp_path / "cache").train

    def trained(data: PackedDataset, positions: range) -> list[tuple[int, int]]:
        packs = [data.pack(data.pack_at(position, 0)) for position in positions]
        return [one for pack in packs for one in zip(pack.documents.tolist(), pack.starts.tolist(), strict=True)]

    epoch = trained(given, range(given.num_packs))
    assert epoch == sorted(epoch)
    assert len({document for document, _ in epoch}) == 50
    assert trained(given, range(given.num_packs, 2 * given.num_packs)) == epoch, "and so in every epoch"
    assert given.first_packs(2 * given.num_packs, 0).tolist() == [*range(given.num_packs)] * 2
    assert sorted(trained(shuffled, range(shuffled.num_packs))) == epoch != trained(shuffled, range(shuffled.num_packs))
    assert shuffled.first_packs(9, 5).tolist() == [shuffled.pack_at(position, 5) for position in range(9)]


WRITTEN = """{%- for m in messages -%}
{%- if m['role'] == 'user' -%}{{- 'Q: ' + m['content'] + '\\nA:' -}}{%- else -%}{{- m['content'] + eos_token -}}
{%- endif -%}{%- endfor -%}"""


@pytest.mark.parametrize("begins", [False, True])
def test_a_template_may_stand_in_the_config(begins: bool, tmp_path: Path) -> None:
    own = make_tokenizer(("<s>",))
    if begins:
        own.bos_token = "<s>"
        own.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", own.bos_token_id)]
        )
    file = write_rows(tmp_path / "a.jsonl", [{"instruction": "Which?", "output": "This."}])
    said = {}
    for name, text in {"as it is": WRITTEN, "begun": "{{- text_start -}}" + WRITTEN}.items():
        prepared = prepare(options(file, template=text), own, cache=tmp_path / "cache")
        assert prepared.account.template == "written out"
        (ids, _), *_ = documents(prepared)
        said[name] = own.decode(ids)
        messages = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}]
        assert prepared.tokenizer.apply_chat_template(messages, tokenize=False) == said[name]
    plain = "Q: Which?\nA:This.<|endoftext|>"
    assert said == {"as it is": plain, "begun": "<s>" * begins + plain}


def test_a_template_that_never_closes_a_turn_is_refused(tmp_path: Path) -> None:
    open_ended = make_tokenizer()
    open_ended.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    file = write_rows(tmp_path / "a.jsonl", alpaca_rows(3))
    with pytest.raises(UserError, match="never closes"):
        prepare(options(file), open_ended, cache=tmp_path / "cache")


def test_mixture(tmp_path: Path, tokenizer: Any) -> None:
    first = write_rows(tmp_path / "a.jsonl", alpaca_rows(40))
    second = write_rows(tmp_path / "b.jsonl", [{**row, "instruction": "other"} for row in alpaca_rows(40)])
    sources = (Source(path=str(first), weight=2.5), Source(path=str(second), weight=0.25))
    account = prepare(Data(train=sources, max_length=512), tokenizer, cache=tmp_path / "cache").account
    assert account.train.documents == 100 + 10
    assert [source.rows_left_out for source in account.sources] == [0, 30]
    shares = (Source(path=str(first), weight=3), Source(path=str(second), weight=1))
    account = prepare(Data(train=shares, max_length=512, mixture="tokens"), tokenizer, cache=tmp_path / "cache").account
    tokens = [source.tokens.train for source in account.sources]
    assert tokens[0] / sum(tokens) == pytest.approx(0.75, abs=0.02)
    assert sum(tokens) == pytest.approx(account.total.tokens.read, rel=0.02)


def test_a_change_of_length_needs_no_tokenising(tmp_path: Path, tokenizer: Any) -> None:
    file = write_rows(tmp_path / "a.jsonl", alpaca_rows(20))
    prepare(options(file), tokenizer, cache=tmp_path / "cache")
    stages: list[str] = []
    prepare(
        options(file, max_length=700), tokenizer, cache=tmp_path / "cache", progress=lambda w, d, t: stages.append(w)
    )
    assert set(stages) == {"pack"}
    stages.clear()
    prepare(options(file), tokenizer, cache=tmp_path / "cache", progress=lambda w, d, t: stages.append(w))
    assert stages == []
    file.write_text(file.read_text() + json.dumps(alpaca_rows(21)[-1]) + "\n")
    prepare(options(file), tokenizer, cache=tmp_path / "cache", progress=lambda w, d, t: stages.append(w))
    assert set(stages) == {"tokenise", "pack"}


@pytest.mark.parametrize(("first", "kept"), [(7, 7), (0.25, 5), (100, 20)])
def test_only_the_first_rows_of_a_source_are_trained_on(
    first: float, kept: int, tmp_path: Path, tokenizer: Any
) -> None:
    rows = alpaca_rows(20)
    file = write_rows(tmp_path / "a.json", rows)
    source = Source(path=str(file), first=first)
    prepared = prepare(Data(train=(source,), max_length=512), tokenizer, cache=tmp_path / "cache")
    said = [tokenizer.decode([t for t, w in zip(*one, strict=True) if w][:-1]) for one in documents(prepared)]
    assert sorted(said) == sorted(row["output"] for row in rows[:kept])
    account = prepared.account.total
    assert (account.rows_read, account.rows_train, account.rows_left_out) == (20, kept, 20 - kept)


def test_short_rows_are_left_out_and_count_as_nothing_lost(tmp_path: Path, tokenizer: Any) -> None:
    file = write_rows(tmp_path / "a.json", alpaca_rows(20))
    whole = prepare(options(file, max_loss=0.0), tokenizer, cache=tmp_path / "cache")
    lengths = sorted(len(ids) for ids, _ in documents(whole))
    least = lengths[12]
    assert lengths[0] < least
    kept = prepare(options(file, max_loss=0.0, min_length=least), tokenizer, cache=tmp_path / "cache")
    assert sorted(len(ids) for ids, _ in documents(kept)) == [length for length in lengths if length >= least]
    account = kept.account.total
    assert account.rows_train + account.rows_left_out == account.rows_read == 20
    with pytest.raises(UserError, match=r"(?s)no row is left to train on.*a smaller data\.min_length"):
        prepare(options(file, min_length=512), tokenizer, cache=tmp_path / "cache")


def test_the_first_rows_are_taken_before_a_validation_fraction(tmp_path: Path, tokenizer: Any) -> None:
    file = write_rows(tmp_path / "a.json", alpaca_rows(20))
    given = Data(train=(Source(path=str(file), first=10),), max_length=512, validation=0.2)
    account = prepare(given, tokenizer, cache=tmp_path / "cache").account.total
    assert (account.rows_train, account.rows_validation, account.rows_left_out) == (8, 2, 10)


@pytest.mark.parametrize(
    ("split", "said"), [("train[:20%]", "split: train, first: 0.2"), ("train[:100%]", "split: train")]
)
def test_a_part_of_a_split_is_refused_with_what_says_the_same(
    split: str, said: str, tmp_path: Path, tokenizer: Any
) -> None:
    source = Source(path="someone/rows", split=split)
    with pytest.raises(UserError, match=f"set {re.escape(said)}$"):
        prepare(Data(train=(source,)), tokenizer, cache=tmp_path / "cache")


def test_what_stands_between_instruction_and_input_may_be_said(tmp_path: Path, tokenizer: Any) -> None:
    file = write_rows(tmp_path / "a.json", [{"instruction": "Add.", "input": "1 2", "output": "3"}])
    given = Data(train=(Source(path=str(file), between="|"),), template="chatml")
    ids, _ = documents(prepare(given, tokenizer, cache=tmp_path / "cache"))[0]
    assert "Add.|1 2" in tokenizer.decode(ids)
