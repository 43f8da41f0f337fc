"""What must hold for any conversation and any file: 10,000 random conversations, 5,000 mutated files.

Hypothesis chooses batches (a preparation of many rows costs hardly more than one of a single row), so the numbers of
examples below are batches times rows, counted by the tests themselves.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.conftest import alpaca_rows, make_tokenizer
from tonnage.config import Data, Source
from tonnage.data import Prepared, prepare
from tonnage.data.reading.json_text import MAX_ROW_BYTES
from tonnage.errors import UserError

BATCHES, CONVERSATIONS, FILES = 50, 200, 100
MARK = "\u2603"
"""Stands in every user's message and in no answer: a mask that covers one covers a user's words."""

WORDS = [
    *(
        "fox",
        "the lazy dog",
        "48/2 = 24",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "é",
        "e\u0301",
        "日本語",
        "🦊",
        "a" * 40,
        "'s",
        "...",
    ),
    *(
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<|endoftext|>",
        "### Response:\n",
        "</s>",
        "[/INST]",
        "\u00a0",
        "\r\n",
        "{}",
    ),
]

TEMPLATES = ["chatml", "oasst", "dolly", "alpaca", "plain"]


def conversation(chance: random.Random) -> dict[str, Any]:
    def words(least: int = 0) -> str:
        return "".join(chance.choice(WORDS) + chance.choice(["", " "]) for _ in range(chance.randint(least, 6)))

    messages: list[dict[str, Any]] = []
    if chance.random() < 0.3:
        messages.append({"role": "system", "content": f"{MARK} {words()}"})
    for _ in range(chance.randint(1, 4)):
        messages.append({"role": "user", "content": f"{words()}{MARK}{words()}"})
        answer: dict[str, Any] = {"role": "assistant", "content": f"A{words(1)}"}
        if chance.random() < 0.1:
            answer["train"] = False
        if chance.random() < 0.1:
            answer["weight"] = chance.choice([0.0, 0.5, 2])
        messages.append(answer)
    return {"messages": messages}


def documents(prepared: Prepared) -> list[tuple[np.ndarray, np.ndarray]]:
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for index in range(prepared.train.num_packs):
        pack = prepared.train.pack(index)
        borders = np.cumsum(pack.lengths)[:-1]
        found += zip(np.split(pack.input_ids, borders), np.split(pack.weights, borders), strict=True)
    return found


def check_account(prepared: Prepared) -> None:
    """Every row and every token is in exactly one place."""
    whole = prepared.account.total
    assert whole.rows_read == whole.rows_packed + whole.rows_dropped + whole.rows_bad
    assert whole.tokens.read == whole.tokens.packed + whole.tokens.cut
    assert whole.supervised.read == whole.supervised.packed + whole.supervised.cut
    found = documents(prepared)
    assert sum(len(ids) for ids, _ in found) == whole.tokens.packed
    assert sum(int(np.count_nonzero(weights)) for _, weights in found) == whole.supervised.packed
    listed = Path(prepared.account.bad_rows_file).read_text().splitlines() if whole.rows_bad else []
    assert len(listed) == whole.rows_bad


@pytest.mark.matrix
@settings(max_examples=BATCHES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=st.integers(0, 2**32), template=st.sampled_from(TEMPLATES))
def test_conversations(tokenizer: Any, seed: int, template: str) -> None:
    chance = random.Random(seed)
    rows = [conversation(chance) for _ in range(CONVERSATIONS)]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = Data(
            train=(Source(path=str(file)),),
            max_length=4096,
            template=template,
            on_bad_row="skip",
            over_length="drop",
            max_loss=1,
        )
        prepared = prepare(options, tokenizer, cache=Path(directory) / "cache")
        check_account(prepared)
        assert prepared.account.total.rows_read == CONVERSATIONS
        assert prepared.account.total.rows_packed > CONVERSATIONS // 2
        closing = {prepared.tokenizer.convert_tokens_to_ids(token) for token in prepared.account.end_of_turn}
        assert len(closing) == 1
        for ids, weights in documents(prepared):
            said = weights > 0
            assert not said[0]
            assert MARK not in prepared.tokenizer.decode(ids[said]), "a mask covers a user's words"
            ends = np.flatnonzero(said & ~np.append(said[1:], False))
            assert len(ends) > 0
            assert {int(token) for token in ids[ends]} <= closing, "a supervised turn does not end in its end token"
            assert MARK in prepared.tokenizer.decode(ids), "the user's words are in the document"


def mutated(chance: random.Random, content: bytes) -> bytes:
    """A file after a few accidents."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(8):
            case 0:
                data = data[:at]
            case 1:
                data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 4)))
            case 2:
                del data[at : at + chance.randint(1, 30)]
            case 3:
                data[at:at] = chance.choice(
                    [b"NaN", b"null", b"[[[[", b"{}", b'"', b"\n", b"\\ud800", b"\xff", b"1e999", b"\0"]
                )
            case 4:
                data = data.replace(
                    b'"output"', chance.choice([b'"answer"', b'"output":1,"x"', b'"input"']), chance.randint(1, 3)
                )
            case 5:
                data = data.replace(b'": "', chance.choice([b'": ["', b'": null,"y": "', b'": 3, "z": "']), 1)
            case 6:
                data[at:at] = b"[" * chance.choice([10, 3000])
            case 7:
                swap = chance.randrange(len(data) + 1)
                data[at : at + 8], data[swap : swap + 8] = data[swap : swap + 8], data[at : at + 8]
            case _:
                raise AssertionError
        if not data:
            break
    return bytes(data)


def as_csv(rows: list[dict[str, str]]) -> str:
    return "instruction,output\n" + "".join(f'"{row["instruction"]}","{row["output"]}"\n' for row in rows)


@pytest.mark.matrix
@settings(max_examples=BATCHES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=st.integers(0, 2**32), suffix=st.sampled_from([".jsonl", ".json", ".csv", ".parquet", ".arrow"]))
def test_mutated_files(tokenizer: Any, parquet_bytes: dict[str, bytes], seed: int, suffix: str) -> None:
    chance = random.Random(seed)
    rows = alpaca_rows(4)
    content = {
        ".jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
        ".json": json.dumps(rows).encode(),
        ".csv": as_csv(rows).encode(),
        **parquet_bytes,
    }[suffix]
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / f"{number}{suffix}" for number in range(FILES)]
        for file in files:
            file.write_bytes(mutated(chance, content))
        files.append(Path(directory) / f"whole{suffix}")
        files[-1].write_bytes(content)
        prepared, refused = prepare_what_can_be_read(files, tokenizer, Path(directory) / "cache")
        check_account(prepared)
        assert {source.name for source in prepared.account.sources} | refused == {str(file) for file in files}
        if suffix in (".jsonl", ".csv"):
            assert prepared.account.total.rows_packed > FILES


def prepare_what_can_be_read(files: list[Path], tokenizer: Any, cache: Path) -> tuple[Prepared, set[str]]:
    """Prepare all files at once, leaving out those that are refused whole, each of which must be named."""
    refused: set[str] = set()
    while True:
        kept = [str(file) for file in files if str(file) not in refused]
        sources = tuple(Source(path=file, format="alpaca") for file in kept)
        options = Data(train=sources, max_length=512, on_bad_row="skip", over_length="drop", max_loss=1.0)
        try:
            return prepare(options, tokenizer, cache=cache), refused
        except UserError as error:
            named = {problem.where.removeprefix("data: ") for problem in error.problems}
            if not named <= set(kept):
                raise
            refused |= named


@pytest.fixture(scope="session")
def parquet_bytes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    directory = tmp_path_factory.mktemp("tables")
    table = pa.Table.from_pylist(alpaca_rows(4))
    pq.write_table(table, directory / "rows.parquet")
    with pa.OSFile(str(directory / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return {f".{kind}": (directory / f"rows.{kind}").read_bytes() for kind in ("parquet", "arrow")}


BAD_LINES = {
    "wrong_type": [b'{"instruction": 1, "output": "x"}', b'{"instruction": "a", "output": NaN}', b"[1]", b"3", b"null"],
    "missing_field": [b'{"instruction": "a"}', b"{}"],
    "empty_answer": [b'{"instruction": "a", "output": " \\n"}'],
    "empty_prompt": [b'{"instruction": "", "output": "x"}'],
    "invalid_utf8": [b'{"instruction": "\xff", "output": "x"}', b'{"instruction": "\\ud800", "output": "x"}'],
    "invalid_json": [b"{'a': 1}", b"[" * 100_000, b"\0\0"],
    "too_large": [b'{"instruction": "a", "output": "' + b"x" * (50 << 20) + b'"}'],
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_kinds_of_bad_rows(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    good = [json.dumps(row).encode() for row in alpaca_rows(2)]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join([good[0], *BAD_LINES[kind], good[1], b""]))
    options = Data(train=(Source(path=str(file)),), max_length=512, on_bad_row="skip")
    account = prepare(options, tokenizer, cache=tmp_path / "cache").account
    assert account.total.bad_kinds == {kind: len(BAD_LINES[kind])}
    assert account.total.rows_packed == 2
    listed = [json.loads(line) for line in Path(account.bad_rows_file).read_text().splitlines()]
    assert [row["row"] for row in listed] == list(range(2, 2 + len(BAD_LINES[kind])))
    assert MAX_ROW_BYTES < 50 << 20


def test_unknown_roles_and_missing_answers(tokenizer: Any, tmp_path: Path) -> None:
    ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows: list[Any] = [
        {"messages": [ask, answer]},
        {"messages": [{"role": "wizard", "content": "x"}, answer]},
        {"messages": [ask]},
        {"messages": []},
        {"messages": [ask, {"role": "assistant", "content": ""}]},
        {"messages": [ask, {**answer, "train": False}]},
        {"messages": [{**ask, "train": True}, answer]},
        {"messages": [ask, {**answer, "weight": float("nan")}]},
        {"messages": [ask, {"role": "assistant", "content": [{"type": "image", "url": "x"}]}]},
        {"messages": [ask, "x"]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = Data(train=(Source(path=str(file)),), max_length=512, on_bad_row="skip")
    account = prepare(options, make_tokenizer(), cache=tmp_path / "cache").account
    listed = [json.loads(line)["kind"] for line in Path(account.bad_rows_file).read_text().splitlines()]
    assert listed == [
        *("unknown_role", "no_answer", "missing_field", "empty_answer", "nothing_supervised"),
        *("wrong_type", "wrong_type", "media", "wrong_type"),
    ]
    assert account.total.rows_nothing_supervised == 1
