"""Tiny models, tokenizers and rows that tests make for themselves."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tonnage.model.build import load_buffers, load_weights
from tonnage.model.files import find_model
from tonnage.model.matching import match
from tonnage.model.merging import Match
from tonnage.model.stored import read_headers

END = "<|end|>"
VOCAB_SIZE = 258


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, an end token (256) and a padding token (257); no chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, "<|pad|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<|pad|>")


def neox_config(**changes: Any) -> GPTNeoXConfig:
    """The shape of pythia-14m (parallel residual, untied) but two blocks, over a byte vocabulary."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "eos_token_id": 256,
        "bos_token_id": 256,
    }
    return GPTNeoXConfig(**(shape | changes))


def llama_config(**changes: Any) -> LlamaConfig:
    """A Llama of two blocks with grouped-query attention and tied embeddings over a byte vocabulary."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 256,
        "bos_token_id": 256,
    }
    return LlamaConfig(**(shape | changes))


_EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2}
_LOCAL: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2}
_SHARED: dict[str, Any] = {
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _LOCAL,
    "qwen3_moe": _EXPERTS | {"moe_intermediate_size": 24, "norm_topk_prob": False},
    "qwen2_moe": _EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "olmoe": _EXPERTS,
    "phimoe": _LOCAL,
    "granitemoe": _LOCAL | {"logits_scaling": 4.0},
    "glm4_moe": _SHARED,
    "dots1": _SHARED,
    "minimax_m2": _LOCAL | {"rotary_dim": 8},
    "hunyuan_v1_moe": {"num_experts": 5, "moe_topk": 2},
    "ernie4_5_moe": {
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
    },
}
"""Families of mixtures of experts, and what tells their experts apart."""


def mixture_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Two blocks of a family with five experts, two for each token, with weights so large that each one counts."""
    shape: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": 257,
        "bos_token_id": 256,
        "eos_token_id": 256,
    }
    return CONFIG_MAPPING[family](**(shape | MIXTURES[family] | changes))


def write_model(directory: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A randomly initialised model directory with the byte tokenizer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def load(model: PreTrainedModel, directory: Path, **allowed: Any) -> Match:
    """Fill a model with the weights in a directory; returns where they were found."""
    found = match(model, read_headers(find_model(str(directory), tokenizer=False).weights), str(directory), **allowed)
    load_buffers(model, found)
    load_weights(model, found, seed=0)
    return found


def alpaca_rows(number: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows of varied length whose answers follow from their instructions."""
    chance = random.Random(seed)
    rows = []
    for _ in range(number):
        words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 7))) for _ in range(chance.randint(1, 8))]
        rows.append({"instruction": "Say in capitals.", "input": " ".join(words), "output": " ".join(words).upper()})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(folder: Path, num_rows: int, **keys: Any) -> Path:
    """A model of one block, rows, and a config for two workers of one thread, with other ``keys``; in ``folder``."""
    config = {
        "model": str(write_model(folder / "model", llama_config(num_hidden_layers=1))),
        "data": {
            "train": str(write_rows(folder / "rows.jsonl", alpaca_rows(num_rows))),
            "max_length": 128,
            "template": "plain",
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 4},
        "launch": {"workers": 2, "threads": 1},
        "track": [],
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config | keys))
    return path
