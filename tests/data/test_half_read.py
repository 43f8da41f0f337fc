"""Damage at every place of a file: what is read, named as bad, and left unread is together the whole file."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tonnage.config import Data, Source
from tonnage.data import DataError, Prepared, prepare
from tonnage.data.account import Account
from tonnage.data.reading.csv_text import separated_by
from tonnage.data.reading.rows import read_rows
from tonnage.data.sources.files import resolve
from tonnage.data.telling import LINES, remarks
from tonnage.data.tokens.documents import Documents, HalfRead, half_read_files
from tonnage.errors import UserError
from tonnage.forms.conversation import RowError

ROWS = [
    *({"prompt": f"Which day, {n}?", "completion": f"It is day {n}."} for n in range(6)),
    {"prompt": "Say it twice, slowly", "completion": "It is.\nIt, is."},
    {"prompt": 'Who said "no"?', "completion": '"I", she said.'},
    *({"prompt": f"Which year, {n}?", "completion": f"{n}, I think"} for n in range(4)),
]


def as_csv(rows: list[dict[str, str]], quoting: Any = csv.QUOTE_MINIMAL, separator: str = ",") -> str:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), quoting=quoting, delimiter=separator, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


FILES: dict[str, tuple[str, str]] = {
    "lines": ("rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)),
    "array": ("rows.json", json.dumps(ROWS)),
    "printed array": ("rows.json", json.dumps(ROWS, indent=1)),
    "holder": ("rows.json", json.dumps({"version": "1.0", "data": ROWS, "by": ["me"]})),
    "values": ("rows.json", "\n".join(json.dumps(row, indent=1) for row in ROWS)),
    "csv": ("rows.csv", as_csv(ROWS)),
    "csv, all quoted": ("rows.csv", as_csv(ROWS, csv.QUOTE_ALL)),
    "csv, semicolons": ("rows.csv", as_csv(ROWS, separator=";")),
    "tsv": ("rows.tsv", as_csv(ROWS, separator="\t")),
}


def put_in(mark: bytes, content: bytes, at: int) -> bytes:
    return content[:at] + mark + content[at:]


DAMAGE: dict[str, Callable[[bytes, int], bytes]] = {
    "cut": lambda content, at: content[:at],
    "a byte gone": lambda content, at: content[:at] + content[at + 1 :],
    **{f"{mark!r} put in": partial(put_in, mark.encode()) for mark in ('"', "]", "}", "{", "\n", ",", "\0")},
}
LONGEST = max(len(json.dumps(row, indent=1)) for row in ROWS) + 10


def read(path: Path, content: bytes) -> tuple[list[dict[str, Any]], list[RowError]] | None:
    """Rows that are read and rows that are bad; ``None`` where the file is refused."""
    path.write_bytes(content)
    try:
        found = [row for part in resolve(Source(path=str(path)), 0).parts for _, row in read_rows(part)]
    except UserError:
        return None
    good = [row for row in found if isinstance(row, dict)]
    return good, [row for row in found if isinstance(row, RowError)]


@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", FILES)
def test_damage_at_every_place_leaves_nothing_out_in_silence(kind: str, damage: str, step: int, tmp_path: Path) -> None:
    name, text = FILES[kind]
    whole = text.encode()
    size = len(whole) // len(ROWS)
    for at in range(0, len(whole), step):
        content = DAMAGE[damage](whole, at)
        if not content or (found := read(tmp_path / name, content)) is None:
            continue
        good, bad = found
        if not any(row in ROWS for row in good):  # which the first look at rows refuses
            continue
        changed = [row for row in good if row not in ROWS]
        lost = [row for row in ROWS if row not in good]
        unread = sum(error.unread for error in bad)
        shown = f"{damage} at {at}: {content[max(at - 30, 0) : at + 30]!r} {bad}"
        assert unread <= len(content), shown
        assert all(len(str(text)) <= LONGEST for row in changed for text in row.values()), shown
        missing = unread + max(len(whole) - len(content) - 1, 0)
        assert len(lost) <= 2 * (len(bad) + len(changed)) + missing // (size // 2), shown
        assert len(changed) <= 2, shown


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: bytes(pa.compress(content, codec="zstd", asbytes=True)),
}
MANY = [{"prompt": f"Which day, {n}?", "completion": f"It is day {n * 7919 % 1000}."} for n in range(1000)]


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_packed_file_that_is_cut_is_not_read_as_a_whole(packing: str, kind: str, tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in MANY)
    text = {"jsonl": lines, "json": json.dumps(MANY), "csv": as_csv(MANY)}[kind]
    content = PACK[packing](text.encode())
    for at in range(40, len(content), len(content) // 40):
        found = read(tmp_path / f"rows.{kind}{packing}", content[:at])
        if found is not None:
            assert found[1][-1].unread == at
            assert all(row in MANY for row in found[0])


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz"])
def test_what_was_unpacked_before_the_damage_is_read(packing: str, tmp_path: Path) -> None:
    rows = [{"text": f"{number} {number * 7919}"} for number in range(60_000)]
    for kind, text in {"jsonl": "".join(json.dumps(row) + "\n" for row in rows), "json": json.dumps(rows)}.items():
        content = PACK[packing](text.encode())
        found = read(tmp_path / f"rows.{kind}{packing}", content[: len(content) * 9 // 10])
        assert found is not None
        assert len(found[0]) > (20_000 if packing == ".bz2" else 50_000)  # which has blocks of 900 kB
        assert found[0] == rows[: len(found[0])]
        assert [error.unread for error in found[1]] == [len(content) * 9 // 10]


def test_a_packed_array_that_is_no_json_leaves_a_share_of_its_bytes(tmp_path: Path) -> None:
    rows = json.dumps(MANY)
    at = rows.index('{"prompt": "Which day, 250?"')
    content = gzip.compress((rows[:at] + "oops, " + rows[at:]).encode())
    found = read(tmp_path / "rows.json.gz", content)
    assert found is not None
    assert len(found[0]) == 250
    assert found[1][0].unread == pytest.approx(0.75 * len(content), rel=0.02)


def test_a_row_group_that_is_damaged_leaves_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(MANY), path, row_group_size=250, use_dictionary=False, compression="zstd")
    described = pq.ParquetFile(path).metadata.row_group(1)
    stored = sum(described.column(at).total_compressed_size for at in range(2))
    content = bytearray(path.read_bytes())
    start = described.column(0).data_page_offset
    content[start : start + 200] = b"\xff" * 200
    found = read(path, bytes(content))
    assert found is not None
    assert len(found[0]) == 750
    assert [error.unread for error in found[1]] == [stored]


def test_a_record_batch_that_is_damaged_leaves_those_after_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    batches = [pa.RecordBatch.from_pylist(MANY[at : at + 100]) for at in range(0, len(MANY), 100)]
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    content = bytearray(path.read_bytes())
    at = content.index(b"Which day, 500?")
    offsets = content.rindex((15).to_bytes(4, "little"), 0, at)  # where the second text of the sixth batch begins
    content[offsets : offsets + 4] = b"\xff\xff\xff\x7f"
    found = read(path, bytes(content))
    assert found is not None
    assert len(found[0]) == 500
    assert [error.unread for error in found[1]] == [pytest.approx(len(content) / 2, abs=1)]


@pytest.mark.parametrize(
    ("name", "header", "kind"),
    [
        ("rows.csv", "prompt,completion", "csv"),
        ("rows.csv", "prompt;completion", "semicolons"),
        ("rows.csv", "prompt\tcompletion", "tsv"),
        ("rows.csv", '\ufeff"prompt, or not";completion', "semicolons"),
        ("rows.tsv", "prompt,completion", "csv"),
        ("rows.tsv", "prompt\tcompletion, or not", "tsv"),
        ("rows.csv", "text", "csv"),
        ("rows.csv", "x" * 200_000, "csv"),
    ],
)
def test_the_separator_is_the_header_s(name: str, header: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(f"{header}\n")
    assert separated_by(tmp_path / name) == kind


def test_semicolons_are_read(tmp_path: Path) -> None:
    found = read(tmp_path / "rows.csv", b'prompt;completion\n"Which; day?";Friday, or so.\n')
    assert found == ([{"prompt": "Which; day?", "completion": "Friday, or so."}], [])


@pytest.mark.parametrize(
    ("text", "good", "reason", "unread"),
    [
        ('q1,a\nq2,"b\nq3,c\nq4,d\n', 1, "lines 3 to 5: the quote that opens on line 3 is never closed", 10),
        ('"q1","a"\n"q2","b\n"q3","c"\n"q4","d"\n', 2, "lines 3 to 4: ',' expected after", 9),
        ('q1,"He said "hi" to me\nYes, indeed"\nq2,b\n', 1, "lines 2 to 3: ',' expected after", 13),
        ('q1,"He said ""hi"" to me\nYes, indeed"\nq2,b\n', 2, "", 0),
        ('q1,The day."\nq2,b\n', 1, "line 2: a quote too many, or too few", 0),
        ('q1,a,b\nq2,c\n', 1, "3 fields where the header has 2", 0),
        ('q1,a,"b\nc"\nq2,c\n', 1, "lines 2 to 3: 3 fields where the header has 2", 3),
    ],
)  # fmt: skip
def test_a_quote_is_named_by_its_line(text: str, good: int, reason: str, unread: int, tmp_path: Path) -> None:
    found = read(tmp_path / "rows.csv", b"prompt,completion\n" + text.encode())
    assert found is not None
    assert len(found[0]) == good
    assert [error.unread for error in found[1]] == ([unread] if reason else [])
    assert all(error.reason.startswith(reason) for error in found[1])


# What becomes of it


def prepared(path: Path, tokenizer: Any, cache: Path, **options: Any) -> Prepared:
    return prepare(
        Data(train=(Source(path=str(path)),), max_length=512, template="plain", **options), tokenizer, cache=cache
    )


BROKEN = {
    "array": ("rows.json", json.dumps(MANY).replace('{"prompt": "Which day, 10?"', '{, "prompt": "Which day, 10?"')),
    "holder": ("rows.json", json.dumps({"data": MANY}).replace('"It is day 190."}, ', '"It is day 190."}], ', 1)),
    "csv": (
        "rows.csv",
        as_csv(MANY).replace('"', "").replace("day, ", "day ").replace("It is day 190.", '"It is day 190.'),
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_half_a_file_is_refused_even_where_bad_rows_are_skipped(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    name, text = BROKEN[kind]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError) as refused:
        prepared(path, tokenizer, tmp_path / "cache", on_bad_row="skip")
    (problem,) = refused.value.problems
    account = refused.value.account
    (source,) = account.sources
    assert source.bytes == len(text)
    assert 0.9 < source.bytes_unread / len(text) < 1
    assert f"of the file's {len(text):,} bytes are not read: " in problem.found
    assert problem.found.endswith(f"; {source.bytes_unread:,} bytes of the file are not read because of it")
    assert problem.needed == "at most 1.00% of a file"
    assert f"bytes unread {source.bytes_unread:,}" == f"bytes unread {LINES['bytes unread'](source)}"
    assert any("are not read, behind damage" in str(line) for line in remarks(account))
    assert Account.from_json(json.loads(json.dumps(account.to_json()))) == account
    whole = prepared(path, tokenizer, tmp_path / "cache", on_bad_row="skip", max_loss=1.0).account.total
    assert (whole.rows_bad, whole.bytes_unread) == (1, source.bytes_unread)
    with pytest.raises(DataError) as refused:
        prepared(path, tokenizer, tmp_path / "cache")
    assert "on_bad_row: skip" not in str(refused.value), "which would not help"


def test_a_little_that_is_not_read_is_said(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.csv"
    text = as_csv(MANY, csv.QUOTE_ALL)
    path.write_text(text.replace('It is day 190."', "It is day 190.", 1))
    whole = prepared(path, tokenizer, tmp_path / "cache", on_bad_row="skip").account.total
    assert (whole.rows_packed, whole.rows_bad) == (998, 1)
    assert 0 < whole.bytes_unread < 50


def test_bad_rows_are_gone_through_once_for_all_sources(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = list[Documents]()

    def counted(documents: Documents) -> list[HalfRead]:
        readings.append(documents)
        return half_read_files(documents)

    monkeypatch.setattr("tonnage.data.selection.half_read_files", counted)
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sources = tuple(Source(path=str(tmp_path / f"{name}.jsonl")) for name in "abc")
    prepare(Data(train=sources, max_length=512, template="plain"), tokenizer, cache=tmp_path / "cache")
    assert len(readings) == 1
