"""A tokenizer that is not the model's: found, checked, trained with and exported, as if it lay beside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import tonnage
from tiny import alpaca_rows, byte_tokenizer, llama_config, write_model, write_rows
from tonnage.errors import UserError

SETTINGS: dict[str, Any] = {"steps": 2, "batch": {"sequences": 2}, "launch": {"threads": 1}, "precision": "fp32"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without a tokenizer, a tokenizer, and rows."""
    write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    for path in (tmp_path / "model").glob("tokenizer*"):
        path.unlink()
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(8))
    return tmp_path


def data(folder: Path) -> dict[str, Any]:
    return {"train": str(folder / "rows.jsonl"), "max_length": 512, "template": "plain"}


def test_it_is_found_and_what_is_none_is_refused(folder: Path) -> None:
    model, output = folder / "model", folder / "run"
    with pytest.raises(UserError, match="no tokenizer files"):
        tonnage.plan(model, data(folder), output=output, **SETTINGS)
    with pytest.raises(UserError, match="no tokenizer files"):
        tonnage.plan(model, data(folder), output=output, tokenizer=str(model), **SETTINGS)
    with pytest.raises(UserError, match="no tokenizer directory"):
        tonnage.plan(model, data(folder), output=output, tokenizer=str(folder / "none"), **SETTINGS)
    plan = tonnage.plan(model, data(folder), output=output, tokenizer=str(folder / "tokenizer"), **SETTINGS)
    assert plan.num_steps == 2


@pytest.mark.slow
@pytest.mark.matrix
def test_the_export_has_it_and_a_run_goes_on(folder: Path) -> None:
    settings = {**SETTINGS, "tokenizer": str(folder / "tokenizer"), "checkpoint": {"every": 1}}
    run = tonnage.train(folder / "model", data(folder), output=folder / "run", **settings)
    own = AutoTokenizer.from_pretrained(run.export)
    assert own("What?")["input_ids"] == byte_tokenizer()("What?")["input_ids"]
    assert run.resume(from_step=1).steps[-1].step == 2
