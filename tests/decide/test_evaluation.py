"""Evaluation of a model directory against plain transformers, document by document."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, PreTrainedConfig

import tiny
from tonnage.data import DataOptions, Source, prepare
from tonnage.decide.evaluation import Evaluation, evaluate_model
from tonnage.model.files import find_model, read_tokenizer
from tonnage.training.building import assemble_model

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


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_each_document_alone(name: str, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", MODELS[name])
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.alpaca_rows(12))
    found = evaluate_model(str(model), [str(rows)], max_length=400, precision="fp32")

    options = DataOptions(train=(Source(str(rows)),), max_length=400, pack=False)
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
    assert found.figures().keys() == {"loss", "perplexity", "supervised_tokens"}


def test_no_answer_at_all_is_no_number() -> None:
    assert math.isnan(Evaluation(1.0, 5, answers=0).figures()["exact_match"])
    assert Evaluation(1.0, 5, answers=4, exact=1).figures()["exact_match"] == 0.25


def test_the_model_of_the_loss_is_gone_when_answers_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the two may not fit beside each other."""
    model = tiny.write_model(tmp_path / "model", MODELS["documents packed"])
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.alpaca_rows(3))
    there = list[weakref.ref[Any]]()

    def assemble(*given: Any, **more: Any) -> Any:
        found = assemble_model(*given, **more)
        there.append(weakref.ref(found.loss_model))
        return found

    def answer(*_: Any, **__: Any) -> tuple[int, int]:
        assert [one() for one in there] == [None]
        return 0, 3

    monkeypatch.setattr("tonnage.decide.evaluation.assemble_model", assemble)
    monkeypatch.setattr("tonnage.decide.evaluation.exact_match", answer)
    assert evaluate_model(str(model), [str(rows)], max_length=400, answers=3).answers == 3
