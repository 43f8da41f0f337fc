"""Tokenizers and rows that the tests of the data room make for themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
    "### Instruction:\nWhat is the capital of France?\n\n### Response:\nThe capital of France is Paris.",
    "user assistant system tool the quick brown fox jumps over the lazy dog 0123456789 " * 3,
    "def add(a, b):\n    return a + b\n\nNatalia sold 48/2 = 24 clips in May.",
]


def make_tokenizer(specials: Sequence[str] = (), eos: str | None = "<|endoftext|>", vocab: int = 600) -> Any:
    """A byte-level BPE tokenizer with GPT-2's split pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = [token for token in (eos, *specials) if token]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(dict.fromkeys(named)),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=eos)
    if specials:
        own.add_special_tokens({"extra_special_tokens": list(specials)})
    return own


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_disks() -> Iterator[None]:
    """Thousands of preparations must not wait for a disk thousands of times; ``test_cache`` looks at that by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tonnage.data.cache.synchronise", lambda directory: None)
        patch.setattr("tonnage.data.cache.sync", lambda path: None)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A tokenizer without a chat template, whose end-of-text token is its padding token too."""
    return make_tokenizer()


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    """Write rows as JSON lines or as one JSON array, by the suffix."""
    if path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def alpaca_rows(count: int, words: Callable[[int], int] = lambda n: 3 + n % 40) -> list[dict[str, str]]:
    """Rows in the Alpaca form, all different, every third with an input."""
    return [
        {
            "instruction": f"Count {n} words of the lazy dog",
            "input": f"from {n}" if n % 3 == 0 else "",
            "output": " ".join(f"fox{n + k}" for k in range(words(n))) + ".",
        }
        for n in range(count)
    ]
