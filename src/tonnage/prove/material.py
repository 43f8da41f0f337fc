"""Tiny models of several families, a tokenizer and rows, and shapes of real models: made here, from nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

END, PADDING = "<|end|>", "<|pad|>"
VOCABULARY = 258
"""Bytes, an end and a padding token."""
MOST_DRAWN = 32_000
"""Different tokens in rows that are drawn."""

TINY: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 257,
    "initializer_range": 0.1,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0},
    "mistral": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Grouped heads and tied weights; normed heads; parallel blocks; windows, caps and norms after; a window; experts."""

LLAMA_3: Mapping[str, Any] = {
    "vocab_size": 128_256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 8192,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


def model_sizes(*numbers: int) -> dict[str, int]:
    """Sizes of a model in the order of these names, as many as there are numbers."""
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    return dict(zip(names.split(), numbers, strict=False))


def _llama(*numbers: int, **more: Any) -> Mapping[str, Any]:
    return {**LLAMA_3, **model_sizes(*numbers), **more}


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "8B": _llama(4096, 14_336, 32, 32, 8),
    "1B": _llama(2048, 8192, 16, 32, 8, tie_word_embeddings=True),
    "small": _llama(256, 768, 4, 4, 2, vocab_size=4096, tie_word_embeddings=True),
}
"""Of Llama 3.1 8B and Llama 3.2 1B; and one for a CPU."""


def tokenizer(size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """A token for every byte, one that ends, one that fills; up to ``size`` others, of which nothing is made."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END, PADDING, *(f"<{n}>" for n in range(VOCABULARY, size))]
    made = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END, PADDING])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=PADDING)


def shape_of(family: str, **sizes: Any) -> Any:
    """The configuration of a model; a size that is None is the family's own."""
    named_sizes = {name: value for name, value in sizes.items() if value is not None}
    config = CONFIG_MAPPING[family](**named_sizes)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    return config


def tiny_model(folder: Path, family: str, **changes: Any) -> str:
    """Write a tiny model with random weights, the same wherever it is made; returns its directory."""
    if not folder.exists():
        config = shape_of(family, **{**TINY, **FAMILIES[family], **changes})
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return str(folder)


def tiny_llama(folder: Path, **changes: Any) -> tuple[str, str]:
    """Write a tiny Llama and rows into a folder; returns the model's directory and the file."""
    return tiny_model(folder / "llama", "llama", **changes), rows(folder)


def bare_shape(folder: Path, **sizes: Any) -> str:
    """Write the configuration of a Llama, without weights; returns its directory."""
    if not folder.exists():
        shape_of("llama", **sizes).save_pretrained(folder)
        tokenizer(min(sizes["vocab_size"], MOST_DRAWN)).save_pretrained(folder)
    return str(folder)


WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven"),
    *("wizards", "brew", "strong", "tea", "in", "old", "copper", "kettles"),
)


def rows(folder: Path, number: int = 320, seed: int = 0) -> str:
    """Write rows of a question and an answer, of very different lengths; returns the file."""
    path = folder / f"rows-{number}-{seed}.jsonl"
    if not path.exists():
        drawn = random.Random(seed)
        lines = []
        for _ in range(number):
            question = " ".join(drawn.choices(WORDS, k=drawn.randint(1, 9)))
            answer = " ".join(reversed(question.split())) if drawn.random() < 0.7 else question.upper()
            lines.append(json.dumps({"prompt": f"{question} =", "completion": f" {answer}"}))
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def full_rows(folder: Path, number: int, length: int, vocabulary: int) -> str:
    """Write rows of drawn tokens, all of them supervised, each of which fills a pack; returns the file."""
    path = folder / f"full-{number}-{length}.jsonl"
    if not path.exists():
        drawn = random.Random(0)
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for _ in range(number):
                tokens = [drawn.randrange(min(vocabulary, MOST_DRAWN)) for _ in range(length)]
                file.write(json.dumps({"input_ids": tokens, "loss_mask": [1] * length}) + "\n")
    return str(path)


def data_of(file: str, length: int = 128) -> dict[str, Any]:
    """The ``data`` section of a config that trains on rows written here."""
    return {"train": file, "max_length": length, "template": "plain"}


def resting(tier: str, *names: str, **more: Any) -> dict[str, Any]:
    """A ``memory`` section in which some rest on a tier; ``more`` are its other keys."""
    return {f"{name}_tier": tier for name in names} | more
