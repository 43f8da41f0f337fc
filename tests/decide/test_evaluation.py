"""Evaluation of a model directory against plain transformers, document by document."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    MistralConfig,
    PreTrainedConfig,
)

import tiny
from forked import work
from tonnage.config import Data, Source
from tonnage.data import prepare
from tonnage.decide import evaluation
from tonnage.decide.evaluation import Answers, Evaluation, Loading, evaluate_model
from tonnage.inference.generate import Decoding, generate, load
from tonnage.model.files import find_model, read_tokenizer

SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
MODELS: dict[str, PreTrainedConfig] = {
    "documents packed": tiny.llama_config(num_hidden_layers=2, initializer_range=0.2),
    "documents that would meet": Lfm2Config(
        **SIZES,
        **HEADS,
        layer_types=["conv", "full_attention"],
        bos_token_id=0,
        eos_token_id=256,
        initializer_range=0.2,
    ),
}


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """What is in dictionaries and lists, by the path to it."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {name: value}
    return {key: one for part, below in value.items() for key, one in flat(below, f"{name}.{part}").items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_each_document_alone(name: str, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", MODELS[name])
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.alpaca_rows(12))
    found = evaluate_model(str(model), [{"path": str(rows)}], max_length=400, loading=Loading("fp32"))

    options = Data(train=(Source(path=str(rows)),), max_length=400, pack=False)
    packs = prepare(options, read_tokenizer(find_model(str(model))), cache=tmp_path / "cache").train
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loss = weight = 0.0
    for number in range(packs.num_packs):
        pack = packs.pack(number)
        ids, weights = torch.from_numpy(pack.input_ids).long(), torch.from_numpy(pack.weights).float()
        with torch.no_grad():
            logits = plain(input_ids=ids[None]).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        loss, weight = loss + float((losses * weights[1:]).sum()), weight + float(weights[1:].sum())
    assert packs.num_packs == 12
    assert found.loss == pytest.approx(loss / weight, rel=1e-5)
    assert found.figures().keys() == {"loss", "perplexity", "token_accuracy", "supervised_tokens"}


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_two_workers_find_what_one_finds(name: str, tmp_path: Path) -> None:
    rows = [row | {"output": row["input"][:1]} for row in tiny.alpaca_rows(13)]
    asked = {
        "model": str(tiny.write_model(tmp_path / "model", MODELS[name])),
        "data": [str(tiny.write_rows(tmp_path / "rows.jsonl", rows))],
        "max_length": 200,
        "answers": {"limit": 9, "max_new_tokens": 12, "scorer": "contains"},
        "loading": {"precision": "fp32"},
        "template": "plain",
    }
    alone, first, second = (
        json.loads(line)
        for num_workers in (1, 2)
        for line in work("decide.evaluating_workers", (num_workers, [json.dumps(asked)])).splitlines()
    )
    assert first == second
    assert first["answers"] == 9
    assert 0 < first["contains"] < 1
    assert flat(first) == pytest.approx(flat(alone), rel=1e-6)


def test_no_answer_at_all_is_no_number() -> None:
    assert math.isnan(Evaluation(1.0, 5, answers=0).figures()["exact_match"])
    assert Evaluation(1.0, 5, answers=4, exact=1).figures()["exact_match"] == 0.25


SOME: dict[str, Any] = {**SIZES, **HEADS, "initializer_range": 0.2}
FAMILIES: dict[str, PreTrainedConfig] = {
    "grouped heads": tiny.llama_config(num_hidden_layers=2, initializer_range=0.2),
    "windows": MistralConfig(**SOME, sliding_window=16),
    "windows and caps": Gemma2Config(**SOME, head_dim=16, sliding_window=24, query_pre_attn_scalar=16),
    "sinks": GptOssConfig(**SOME, head_dim=16, sliding_window=16, num_local_experts=4, num_experts_per_tok=2),
    "absolute positions": GPT2Config(
        vocab_size=300,
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=257,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=512,
        initializer_range=0.2,
    ),
    "documents that would meet": MODELS["documents that would meet"],
}
OFTEN = ("grouped heads", "windows and caps")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.matrix) for name in FAMILIES]
)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.write_model(tmp_path / "model", FAMILIES[name])
    rows = tiny.alpaca_rows(9)
    texts = ("\n\n".join([row["instruction"], row["input"]]) for row in rows)
    asked = [[{"role": "user", "content": text}] for text in texts]
    loaded = load(model, template="plain", formats=("alpaca",))
    said = generate(loaded, asked, Decoding(20), batch_size=1)
    assert len(set(said)) > 3
    for row, one in zip(rows[:6], said, strict=False):
        row["output"] = f"{one} "
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows)
    monkeypatch.setattr(evaluation, "MOST_TOGETHER", 4)  # so that places are taken again
    found = evaluate_model(
        str(model),
        [{"path": str(path)}],
        template="plain",
        answers=Answers(9, 20, "contains"),
        loading=Loading("fp32"),
    )
    assert (found.answers, found.exact) == (9, 6)
    assert found.figures()["contains"] == pytest.approx(6 / 9)
    assert evaluate_model(str(model), [{"path": str(path)}], template="plain", answers=Answers(3, 20)).exact == 3


@pytest.mark.matrix
def test_one_model_is_gone_before_the_next_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that answers by another way than it is judged is loaded twice: never both at a time."""
    model = tiny.write_model(tmp_path / "model", MODELS["documents that would meet"])
    path = tiny.write_rows(tmp_path / "rows.jsonl", tiny.alpaca_rows(4))
    judged, there = list[weakref.ref[Any]](), list[bool]()

    def assembled(*given: Any) -> Any:
        found = as_is(*given)
        judged.extend(weakref.ref(stage) for stage in found[0].stages)
        return found

    def load_then(*given: Any, **named: Any) -> Any:
        there.extend(one() is not None for one in judged)
        return load(*given, **named)

    as_is = evaluation.assembled
    monkeypatch.setattr(evaluation, "assembled", assembled)
    monkeypatch.setattr(evaluation, "load", load_then)
    assert evaluate_model(str(model), [{"path": str(path)}], template="plain", answers=Answers(2, 2)).answers == 2
    assert there == [False]
