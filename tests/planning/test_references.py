"""Figures of others that the planner must reproduce: the ZeRO paper's table, and runs that are known to fit or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.decide.plans import suppose
from tonnage.errors import UserError
from tonnage.planning.machine import parse_hardware
from tonnage.planning.zero_table import classic_bytes, our_bytes, parse_parameters, table

# Rajbhandari et al. 2020, table 1: GB on each device, by number of devices, for stages 1, 2 and 3.
PAPER: dict[float, dict[int, tuple[float, ...]]] = {
    7.5e9: {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
            256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)},
    128e9: {1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32),
            256: (518, 263, 8), 1024: (513, 257, 2)},
    1e12: {1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
           256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)},
}  # fmt: skip


@pytest.mark.parametrize("parameters", PAPER)
def test_the_table_of_the_zero_paper(parameters: float) -> None:
    for row in table(parameters):
        found = [value / 1e9 for value in row.classic[1:]]
        assert found == pytest.approx(
            PAPER[parameters][row.devices], rel=0.025
        )  # the paper rounds, to 2 digits at worst


def test_states_of_the_paper_and_ours() -> None:
    assert classic_bytes(7.5e9, 64, 0) == 120e9
    assert classic_bytes(1.5e9, 1, 0) == 24e9  # GPT-2: 16 bytes a parameter
    assert our_bytes(1.5e9, 1, 0) == 21e9  # the low half of the master instead of all of it
    assert our_bytes(7.5e9, 64, 3) == 16 * 7.5e9 / 64


def test_sizes_are_read_or_refused() -> None:
    assert [parse_parameters(text) for text in ("7.5B", "350m", " 1T ")] == [7.5e9, 350e6, 1e12]
    for text in ("7.5", "B", "-1B", "infB"):
        with pytest.raises(UserError, match=r"7\.5B, 350M or 1T"):
            parse_parameters(text)


LLAMA_2_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


DOLLY_3B = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 50280,
    "max_position_embeddings": 2048,
}


@pytest.mark.matrix
def test_llama_2_70b_fits_two_nodes_of_eight_a100_and_one_only_with_its_host(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_70B))
    words = ["batch.sequences=16", "memory.zero=3", "memory.recompute=full", "memory.micro_batch=1"]
    layout = suppose(str(tmp_path), words, parse_hardware("2x8xA100-80GB")).layout
    assert (layout.workers, layout.zero, layout.recompute) == (16, 3, "full")
    exact, node = [*words, "memory.moments=fp32"], parse_hardware("8xA100-80GB")
    with pytest.raises(UserError, match="the least that the config allows"):
        suppose(str(tmp_path), [*exact, "memory.gradient_tier=device", "memory.tiles=1"], node)
    assert suppose(str(tmp_path), [*exact, "memory.gradient_tier=device"], node).layout.tiles > 1
    layout = suppose(str(tmp_path), exact, node).layout
    assert (layout.workers, layout.optimizer_tier, layout.gradient_tier) == (8, "host", "host")


@pytest.mark.matrix
def test_dolly_in_fp16_fits_a_v100_of_16_gb_with_its_host(tmp_path: Path) -> None:
    """One worker, rows of 512 tokens: fp16 weights and gradients, masters and moments in host memory (12 bytes)."""
    (tmp_path / "config.json").write_text(json.dumps(DOLLY_3B))
    words = ["data.max_length=512", "batch.sequences=16", "memory.micro_batch=16", "memory.recompute=full"]
    words += ["memory.optimizer_tier=host", "memory.parameter_tier=device", "checkpoint.every=0"]
    node = parse_hardware("V100-16GB:128GB")
    plan = suppose(str(tmp_path), [*words, "precision=fp16"], node)
    number, held = plan.model.num_parameters, plan.choice.peak.bytes
    assert held["weights"] == 2 * number
    assert held["gradients"] == 2 * number
    assert plan.choice.host_bytes == pytest.approx(12 * number, rel=1e-3)
    assert 12e9 < plan.choice.peak_bytes < plan.budget.usable < 16e9
    with pytest.raises(UserError, match="precision=fp16"):
        suppose(str(tmp_path), words, node)
