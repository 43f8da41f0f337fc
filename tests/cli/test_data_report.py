"""What people see of the data: the table, the histogram, the rows with their masks."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data.conftest import alpaca_rows, write_rows
from tonnage.cli.data_report import documents_as_json, show_account, show_documents, show_lengths
from tonnage.config import Data, Source
from tonnage.data import Prepared, prepare


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: Any) -> Prepared:
    rows = [*alpaca_rows(30), {"instruction": "nothing", "input": "", "output": ""}]
    files = [write_rows(tmp_path / f"{name}.jsonl", rows) for name in ("first", "second")]
    options = Data(train=tuple(Source(path=str(file)) for file in files), max_length=512, on_bad_row="skip")
    return prepare(options, tokenizer, cache=tmp_path / "cache")


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=terminal, highlight=False, color_system="standard")


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_account_in_80_columns(prepared: Prepared) -> None:
    out = console(False)
    show_account(prepared.account, out)
    text = printed(out)
    assert "…" not in text, "nothing is cut off"
    for line in ("rows read", "tokens read", "duplicates", "first.jsonl", "empty_answer 2", "template: alpaca"):
        assert line in text
    assert f"{prepared.account.total.tokens.read:,}" in text
    assert prepared.account.bad_rows_file in text


def test_what_was_done_to_rows_is_said(prepared: Prepared) -> None:
    unread = {"meta": 4, "messages[].id": 3}
    done: dict[str, Any] = {"rows_trimmed": 2, "turns_moved": 3, "rows_without_thoughts": 4, "unread": unread}
    account = replace(prepared.account, sources=tuple(replace(one, **done) for one in prepared.account.sources[:1]))
    out = Console(file=io.StringIO(), width=400)
    show_account(account, out)
    for line in (
        "2 rows held a first or last token that the template adds",
        "3 answers begin inside of a token",
        "4 rows: the template leaves out what was thought before the last question",
        "never read: meta (4), messages[].id (3)\n",
    ):
        assert line in printed(out)


def test_histogram_counts_every_document(prepared: Prepared) -> None:
    out = console(False)
    show_lengths(prepared.account, out)
    assert sum(int(line.split()[-1].replace(",", "")) for line in printed(out).splitlines()[1:]) == 60


def test_rows_show_their_mask_with_and_without_colour(prepared: Prepared) -> None:
    document = documents_as_json(prepared, 1, 0)[0]
    said = [token["id"] for token in document["tokens"] if token["weight"]]
    answer = str(prepared.tokenizer.decode(said))
    out = console(False)
    show_documents(prepared, 1, 0, out)
    assert f"⟦{answer}⟧" in printed(out)
    assert f":{document['row']}  {len(document['tokens'])} tokens, {len(said)} supervised" in printed(out)
    coloured = console(True)
    show_documents(prepared, 1, 0, coloured)
    assert f"\x1b[32m{answer.removesuffix('<|endoftext|>')}\x1b[0m" in printed(coloured)
    assert "⟦" not in printed(coloured)
    assert document["tokens"][-1]["special"]
