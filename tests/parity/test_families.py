"""Families, sharded over two ranks (ZeRO 3): two steps each, against plain transformers on the same documents."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from plain import metrics, plain_loop
from transformers import (
    BloomConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    OlmoConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from forked import train
from tiny import alpaca_rows, write_model, write_rows
from tonnage.decide.decision import Decision, decide
from tonnage.decide.written import write_run
from tonnage.rundir.directory import RunDirectory

VOCABULARY = 264
"""Some families' own tokenizer classes add special tokens to the one given."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 257,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, PreTrainedConfig] = {
    "gpt-neox": GPTNeoXConfig(**SHAPE),
    "llama": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "mistral": MistralConfig(**GROUPED, sliding_window=9),
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**GROUPED),
    "gemma2": Gemma2Config(**GROUPED, sliding_window=9, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**GROUPED, sliding_window=9, query_pre_attn_scalar=8),
    "phi": PhiConfig(**SHAPE),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        pad_token_id=257,
        bos_token_id=256,
        eos_token_id=256,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "olmo": OlmoConfig(**SHAPE),
    "lfm2, convolutions": Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
    "qwen3.5, a recurrence": Qwen3_5TextConfig(
        **GROUPED,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "mamba2": Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=2,
        chunk_size=16,
        pad_token_id=257,
        bos_token_id=256,
        eos_token_id=256,
    ),
    "falcon-h1, both in a block": FalconH1Config(
        **GROUPED, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=16
    ),
    "bloom, no attention of ours": BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        pad_token_id=257,
        bos_token_id=256,
        eos_token_id=256,
    ),
}
FEW = ("gpt-neox", "gemma3", "lfm2, convolutions")
"""One of each kind: parallel residuals; grouped heads, windows and several norms a block; and of padded rows, for a
convolution."""
REST = tuple(family for family in FAMILIES if family not in FEW)
PADDED = tuple(list(FAMILIES)[-5:])
STEPS = 2


def decided(folder: Path, family: str, tiles: int) -> Decision:
    text = {
        "model": str(folder / family),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": 128,
            "template": "plain",
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 4},
        "steps": STEPS,
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 0},
        "precision": "fp32",
        "memory": {"zero": 3, "recompute": "selective", "micro_batch": 1, "tiles": tiles},
        "launch": {"workers": 2, "threads": 1},
        "track": [],
        "output": str(folder / f"run-{family}"),
        "seed": 1,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(text))
    decision = decide(str(path), [])
    write_run(RunDirectory(decision.config.output), decision)
    return decision


def trained(tmp_path_factory: pytest.TempPathFactory, families: Iterable[str], tiles: int = 1) -> dict[str, Decision]:
    folder = tmp_path_factory.mktemp("families")
    write_rows(folder / "rows.jsonl", alpaca_rows(60))
    for family in families:
        write_model(folder / family, FAMILIES[family])
    made = {family: decided(folder, family, tiles) for family in families}
    runs = [RunDirectory(decision.config.output) for decision in made.values()]
    train((2, runs))
    return made


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decision]:
    return trained(tmp_path_factory, REST)


@pytest.fixture(scope="module")
def in_tiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decision]:
    return trained(tmp_path_factory, tuple(FAMILIES), tiles=5)


@pytest.mark.slow
def test_two_steps_equal_plain_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    for decision in trained(tmp_path_factory, FEW).values():
        compare(decision)


@pytest.mark.matrix
@pytest.mark.parametrize("family", REST)
def test_two_steps_of_the_rest_equal_plain_transformers(family: str, rest: dict[str, Decision]) -> None:
    compare(rest[family])


@pytest.mark.matrix
def test_two_steps_in_tiles_equal_plain_transformers(in_tiles: dict[str, Decision]) -> None:
    """No layer is looked at but by its own forward pass: of a weight in tiles there is nothing else to see."""
    for decision in in_tiles.values():
        assert "weights in tiles" in RunDirectory(decision.config.output).log.read_text()
        compare(decision)


def compare(decision: Decision) -> None:
    plain, _ = plain_loop(decision)
    family = decision.config.model.rpartition("/")[2]
    assert decision.plan.layout.arrangement == ("padded" if family in PADDED else "packed")
    ours = metrics(RunDirectory(decision.config.output))
    assert len(ours) == STEPS
    for step, want in zip(ours, plain, strict=True):
        assert step["loss"] == pytest.approx(want["loss"], rel=1e-4)
        assert step["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    assert ours[1]["loss"] != ours[0]["loss"]
