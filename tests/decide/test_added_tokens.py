"""Tokens that a vocabulary gets: rows of their own, trained, exported, merged, and read by PEFT and by ourselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import tonnage
from tiny import alpaca_rows, llama_config, neox_config, write_model, write_rows
from tonnage.config.schema import Data
from tonnage.data import prepare
from tonnage.decide.evaluation import evaluate_model
from tonnage.errors import UserError
from tonnage.inference.generate import load

ADDED, END = ["<|im_start|>", "<extra>"], "<|im_end|>"


SETTINGS: dict[str, Any] = {
    "steps": 2,
    "batch": {"sequences": 2},
    "optimizer": {"lr": 1e-2, "warmup": 0},
    "precision": "fp32",
    "launch": {"threads": 1},
}
WITH_ROWS = {"rank": 4, "alpha": 8, "also": ["embeddings", "head"]}


def data_in(folder: Path, model: Any) -> dict[str, Any]:
    """A model and rows in ``folder``; the section of the rows."""
    write_model(folder / "model", model)
    rows = str(write_rows(folder / "rows.jsonl", alpaca_rows(8)))
    return {"train": rows, "max_length": 512, "template": "chatml", "eos_token": END, "added_tokens": ADDED}


@pytest.mark.parametrize("frozen", [{"adapter": {"rank": 4}}, {"train": ["*layers*"]}, {"train": ["*embed_in*"]}])
def test_rows_that_nobody_would_train_are_refused(frozen: dict[str, Any], tmp_path: Path) -> None:
    data = data_in(tmp_path, neox_config(num_hidden_layers=1))
    with pytest.raises(UserError, match="need 3 more rows") as refused:
        tonnage.plan(tmp_path / "model", data, output=tmp_path / "run", **SETTINGS, **frozen)
    trains = "adapter.also=[embeddings,head]" if "adapter" in frozen else "train=[]"
    assert trains in refused.value.problems[0].change


@pytest.mark.parametrize("control_tokens", ["text", "keep"])
def test_an_evaluation_reads_rows_as_training_did(control_tokens: str, tmp_path: Path) -> None:
    """Tokens that were added are tokens in the words of its rows, too; with ``keep`` so is each other."""
    data = data_in(tmp_path, llama_config(num_hidden_layers=1))
    answers = [f"<extra> is <|im_start|>{number}" for number in range(4)]
    rows = [{"instruction": "a<extra>b", "input": "", "output": answer} for answer in answers]
    data |= {"train": str(write_rows(tmp_path / "rows.jsonl", rows)), "control_tokens": control_tokens}
    trained = prepare(Data.model_validate(data), AutoTokenizer.from_pretrained(tmp_path / "model"))
    write_model(tmp_path / "export", llama_config(num_hidden_layers=1, vocab_size=264))
    trained.tokenizer.save_pretrained(tmp_path / "export")
    evaluation = evaluate_model(str(tmp_path / "export"), [{"path": data["train"]}], max_length=512)
    assert evaluation.supervised_tokens == trained.train.supervised_tokens


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "trained"),
    [
        (neox_config(num_hidden_layers=1), {"adapter": WITH_ROWS}),
        (llama_config(num_hidden_layers=1), {"adapter": WITH_ROWS}),
        (llama_config(num_hidden_layers=1), {"train": ["*embed_tokens*"]}),
    ],
    ids=["untied adapter", "tied adapter", "tied embedding alone"],
)
def test_new_tokens_are_trained_and_exported(model: Any, trained: dict[str, Any], tmp_path: Path) -> None:
    data = data_in(tmp_path, model)
    run = tonnage.train(tmp_path / "model", data, output=tmp_path / "run", **SETTINGS, **trained)
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run.export)
    assert tokenizer.eos_token == END
    ids = torch.tensor([tokenizer.convert_tokens_to_ids([*ADDED, END, "a", "b"])])
    assert ids[0, :3].tolist() == [258, 259, 260]
    old = base.get_input_embeddings().weight.detach().clone()
    if "adapter" in trained:
        command = [sys.executable, "-m", "tonnage", "export", str(tmp_path / "run"), str(tmp_path / "whole"), "--merge"]
        subprocess.run([*command, "--dtype", "fp32"], check=True, capture_output=True, timeout=120)
        base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        adapted: Any = PeftModel.from_pretrained(base, run.export)
        theirs = adapted(ids).logits
        whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
        torch.testing.assert_close(whole(ids).logits, theirs, rtol=1e-4, atol=1e-5)
        loaded: Any = load(run.export)
        ours = loaded.model.cpu()
        torch.testing.assert_close(ours(ids).logits.float(), theirs, rtol=1e-4, atol=1e-5)
    else:
        whole = AutoModelForCausalLM.from_pretrained(run.export, dtype=torch.float32)
    new = whole.get_input_embeddings().weight.detach()
    assert new.shape[0] == len(tokenizer) == 261
    apart = (new[258:] - old.mean(0)).abs().amax(1)
    assert (apart[[0, 2]] > 1e-3).all(), "what rows have was trained, from the mean of the others"
