"""Packed files are read as what they hold, and damaged ones end in errors that are told as a file's."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from tonnage.config import Source
from tonnage.data.reading.opening import open_file
from tonnage.data.reading.rows import read_rows
from tonnage.data.sources.files import resolve
from tonnage.errors import UserError
from tonnage.forms.conversation import RowError

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: bytes(pa.compress(content, codec="zstd", asbytes=True)),
}
ROWS = [{"prompt": f"{number} " * 50, "completion": str(number)} for number in range(300)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize("ending", PACK)
def test_packed_lines_are_read_one_by_one(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.jsonl{ending}"
    path.write_bytes(PACK[ending](LINES))
    found = [row for part in resolve(Source(path=str(path)), 0).parts for _, row in read_rows(part)]
    assert found == ROWS


@pytest.mark.parametrize("ending", PACK)
def test_whatever_is_done_to_a_packed_file_is_told_as_a_file_s_error(ending: str, tmp_path: Path) -> None:
    chance, path = random.Random(ending), tmp_path / f"rows.jsonl{ending}"
    whole = PACK[ending](LINES)
    for _ in range(60):
        at = chance.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
        with suppress(OSError, EOFError, ValueError), open_file(path) as opened:
            opened.read()
        try:
            rows = [row for part in resolve(Source(path=str(path)), 0).parts for _, row in read_rows(part)]
        except UserError:
            continue
        has_no_checksum = ending == ".zst"
        assert rows == ROWS or any(isinstance(row, RowError) for row in rows) or has_no_checksum
