"""Every name of transformers' causal mapping, as a tiny model of its default configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tiny import byte_tokenizer
from tonnage.model.build import on_meta
from tonnage.model.tiny import POSITION_COUNTS, draw, shrink

NAMES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
VOCABULARY = 264
"""Some families' own tokenizer classes add special tokens to the one given."""
POSITIONS = 512
COMPLETED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1407, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 4, "num_hidden_layers": 16},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 4, "num_hidden_layers": 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 192, "num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
}
"""What a family's default configuration lacks: those that are published have it. Some are given the layers that are."""


class NoText(Exception):
    """A family has no text model of its own."""


class NotMade(Exception):
    """No tiny model of a family's default configuration can be made."""


def text_config(name: str) -> PreTrainedConfig:
    """The configuration of a family's text model, by default.

    Raises:
        NoText: there is none.
    """
    try:
        found: PreTrainedConfig = CONFIG_MAPPING[name](**COMPLETED.get(name, {})).get_text_config(decoder=True)
    except Exception as error:
        raise NoText(str(error).strip().split("\n")[-1].strip()) from error
    return found


def write_tiny(name: str, directory: Path, seed: int = 0) -> PreTrainedConfig:
    """A tiny model of a family in ``directory``, with weights so large that a leak shows, and a tokenizer of bytes.

    Raises:
        NoText: there is no text model.
        NotMade: the family's classes do not take such a configuration.
    """
    given = text_config(name)
    try:
        return _write_tiny(given, directory, seed)
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {str(error).strip()[:200]}") from error


def _write_tiny(given: PreTrainedConfig, directory: Path, seed: int) -> PreTrainedConfig:
    config = shrink(given, long_documents=False)
    config.vocab_size = VOCABULARY
    for key in ("vocab_size_per_layer_input", "decoder_vocab_size"):
        if getattr(config, key, None) is not None:
            setattr(config, key, VOCABULARY)
    for key, value in (("pad_token_id", 257), ("bos_token_id", 256), ("eos_token_id", 256)):
        setattr(config, key, value)
    for key in POSITION_COUNTS:
        if getattr(config, key, None) is not None:
            setattr(config, key, POSITIONS)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw(model, 1.0, seed)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return config


def built(name: str, **changes: Any) -> PreTrainedModel:
    """A small model of a family on the meta device, as transformers' classes make it; skips the test of one that they
    make none of."""
    try:
        config = shrink(text_config(name), long_documents=False)
        for key, value in changes.items():
            setattr(config, key, value)
        return on_meta(config, torch.float32)
    except Exception as error:  # as above
        pytest.skip(f"transformers builds no small {name}: {error}")
