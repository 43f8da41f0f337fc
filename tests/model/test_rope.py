"""Scaled positions: what a configuration says then, and which models are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import (
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

from tiny import byte_tokenizer, llama_config
from tonnage.errors import UserError
from tonnage.model.files import check_fit
from tonnage.model.rope import positions_in, scale, set_positions

LLAMA_3_1: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

PARTIAL: dict[str, Any] = {"max_position_embeddings": 4096, "partial_rotary_factor": 0.5, "num_hidden_layers": 2}


def llama(positions: int = 131072, rope: dict[str, Any] | None = None) -> LlamaConfig:
    rope = dict(LLAMA_3_1 if rope is None else rope)
    return llama_config(max_position_embeddings=positions, rope_parameters=rope)


def gemma3(**full: Any) -> Gemma3TextConfig:
    rope = {"full_attention": {"rope_theta": 1e6, **full}, "sliding_attention": {"rope_type": "default"}}
    return Gemma3TextConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=131072,
        rope_parameters=rope,
    )


@pytest.mark.parametrize(
    ("config", "rope", "positions", "parameters"),
    [
        (
            llama(4096, {"rope_type": "default", "rope_theta": 1e4}),
            {"type": "yarn", "factor": 2.5},
            10240,
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.5, "original_max_position_embeddings": 4096},
        ),
        (llama(), {"type": "llama3", "factor": 32.0}, 524288, LLAMA_3_1 | {"factor": 32.0}),
        (
            llama(),
            {"type": "yarn", "factor": 16.0},
            131072,
            {"rope_type": "yarn", "rope_theta": 5e5, "factor": 16.0, "original_max_position_embeddings": 8192},
        ),
        (
            llama(16384, {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0}),
            {"type": "linear", "factor": 8.0},
            32768,
            {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
        ),
        (
            Qwen3Config(**PARTIAL),
            {"type": "default", "factor": 8.0, "theta": 1e6},
            32768,
            {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        ),
    ],
    ids=["of a model that is not scaled", "another factor", "another type", "linear", "another base"],
)
def test_what_a_configuration_says_then(
    config: PreTrainedConfig, rope: dict[str, Any], positions: int, parameters: dict[str, Any]
) -> None:
    scale(config, rope)
    assert config.rope_parameters == parameters
    assert config.max_position_embeddings == positions


def test_layers_of_full_attention_alone_are_scaled() -> None:
    config = gemma3(rope_type="linear", factor=8.0)
    assert config.rope_parameters is not None
    local = dict(config.rope_parameters["sliding_attention"])
    scale(config, {"type": "linear", "factor": 16.0})
    assert config.rope_parameters == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 16.0},
        "sliding_attention": local,
    }
    assert config.max_position_embeddings == 262144


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "a gpt2 with no rotary embeddings"),
        (OPTConfig(), "a opt with no rotary embeddings"),
        (Gemma4TextConfig(num_hidden_layers=6), "a gemma4_text with rotary embeddings of type proportional"),
        (
            Phi3Config(num_hidden_layers=2, pad_token_id=0),
            "a phi3 with positions that transformers cannot scale as yarn",
        ),
        (MixtralConfig(num_hidden_layers=2), "a mixtral with positions that transformers cannot scale as yarn"),
        (gemma3(rope_type="linear", factor=8.0), "yarn, and a gemma3_text whose positions are scaled as linear"),
    ],
)
def test_families_that_are_refused(config: PreTrainedConfig, message: str) -> None:
    before = config.to_dict()
    with pytest.raises(UserError) as error:
        scale(config, {"type": "yarn", "factor": 2.0})
    assert error.value.problems[0].found.startswith(message)
    assert config.to_dict() == before


def test_code_that_does_not_ask_for_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    made = rotary.__init__

    def deaf(self: Any, config: Any, **more: Any) -> None:
        made(self, config, **more)
        self.rope_type = "default"

    monkeypatch.setattr(rotary, "__init__", deaf)
    with pytest.raises(UserError, match="without regard to their scaling"):
        scale(llama(), {"type": "yarn", "factor": 16.0})


def test_a_longer_row_is_offered_a_scaling() -> None:
    with pytest.raises(UserError, match="rope=") as error:
        check_fit(llama_config(max_position_embeddings=64), byte_tokenizer(), 200)
    change = error.value.problems[0].change
    assert change == "data.max_length=64, or rope='{type: yarn, factor: 4}'"
    config = llama_config(max_position_embeddings=64)
    scale(config, {"type": "yarn", "factor": 4.0})
    check_fit(config, byte_tokenizer(), 200)
    with pytest.raises(UserError) as error:
        check_fit(llama(128), byte_tokenizer(), 200)
    assert error.value.problems[0].change == "data.max_length=128"


def test_positions_of_an_adapter(tmp_path: Path) -> None:
    scaled, other = llama(), llama()
    scale(scaled, {"type": "yarn", "factor": 64.0})
    set_positions(other, positions_in(scaled), "there")
    assert (other.rope_parameters, other.max_position_embeddings) == (scaled.rope_parameters, 524288)
    with pytest.raises(UserError, match="rope_parameters and max_position_embeddings"):
        set_positions(other, {"vocab_size": 3}, "there")
