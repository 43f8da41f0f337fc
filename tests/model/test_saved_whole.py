"""Embeddings and heads that peft has trained whole beside an adapter: one where the model has one, and read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tiny import byte_tokenizer, llama_config, write_model
from tonnage.errors import UserError
from tonnage.inference.generate import load

IDS = torch.arange(40, 80)[None]


def trained_with_peft(folder: Path, tied: bool, whole: list[str], *, rows: int = 0, **more: Any) -> tuple[Any, Any]:
    """A model that peft has adapted and changed, saved in ``folder / "adapter"``, and what it makes of ``IDS``."""
    write_model(folder / "model", llama_config(num_hidden_layers=1, tie_word_embeddings=tied))
    tokenizer: Any = byte_tokenizer()
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
        tokenizer.add_tokens([f"<new {number}>" for number in range(rows - len(tokenizer))])
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=whole, task_type="CAUSAL_LM", **more)
    adapted = get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        adapted.save_pretrained(str(folder / "adapter"))
        tokenizer.save_pretrained(folder / "adapter")
        return adapted, adapted(IDS).logits


@pytest.mark.filterwarnings("ignore")  # peft's, of what it unties
@pytest.mark.parametrize("whole", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_a_tied_pair_that_was_trained_apart_is_refused_with_a_way(whole: list[str], tmp_path: Path) -> None:
    """Peft then computes with two matrices; merged as we say, the model has both."""
    adapted, expected = trained_with_peft(tmp_path, True, whole)
    with pytest.raises(UserError, match=r"trained apart(.|\n)*tie_word_embeddings = False"):
        load(tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    merged.config.tie_word_embeddings = False
    merged.save_pretrained(tmp_path / "merged")
    byte_tokenizer().save_pretrained(tmp_path / "merged")
    ours: Any = load(tmp_path / "merged").model
    torch.testing.assert_close(ours(IDS).logits.float(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
def test_what_peft_writes_twice_of_rows_that_have_grown_is_read_once(tied: bool, tmp_path: Path) -> None:
    whole = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    _, expected = trained_with_peft(tmp_path, tied, whole, rows=264, ensure_weight_tying=tied)
    ours: Any = load(tmp_path / "adapter").model
    torch.testing.assert_close(ours(IDS).logits.float(), expected, rtol=1e-4, atol=1e-4)
