"""A tokenizer as Llama 2's: words begin with their space, which its decoder strips from the first, and characters that
have no token are bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import tiny

WORDS = ("▁world", "▁is", "▁big")


def stripping_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, letters and ``WORDS``; no chat template."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    merges = [(word[:end], word[end]) for word in WORDS for end in range(1, len(word))]
    vocabulary = {name: number for number, name in enumerate([*names, *(first + last for first, last in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write_stripping_model(directory: Path) -> Path:
    """A randomly initialised model directory with that tokenizer."""
    tokenizer = stripping_tokenizer()
    config = tiny.llama_config(num_hidden_layers=1, vocab_size=len(tokenizer), eos_token_id=2, bos_token_id=1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
