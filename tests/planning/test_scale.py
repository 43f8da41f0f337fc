"""Plans for hundreds of devices, beside what the real ``parallelize`` holds there and what shapes of the field need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, PreTrainedConfig

from forked import work
from planning.profiles import layout
from tonnage.decide.plans import suppose
from tonnage.errors import UserError
from tonnage.planning.layout import Layout
from tonnage.planning.machine import parse_hardware
from tonnage.planning.states import states
from tonnage.training.weigh import Conditions, weigh

LLAMA_2_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "architectures": ["LlamaForCausalLM"],
}
SETTINGS = [(8, 0, 1), (8, 3, 1), (64, 1, 1), (64, 3, 1), (16, 0, 8), (256, 3, 4)]
"""Ranks, ZeRO stage, and how many compute every block together."""


def layout_of(size: int, zero: int, tensor: int) -> Layout:
    replicate = size // tensor if zero == 0 else 1
    return layout(workers=size, replicate=replicate, tensor=tensor, zero=zero, recompute="full", micro_batches=1)


def check_states(folder: Path, config: PreTrainedConfig, settings: list[tuple[int, int, int]]) -> None:
    """Planned against held by the real ``parallelize`` on fake ranks: (ranks, ZeRO stage, tensor)."""
    config.save_pretrained(folder)
    words = (":".join(map(str, setting)) for setting in settings)
    held = json.loads(work("planning.fake_ranks", (1, [str(folder), *words])))
    parts = {tensor: weigh(config, None, Conditions(tensor=tensor)) for tensor in {setting[2] for setting in settings}}
    for setting, found in zip(settings, held, strict=True):
        planned = states(layout_of(*setting), parts[setting[2]])
        assert planned.weights == pytest.approx(found["Sharded Param"], rel=1e-3)
        assert planned.gradients == pytest.approx(found["Sharded Grad"], rel=1e-3)
        assert planned.optimizer == pytest.approx(found["OptState"], rel=1e-3)


@pytest.mark.matrix
def test_states_are_those_of_the_real_model_on_up_to_256_ranks(tmp_path: Path) -> None:
    check_states(tmp_path, LlamaConfig(**LLAMA_2_70B, num_hidden_layers=2), SETTINGS)


def shape(folder: Path, hidden: int, blocks: int, heads: int) -> str:
    config = GPTNeoXConfig(
        architectures=["GPTNeoXForCausalLM"],
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        vocab_size=51200,
        max_position_embeddings=2048,
    )
    config.save_pretrained(folder)
    return str(folder)


LARGE = ["batch.sequences=1024", "data.max_length=2048"]


@pytest.mark.matrix
def test_175b_fits_where_its_states_do(tmp_path: Path) -> None:
    words = [*LARGE, "parallel.tensor=auto"]
    shape_175b = shape(tmp_path, 12288, 96, 96)
    settings = []
    for num_nodes in (8, 128):
        plan = suppose(shape_175b, words, parse_hardware(f"{num_nodes}x8xH100"))
        assert plan.layout.workers == num_nodes * 8
        assert plan.choice.peak_bytes <= plan.budget.usable
        assert plan.layout.tensor <= 8
        assert plan.model.num_parameters == pytest.approx(175e9, rel=0.01)
        settings.append((plan.layout.workers, plan.layout.zero, plan.layout.tensor))
    config = AutoConfig.from_pretrained(shape_175b)
    config.num_hidden_layers = 2
    check_states(tmp_path / "two blocks", config, settings)


@pytest.mark.matrix
def test_175b_in_stages_and_1t_fit_where_their_states_do(tmp_path: Path) -> None:
    words = [*LARGE, "parallel.tensor=auto", "parallel.pipeline=auto"]
    plan = suppose(shape(tmp_path, 12288, 96, 96), words, parse_hardware("128x8xH100"))
    assert plan.choice.peak_bytes <= plan.budget.usable
    assert plan.layout.tensor <= 8
    assert plan.layout.pipeline > 1
    assert len(plan.layout.stages) == plan.layout.pipeline

    trillion = shape(tmp_path, 25600, 128, 160)
    whole = [*LARGE, "memory.tiles=1"]
    with pytest.raises(UserError, match="weights"):  # 63 of 80 GB are a worker's part of them
        suppose(trillion, whole, parse_hardware("8x8xH100"))
    with pytest.raises(UserError, match=r"gathered 3\d"):  # blocks of 7.8B: two gathered, one reduced in fp32
        suppose(trillion, whole, parse_hardware("128x8xH100"))
    for nodes in (8, 128):
        assert suppose(trillion, LARGE, parse_hardware(f"{nodes}x8xH100")).layout.tiles > 1
    assert suppose(trillion, LARGE, parse_hardware("128x8xH200")).model.num_parameters == pytest.approx(1e12, rel=0.02)


@pytest.mark.slow
def test_activations_of_gpt_2_as_the_zero_paper_counts_them_and_ours() -> None:
    """1.5B parameters, 32 sequences of 1,024: "about 60 GB", "about 8 GB" with checkpoints (section 3.2)."""
    hidden, blocks, heads, length, sequences = 1600, 48, 25, 1024, 32
    tokens = sequences * length
    classic_block = 2 * 12 * hidden * tokens
    scores = 2 * heads * length * tokens
    inputs = 2 * hidden * tokens * blocks
    assert blocks * classic_block == pytest.approx(60e9, rel=0.01)
    assert inputs + classic_block + scores == pytest.approx(8e9, rel=0.01)

    model = weigh(
        GPT2Config(n_embd=hidden, n_layer=blocks, n_head=heads, n_positions=length, architectures=["GPT2LMHeadModel"]),
        None,
        Conditions(document_tokens=length),
    )
    # Recomputed: the same inputs of blocks; no scores, but GELU's eager parts while one block is recomputed.
    full = model.blocks["full"]
    assert blocks * full.saved(tokens) == pytest.approx(inputs, rel=1e-3)
    assert blocks * full.saved(tokens) + full.backward_bare_peak(tokens) == pytest.approx(8e9, rel=0.1)
    # The outputs of products kept, all between them recomputed: 11 numbers of the hidden size for the paper's 12.
    assert blocks * model.blocks["selective"].saved(tokens) == pytest.approx(blocks * classic_block * 11 / 12, rel=0.01)
    # Kept as the model is written: the paper's 12, and 16 more because GELU is eight operations.
    assert blocks * model.blocks["none"].saved(tokens) == pytest.approx(blocks * classic_block * 28 / 12, rel=0.01)
