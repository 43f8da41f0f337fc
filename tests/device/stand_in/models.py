"""Models and configs for the walk: ``python -m device.stand_in.models DIRECTORY``, in one of the environments.

Small ones with weights, whose configs train four steps, and some of real shapes without any (``1b``, ``8b``: those of
Llama 3.2 and 3.1; ``8b-of-4`` and others: with as many blocks), whose configs train three with weights that nobody
draws (``hook/shapes.py``).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

import tiny

SHAPE: dict[str, Any] = {
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 256,
    "bos_token_id": 256,
}
REAL: dict[str, Any] = {
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "architectures": ["LlamaForCausalLM"],
}


DOCUMENTS = {"8b-500k": 500_000, "8b-1m": 1_000_000}
"""Tokens of every document of the configs that train a model of 8B on long ones."""


def small() -> dict[str, PreTrainedConfig]:
    """Shapes that train in seconds, by name."""
    found: dict[str, PreTrainedConfig] = {
        "llama": tiny.llama_config(num_hidden_layers=4),
        "untied": tiny.llama_config(num_hidden_layers=4, tie_word_embeddings=False),
        "neox": tiny.neox_config(num_hidden_layers=4),
        "mixture": tiny.mixture_config("qwen3_moe"),
        "gemma2": Gemma2Config(**SHAPE, head_dim=16, sliding_window=32),
        "mistral": MistralConfig(**SHAPE, head_dim=16, sliding_window=32),
        "qwen3": Qwen3Config(**SHAPE, head_dim=16),
        "deep": tiny.llama_config(num_hidden_layers=16),
        "fp8": tiny.llama_config(num_hidden_layers=4, intermediate_size=208),
    }
    return found | {f"head{size}": Qwen3Config(**SHAPE, head_dim=size) for size in (20, 256, 320)}


def real() -> dict[str, PreTrainedConfig]:
    """Shapes of models that people train, by name."""
    return {
        "1b": LlamaConfig(
            **REAL,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            head_dim=64,
            tie_word_embeddings=True,
        ),
        "8b": LlamaConfig(**REAL, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128),
        "8b-of-4": LlamaConfig(**REAL, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, head_dim=128),
        "32b-of-4": Qwen2Config(
            **REAL | {"vocab_size": 152064, "num_attention_heads": 40, "architectures": ["Qwen2ForCausalLM"]},
            hidden_size=5120,
            intermediate_size=27648,
            num_hidden_layers=4,
        ),
        "13b-of-4": _llama_2(5120, 13824, 40, 40),
        "70b-of-4": _llama_2(8192, 28672, 64, 8),
        "dolly-of-32": GPTNeoXConfig(
            vocab_size=50280,
            hidden_size=2560,
            intermediate_size=10240,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=2048,
            architectures=["GPTNeoXForCausalLM"],
        ),
        "1t-of-4": GPTNeoXConfig(
            vocab_size=51200,
            hidden_size=12288,
            intermediate_size=49152,
            num_hidden_layers=4,
            num_attention_heads=96,
            max_position_embeddings=2048,
            architectures=["GPTNeoXForCausalLM"],
        ),
    }


def _llama_2(hidden: int, intermediate: int, heads: int, key_heads: int) -> LlamaConfig:
    """Four blocks of a shape of Llama 2."""
    of_heads = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    return LlamaConfig(
        **REAL | of_heads | {"vocab_size": 32000, "max_position_embeddings": 4096},
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=4,
    )


def long_rows(number: int, least: int = 200, most: int = 1800) -> list[dict[str, str]]:
    """Rows whose completions have so many tokens, after a prompt of 100."""
    chance = random.Random(0)
    letters = "abcdefgh "
    return [
        {
            "prompt": "".join(chance.choices(letters, k=100)),
            "completion": "".join(chance.choices(letters, k=chance.randint(least, most))),
        }
        for _ in range(number)
    ]


def main(folder: Path) -> None:
    """Write all of them, and ``NAME.yaml`` for each."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = tiny.write_rows(folder / "rows.jsonl", list(tiny.alpaca_rows(200)))
    common = {"launch": {"threads": 1}, "track": []}
    data = {"train": str(rows), "max_length": 128, "template": "plain", "cache": str(folder / "cache")}
    for name, config in small().items():
        tiny.write_model(folder / name, config, torch.bfloat16)
        keys = {
            "model": str(folder / name),
            "data": {**data, "validation": 0.1},
            "batch": {"sequences": 8},
            "steps": 4,
            "checkpoint": {"every": 2},
            "evaluate": {"every": 2},
            "output": str(folder / "runs" / name),
        }
        (folder / f"{name}.yaml").write_text(json.dumps(keys | common))
    rows = tiny.write_rows(folder / "long.jsonl", list(long_rows(400)))
    for name, config in real().items():
        config.save_pretrained(folder / name)
        tiny.byte_tokenizer().save_pretrained(folder / name)
        keys = {
            "model": str(folder / name),
            "init": "random",
            "data": {**data, "train": str(rows), "max_length": 2048 if "-of-" in name else 4096},
            "batch": {"sequences": 16 if "-of-" in name else 4},
            "steps": 3,
            "output": str(folder / "runs" / name),
        }
        (folder / f"{name}.yaml").write_text(json.dumps(keys | common))
    for name, tokens in DOCUMENTS.items():
        write_long(folder, name, tokens, keys | common)


def write_long(folder: Path, name: str, tokens: int, keys: dict[str, Any]) -> None:
    """The model of 8B with more positions, and a config that trains it on documents of so many tokens, one a step."""
    config = real()["8b"]
    config.max_position_embeddings = tokens + 1024
    config.save_pretrained(folder / name)
    tiny.byte_tokenizer().save_pretrained(folder / name)
    rows = tiny.write_rows(folder / f"{name}.jsonl", long_rows(4, tokens, tokens))
    data = keys["data"] | {"train": str(rows), "max_length": tokens + 1024}
    of_this = {
        "model": str(folder / name),
        "data": data,
        "batch": {"sequences": 1},
        "output": str(folder / "runs" / name),
    }
    (folder / f"{name}.yaml").write_text(json.dumps(keys | of_this))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
