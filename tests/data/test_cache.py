"""The cache under several writers and under a writer that is killed, and preparation with any number of processes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from data.conftest import alpaca_rows, write_rows
from tonnage.config import Data, Source
from tonnage.data import PackedDataset, Workforce, prepare
from tonnage.data import cache as store
from tonnage.data.sources import files as source_files


def contents(directory: Path) -> dict[str, str]:
    """Digest of every file below a directory."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_bytes(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "PART_BYTES", 2000)
    file = write_rows(tmp_path / "rows.jsonl", alpaca_rows(100))
    with file.open("a") as out:
        out.write('{"instruction": "bad"}\n\n')
    options = Data(train=(Source(path=str(file)),), max_length=512, validation=0.1, on_bad_row="skip")
    found = []
    for processes in (0, 1, 3):
        cache = tmp_path / f"cache{processes}"
        prepared = prepare(options, tokenizer, cache=cache, workforce=Workforce(processes=processes))
        assert len(prepared.train.source.parts) > 5
        assert prepared.account.total.rows_read == 101
        rows = [json.loads(line) for line in Path(prepared.account.bad_rows_file).read_text().splitlines()]
        assert [row["row"] for row in rows] == [101]
        found.append({name: digest for name, digest in contents(cache).items() if not name.startswith("digests")})
    assert found[0] == found[1] == found[2]


WRITER = """
import sys, time
from pathlib import Path
from tonnage.data import cache

def build(directory):
    Path(sys.argv[2]).open("a").write("built\\n")
    for number in range(20):
        (directory / f"{number}.txt").write_text(str(number))
        time.sleep(float(sys.argv[3]))

cache.entry(Path(sys.argv[1]), build)
"""


def start_writer(entry: Path, log: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(entry), str(log), str(seconds)])


def test_writers_at_the_same_time_build_once(tmp_path: Path) -> None:
    entry, log = tmp_path / "entries" / "key", tmp_path / "log"
    writers = [start_writer(entry, log, 0.01) for _ in range(4)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    assert log.read_text() == "built\n"
    assert len(list(entry.iterdir())) == 20


def test_a_killed_writer_leaves_nothing_half_valid(tmp_path: Path) -> None:
    entry, log = tmp_path / "entries" / "key", tmp_path / "log"
    writer = start_writer(entry, log, 10)
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait(60)
    assert not entry.exists()
    assert len(list(entry.parent.glob(".key.*"))) == 1, "it died in the middle"
    assert start_writer(entry, log, 0).wait(60) == 0
    assert len(list(entry.iterdir())) == 20
    assert not list(entry.parent.glob(".key.*")), "what was left is cleared away"


def start_and_wait(entry: Path, log: Path) -> subprocess.Popen[bytes]:
    """A writer in the middle of its work."""
    writer = start_writer(entry, log, 10)
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return writer


def test_leftovers_of_dead_writers_go_with_the_next_entry_and_those_of_the_living_stay(tmp_path: Path) -> None:
    entries = tmp_path / "entries"
    dead, alive = (start_and_wait(entries / name, tmp_path / f"log of {name}") for name in ("dead", "alive"))
    dead.kill()
    dead.wait(60)
    (left,), (working,) = (list(entries.glob(f".{name}.*")) for name in ("dead", "alive"))
    elsewhere = entries / ".far.0123abcd.7"
    for path in (elsewhere, entries / ".old.0123abcd.8", entries / ".mine", entries / "whole"):
        path.mkdir()
    days_ago = time.time() - 3 * 24 * 3600
    os.utime(entries / ".old.0123abcd.8", (days_ago, days_ago))

    assert store.entry(entries / "other", lambda directory: None)
    assert not left.exists(), "its writer is dead"
    assert working.is_dir(), "its writer is alive"
    assert elsewhere.is_dir(), "another host may not see our locks, nor we its"
    assert not (entries / ".old.0123abcd.8").exists(), "another host's, and nothing was written to it for days"
    assert (entries / ".mine").is_dir()
    assert (entries / "whole").is_dir()
    alive.kill()
    alive.wait(60)
    assert store.entry(entries / "one more", lambda directory: None)
    assert not working.exists()


def test_an_entry_that_a_host_without_our_locks_finished_first_stays(tmp_path: Path) -> None:
    entry = tmp_path / "key"

    def build(directory: Path) -> None:
        (directory / "ours").touch()
        entry.mkdir()
        (entry / "theirs").touch()

    assert not store.entry(entry, build)
    assert [path.name for path in entry.iterdir()] == ["theirs"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        store.entry(tmp_path / "key", build)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def test_opening_reads_no_tokenizer_and_imports_nothing_heavy(tmp_path: Path, tokenizer: Any) -> None:
    file = write_rows(tmp_path / "rows.jsonl", alpaca_rows(10))
    prepared = prepare(Data(train=(Source(path=str(file)),), max_length=512), tokenizer, cache=tmp_path / "cache")
    code = (
        "import sys; from tonnage.data import PackedDataset; PackedDataset.open(sys.argv[1]).pack(0)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    command = [sys.executable, "-c", code, str(prepared.train.path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert PackedDataset.open(prepared.train.path).num_packs == prepared.train.num_packs
