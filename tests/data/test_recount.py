"""The account against a count made without our data code: rows, tokens, supervised tokens, source by source."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from data.conftest import TEXTS, write_rows
from tonnage.config import Data, Source
from tonnage.data import prepare

HEAD = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
HEAD_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)


def recount(file: Path, tokenizer: Any) -> tuple[int, int, int, int]:
    """Rows, rows that can be used, tokens and supervised tokens of a file of instructions."""
    rows = json.loads(file.read_text())
    used = tokens = supervised = 0
    for row in rows:
        if not row["output"].strip():
            continue
        used += 1
        given = f"### Input:\n{row['input']}\n\n" if row["input"].strip() else ""
        prompt = f"{HEAD_WITH_INPUT if given else HEAD}### Instruction:\n{row['instruction']}\n\n{given}### Response:\n"
        before = tokenizer.encode(prompt, add_special_tokens=False)
        whole = tokenizer.encode(prompt + row["output"] + tokenizer.eos_token, add_special_tokens=False)
        assert whole[: len(before)] == before
        tokens += len(whole)
        supervised += len(whole) - len(before)
    return len(rows), used, tokens, supervised


def make_rows(count: int, chance: random.Random) -> list[dict[str, str]]:
    """Instructions of the kinds that public files hold: short and long, with and without input, some answers empty."""
    words = " ".join(TEXTS).split(" ")

    def say(least: int, most: int) -> str:
        return chance.choice([" ", "\n", ", "]).join(chance.choices(words, k=chance.randint(least, most)))

    return [
        {
            "instruction": say(3, 60),
            "input": say(1, 30) if chance.random() < 0.3 else "",
            "output": say(1, 150) if chance.random() < 0.98 else "",
        }
        for _ in range(count)
    ]


def test_adds_up_to_the_token(tmp_path: Path, tokenizer: Any) -> None:
    chance = random.Random(0)
    files = [write_rows(tmp_path / f"{name}.json", make_rows(count, chance)) for name, count in (("a", 700), ("b", 90))]
    options = Data(
        train=tuple(Source(path=str(file)) for file in files),
        max_length=2048,
        on_bad_row="skip",
        over_length="drop",
        max_loss=1,
    )
    prepared = prepare(options, tokenizer, cache=tmp_path / "cache")
    for file, account in zip(files, prepared.account.sources, strict=True):
        rows, used, tokens, supervised = recount(file, tokenizer)
        assert account.rows_read == rows == account.rows_packed + account.rows_dropped + account.rows_bad
        assert account.rows_read - account.rows_bad == used
        assert account.tokens.read == tokens == account.tokens.packed + account.tokens.cut
        assert account.supervised.read == supervised == account.supervised.packed + account.supervised.cut
    assert prepared.account.train.fill >= 0.99
    assert prepared.train.num_tokens == prepared.account.total.tokens.packed
