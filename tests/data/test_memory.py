"""A file much larger than the memory that preparing it may take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data.conftest import alpaca_rows, make_tokenizer, write_rows

ROWS = 10_000
NOTE_BYTES = 12_000
GROWTH_BYTES = 64 << 20

PREPARE = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from tonnage.config import Data, Source
from tonnage.data import Workforce, prepare

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

tokenizer, cache, *files = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(tokenizer)
for file in files:
    options = Data(train=(Source(path=file),), max_length=256)
    account = prepare(options, tokenizer, cache=Path(cache), workforce=Workforce(processes=0)).account
    print(account.total.rows_packed, peak())
"""


def write_large(path: Path) -> Path:
    """Rows with a long field that is not used, as JSON lines or as one array."""
    before, between, after = ("[", ",\n", "]") if path.suffix == ".json" else ("", "\n", "\n")
    rows = [json.dumps({**row, "note": "x" * NOTE_BYTES}) for row in alpaca_rows(100, lambda n: 3)]
    with path.open("w") as out:
        out.write(before + rows[0])
        for number in range(1, ROWS):
            out.write(between + rows[number % len(rows)])
        out.write(after)
    assert path.stat().st_size > 1.8 * GROWTH_BYTES
    return path


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_peak_memory_does_not_follow_the_size_of_the_file(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    files = [write_rows(tmp_path / "small.jsonl", alpaca_rows(100))]
    files += [write_large(tmp_path / "lines.jsonl"), write_large(tmp_path / "array.json")]
    command = [sys.executable, "-c", PREPARE, *map(str, (tmp_path / "tokenizer", tmp_path / "cache", *files))]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    found = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert [rows for rows, _ in found] == [100, ROWS, ROWS]
    for file, (_, peak) in zip(files, found, strict=True):
        growth = peak - found[0][1]
        assert growth < GROWTH_BYTES, f"{growth >> 20} MiB more for {file.stat().st_size >> 20} MiB of {file.name}"
