"""Positions that the config scales: five steps, and what is exported, beside plain transformers told the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from plain import metrics, plain_loop
from ready import of_families, run_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig

from forked import train
from selected import arguments_that_run
from tiny import byte_tokenizer, llama_config
from tonnage.decide.decision import Decision
from tonnage.decide.exports import export_checkpoint
from tonnage.decide.handing import Wishes
from tonnage.errors import UserError
from tonnage.inference.generate import load

POSITIONS = 32
"""Of the tiny models: a fraction of ``max_length``."""
FAMILIES: dict[str, Any] = {
    "llama": llama_config(initializer_range=0.2, max_position_embeddings=POSITIONS),
    "gemma3": Gemma3TextConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=9,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.2,
        max_position_embeddings=POSITIONS,
        pad_token_id=257,
        bos_token_id=256,
        eos_token_id=256,
    ),
}
TYPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "yarn": (
        {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 1.3,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "theta": 500.0,
        },
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 1.3,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "rope_theta": 500.0,
        },
    ),
    "linear": ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        {"type": "llama3", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": POSITIONS,
        },
    ),
    "another base": ({"type": "default", "factor": 4.0, "theta": 1e6}, {"rope_type": "default", "rope_theta": 1e6}),
}
"""What the config says, and what transformers is told."""
CASES = [*(("llama", name) for name in TYPES), ("gemma3", "yarn")]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decision]:
    return of_families(
        tmp_path_factory.mktemp("rope"),
        write_family,
        sequences=4,
        steps=5,
        optimizer={"lr": 1e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 0, "eps": 1e-5},
    )


def write_family(family: str, directory: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)


def told(folder: str, told_of: dict[str, Any]) -> Any:
    """A configuration of transformers with other positions, as its users write them."""
    config = AutoConfig.from_pretrained(folder)
    rope = copy.deepcopy(config.rope_parameters)
    rope.get("full_attention", rope).update(told_of)
    return type(config).from_dict(config.to_dict() | {"rope_parameters": rope, "max_position_embeddings": 128})


def logits(model: Any) -> Tensor:
    ids = torch.arange(96).remainder(250)[None] * 7 % 250
    with torch.no_grad():
        out: Tensor = model(input_ids=ids).logits
    return out


@pytest.fixture(scope="module")
def runs(write: Callable[..., Decision], request: pytest.FixtureRequest) -> dict[tuple[str, str], Decision]:
    cases = arguments_that_run(request, "family", "name")
    made = {(family, name): write(family, rope=TYPES[name][0]) for family, name in CASES if (family, name) in cases}
    train((1, map(run_of, made.values())))
    return made


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "name"), CASES)
def test_steps_and_export_are_those_of_transformers(
    runs: dict[tuple[str, str], Decision], tmp_path: Path, family: str, name: str
) -> None:
    decision = runs[family, name]
    assert max(decision.prepared.train.pack(0).lengths.tolist()) > POSITIONS
    folder = decision.config.model

    def scaled(_: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, config=told(folder, TYPES[name][1]), dtype=torch.float32)

    steps, weights = plain_loop(decision, scaled)
    as_it_is = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not torch.allclose(logits(scaled(None)), logits(as_it_is), atol=1e-2), "a scaling that shows"
    for got, step in zip(metrics(run_of(decision)), steps, strict=True):
        assert got["loss"] == pytest.approx(step["loss"], rel=1e-6)
        assert got["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-5)
    export_checkpoint(run_of(decision), tmp_path / "export", wishes=Wishes(dtype="fp32"))
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    last = scaled(None)
    last.load_state_dict(weights, strict=False)
    last.tie_weights()
    assert torch.allclose(logits(read), logits(last), rtol=1e-5, atol=1e-4)
    assert read.config.max_position_embeddings == 128


@pytest.mark.matrix
def test_an_adapter_brings_the_positions_of_its_model(write: Callable[..., Decision], tmp_path: Path) -> None:
    run = run_of(write("llama", rope=TYPES["yarn"][0], adapter={"rank": 4}))
    train((1, [run]))
    export_checkpoint(run, tmp_path / "adapter")
    export_checkpoint(run, tmp_path / "merged", wishes=Wishes(merge=True, dtype="fp32"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert merged.config.rope_parameters["rope_type"] == "yarn"
    positions = json.loads((tmp_path / "adapter" / "adapter_positions.json").read_text())
    by_peft = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32, **positions)
    without = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    expected = logits(merged)
    assert not torch.allclose(logits(without), expected, atol=1e-2)
    assert torch.allclose(logits(by_peft), expected, rtol=1e-5, atol=1e-4)
    assert torch.allclose(logits(load(tmp_path / "adapter").model).float(), expected, rtol=1e-5, atol=1e-4)
    assert "adapter_positions.json" in (tmp_path / "adapter" / "README.md").read_text()
    further = write("llama", model=str(tmp_path / "adapter"))  # 96 tokens, of a base that knows 32
    assert further.plan.data.max_length == 96
    with pytest.raises(UserError, match="--merge"):
        export_checkpoint(run, tmp_path / "served", wishes=Wishes(target="vllm"))
