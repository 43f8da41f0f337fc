"""Reading files: borders of parts, packed and damaged ones, text, and what a directory and a glob hold."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.conftest import alpaca_rows, write_rows
from tonnage.config import Source, read_config
from tonnage.data.reading import rows as rows_module
from tonnage.data.reading.rows import first_rows, lines_of, read_rows
from tonnage.data.sources import files as sources
from tonnage.errors import UserError
from tonnage.forms.conversation import RowError


def rows_of(path: str | Path, **changes: Any) -> list[object]:
    return [row for _, row in numbered(path, **changes)]


def numbered(path: str | Path, **changes: Any) -> list[tuple[int, object]]:
    parts = sources.resolve(Source(path=str(path), **changes), 0).parts
    return [row for part in parts for row in read_rows(part)]


def left_of(path: Path, **changes: Any) -> tuple[str, ...]:
    return sources.resolve(Source(path=str(path), **changes), 0).left


def refused(path: str | Path, **changes: Any) -> str:
    with pytest.raises(UserError) as error:
        rows_of(path, **changes)
    return str(error.value)


@pytest.mark.parametrize("pattern", ["a**/b.jsonl", "****", "**x"])
def test_a_pattern_that_is_none_is_refused(pattern: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model": str(tmp_path), "data": {"train": f"{tmp_path}/{pattern}"}}))
    with pytest.raises(UserError, match="can only be an entire path component"):
        rows_of(f"{tmp_path}/{pattern}")
    with pytest.raises(UserError, match="can only be an entire path component"):
        read_config(config)


def test_a_row_that_is_much_larger_than_its_file_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "MOST_UNPACKED_BYTES", 100_000)
    words = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array(["o" * 1000]))
    many = pa.ListArray.from_arrays(pa.array([0, 2, 300], pa.int32()), words)
    pq.write_table(pa.table({"output": many, "n": [1, 2]}), tmp_path / "rows.parquet")
    first, second = rows_of(str(tmp_path / "rows.parquet"))
    assert first == {"output": ["o" * 1000] * 2, "n": 1}
    assert isinstance(second, RowError)
    assert second.kind == "too_large"
    assert "at most 100,000 are read" in second.reason


@pytest.mark.parametrize("size", [1, 7, 64, 100, 1000, 10**6])
def test_parts_of_any_size_give_every_line_once(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", size)
    rows = alpaca_rows(30)
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows[:20]) + "\n\n\n" + json.dumps(rows[20]) + "\n")
    numbers, found, base = [], [], 0
    for part in sources.resolve(Source(path=str(file)), 0).parts:
        for number, row in read_rows(part):
            numbers.append(base + number)
            found.append(row)
        base += lines_of(part)
    assert found == rows[:21]
    assert numbers == [*range(1, 21), 23]
    assert base == 23


def test_an_array_is_read_the_same_whole_and_by_a_window(tmp_path: Path) -> None:
    rows = [{"text": "x" * n, "nested": [{"a": "]"}]} for n in range(2000)]
    file = write_rows(tmp_path / "rows.json", rows)
    part = sources.resolve(Source(path=str(file)), 0).parts[0]
    assert [row for _, row in first_rows(part)] == [row for _, row in read_rows(part)] == rows


@pytest.mark.parametrize(
    ("text", "good", "kind"),
    [
        ('[{"a": 1}, {"a": 2', 1, "truncated"),
        ('[{"a": 1}', 1, "truncated"),
        ('[{"a": 1}, oops, {"a": 2}]', 1, "invalid_json"),
        ('[{"a": 1} {"a": 2}]', 1, "invalid_json"),
        ('[{"a": 1}] more', 1, "invalid_json"),
        ('[{"a": 1}, 3, {"a": 2}]', 2, "wrong_type"),
        pytest.param("[" * 50_000, 0, "invalid_json", id="too deep"),
    ],
)
def test_damaged_arrays_name_the_row(text: str, good: int, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(text)
    found = rows_of(str(file))
    assert sum(isinstance(row, dict) for row in found) == good
    assert [row.kind for row in found if isinstance(row, RowError)] == [kind]


def test_directories_and_globs(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b/c.json", "b/d.parquet.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_rows(tmp_path / name, [{"text": name}])
    assert rows_of(str(tmp_path)) == [
        {"text": "a.jsonl"},
        {"text": "b/c.json"},
        *rows_of(str(tmp_path / "b/d.parquet.txt")),
    ]
    assert rows_of(str(tmp_path / "*.jsonl")) == [{"text": "a.jsonl"}]
    assert rows_of(str(tmp_path / "**" / "*.json")) == [{"text": "b/c.json"}]
    with pytest.raises(UserError, match="no file fits"):
        rows_of(str(tmp_path / "*.csv"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.xlsx", b"x", "ending in '.xlsx'"),
        ("rows.docx.gz", b"x", "ending in '.docx.gz'"),
        ("rows.jsonl", "{}".encode("utf-16"), "text in UTF-16"),
        ("rows.parquet", b"not parquet", "not a readable Parquet file"),
        ("rows.arrow", b"not arrow", "not a readable Arrow file"),
    ],
)
def test_files_that_are_refused_whole(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        rows_of(str(tmp_path / name))


def test_csv_rows_of_the_wrong_width(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(b'a,b\n1,"two\nlines"\n3\n\n4,5\n')
    first, second, third = rows_of(str(file))
    assert (first, third) == ({"a": "1", "b": "two\nlines"}, {"a": "4", "b": "5"})
    assert isinstance(second, RowError)
    assert second.kind == "invalid_csv"


# Packed files

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: bytes(pa.compress(content, codec="zstd", asbytes=True)),
}
BODY: dict[str, tuple[bytes, list[dict[str, Any]]]] = {
    "jsonl": (b'{"text": "a"}\n\n{"text": "b"}\n', [{"text": "a"}, {"text": "b"}]),
    "json": (b'[{"text": "a"},\n{"text": "b"}]', [{"text": "a"}, {"text": "b"}]),
    "ndjson": (b'{\n"text": "a"\n}\n{"text": "b"}', [{"text": "a"}, {"text": "b"}]),
    "csv": (b"text,n\na,1\nb,2\n", [{"text": "a", "n": "1"}, {"text": "b", "n": "2"}]),
    "tsv": (b"text\tn\na\t1\n", [{"text": "a", "n": "1"}]),
    "txt": (b"a\n\nb\n", [{"text": "a\n\nb\n"}]),
    "MD": (b"# a\n", [{"text": "# a\n"}]),
}


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("kind", BODY)
def test_packed_files_are_read_as_they_are(packing: str, kind: str, tmp_path: Path) -> None:
    content, rows = BODY[kind]
    file = tmp_path / f"rows.{kind}.{packing}"
    file.write_bytes(PACK[packing](content))
    assert rows_of(file) == rows
    file.write_bytes(PACK[packing](content[:10]) + PACK[packing](content[10:]))
    assert rows_of(file) == rows, "packed in two pieces"
    assert numbered(file) == numbered_plain(tmp_path / f"rows.{kind}", content)


def numbered_plain(file: Path, content: bytes) -> list[tuple[int, object]]:
    file.write_bytes(content)
    return numbered(file)


LONG = b"".join(b'{"text": "%s"}\n' % os.urandom(100).hex().encode() for _ in range(300))
WHOLE = {name: pack(LONG) for name, pack in PACK.items()}


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt", "paragraph"])
@pytest.mark.parametrize("damage", ["cut off", "false", "hurt", "a few bytes", "no such block"])
def test_damaged_packed_files_are_refused_or_named(packing: str, kind: str, damage: str, tmp_path: Path) -> None:
    whole = WHOLE[packing]
    hurt = bytearray(whole)
    hurt[len(hurt) // 2 : len(hurt) // 2 + 40] = b"\xff" * 40
    content = {
        "cut off": whole[:-2000],
        "false": LONG,
        "hurt": bytes(hurt),
        "a few bytes": whole[:3],
        "no such block": whole[:10] + b"\xff" * 90,
    }[damage]
    file = tmp_path / f"rows.{'txt' if kind == 'paragraph' else kind}.{packing}"
    file.write_bytes(content)
    documents = {"txt": "line", "paragraph": "paragraph"}.get(kind, "file")
    try:
        found = rows_of(file, documents=documents)
    except UserError:
        assert "not a readable file" in refused(file, documents=documents)
        return
    bad = [row for row in found if isinstance(row, RowError)]
    if packing == "zst" and damage == "hurt":
        return  # blocks without sums: what is read differs, and no reader can know
    assert bad[-1].kind in ("truncated", "unreadable", "invalid_csv")
    assert found[-1] is bad[-1], "nothing after it is read"
    if damage != "hurt":
        assert len(bad) == 1
        assert found == bad or kind != "paragraph", "what was read of a paragraph is none"


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet.gz").write_bytes(b"x")
    assert "all but .parquet and .arrow" in refused(tmp_path / "rows.parquet.gz")


# Plain text

TEXT = b"\xef\xbb\xbfOne.\r\nTwo.\r\n \r\n\r\nThr\xc3\xa9e.\nFour.\n"


@pytest.mark.parametrize("name", ["book.txt", "page.md"])
def test_a_document_of_text_is_a_file_a_paragraph_or_a_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(TEXT)
    assert numbered(file) == [(1, {"text": "One.\r\nTwo.\r\n \r\n\r\nThr\u00e9e.\nFour.\n"})]
    assert numbered(file, documents="paragraph") == [
        (1, {"text": "One.\r\nTwo."}),
        (5, {"text": "Thr\u00e9e.\nFour."}),
    ]
    assert numbered(file, documents="line") == [
        (1, {"text": "One."}),
        (2, {"text": "Two."}),
        (5, {"text": "Thr\u00e9e."}),
        (6, {"text": "Four."}),
    ]


@pytest.mark.parametrize("size", [1, 5, 16, 100])
def test_lines_of_text_in_parts_of_any_size(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", size)
    file = tmp_path / "book.txt"
    file.write_bytes(TEXT)
    assert [row["text"] for row in rows_of(file, documents="line") if isinstance(row, dict)] == [
        "One.",
        "Two.",
        "Thr\u00e9e.",
        "Four.",
    ]


def test_many_texts_are_a_document_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "TEXTS_OF_PART", 3)
    for number in range(7):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    (tmp_path / "5.txt").write_bytes(b"\xff")
    parts = sources.resolve(Source(path=str(tmp_path)), 0).parts
    assert [len(part.files) for part in parts] == [3, 3, 1]
    found = rows_of(tmp_path)
    assert [row["text"] for row in found if isinstance(row, dict)] == [f"text {n}" for n in range(7) if n != 5]
    assert [row.kind for row in found if isinstance(row, RowError)] == ["invalid_utf8"]


def test_rows_in_a_file_of_text_are_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert rows_of(tmp_path / "rows.txt") == [{"text": "a"}, {"text": "b"}]
    (tmp_path / "rows.txt").write_text("{not json}\nand more\n")
    assert rows_of(tmp_path / "rows.txt", documents="line") == [{"text": "{not json}"}, {"text": "and more"}]


def test_text_too_long_to_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_ROW_BYTES", 20)
    file = tmp_path / "book.txt"
    file.write_text(f"one\ntwo\n\n{'x' * 30}\n\n{'three ' * 2}\n{'four ' * 3}\n\nfive\n")
    for documents, good in (("file", 0), ("paragraph", 2), ("line", 5)):
        found = rows_of(file, documents=documents)
        assert sum(isinstance(row, dict) for row in found) == good, documents
        assert {row.kind for row in found if isinstance(row, RowError)} == {"too_large"}


def test_a_zip_is_to_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "two words.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"unzip '.*two words.zip'"):
        rows_of(tmp_path / "two words.zip")


# Text that is none


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "rows.txt", "rows.md"])
def test_utf_16_is_refused_and_the_advice_works(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    for encoding in ("utf-16-le", "utf-16-be"):
        file.write_bytes(("\ufeff" + "text\n").encode(encoding))
        assert f"iconv -f UTF-16 -t UTF-8 {name} > utf8-{name}" in refused(file)


def test_marks_line_ends_and_nuls_of_csv(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(b'\xef\xbb\xbfa,b\r\n1,"two\r\nlines"\r\n3,"fo\xff"\r\n5,s\0x\r\n')
    first, second, third = rows_of(file)
    assert first == {"a": "1", "b": "two\r\nlines"}
    assert second == {"a": "3", "b": "fo\udcff"}, "which tokenising names"
    assert third == {"a": "5", "b": "s\0x"}


def test_lists_of_messages_as_text_in_tables(tmp_path: Path) -> None:
    turns = json.dumps([{"role": "user", "content": 'say "a", b'}, {"role": "assistant", "content": "b"}])
    row = {"messages": turns, "id": "1"}
    (tmp_path / "rows.csv").write_text('messages,id\n"' + turns.replace('"', '""') + '",1\n')
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    assert rows_of(tmp_path / "rows.csv") == rows_of(tmp_path / "rows.parquet") == [row]


def test_a_line_too_long_to_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_ROW_BYTES", 1000)
    for packing in ("", ".gz"):
        file = tmp_path / f"rows.jsonl{packing}"
        content = json.dumps({"text": "x" * 5000}).encode() + b'\n{"text": "a"}\n'
        file.write_bytes(gzip.compress(content) if packing else content)
        (_, error), second = numbered(file)
        assert isinstance(error, RowError)
        assert (error.kind, second) == ("too_large", (2, {"text": "a"}))


# Directories


def test_what_a_directory_holds_besides_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    for name in ("notes.txt", "more/page.md", "README.md", "LICENSE", "LICENSE.txt", ".hidden.jsonl", "_SUCCESS"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("words")
    for name in ("rows.xlsx", "a.png", "b.png", "state.json"):
        (tmp_path / name).write_text("x")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "more")
    assert rows_of(tmp_path) == [{"text": "a"}]
    assert left_of(tmp_path) == ("notes.txt", "more/page.md", "elsewhere/", "2 files ending in .png", "rows.xlsx")


def test_a_folder_that_is_closed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    (tmp_path / "lost+found").mkdir()
    scandir = os.scandir

    def closed(folder: str) -> Any:
        if folder.endswith("lost+found"):
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr("os.scandir", closed)
    assert left_of(tmp_path) == ("lost+found/",)


@pytest.mark.parametrize("named", [(), ("*.jsonl", "*")], ids=["all", "by patterns"])
def test_files_are_compared_as_often_as_there_are_any(
    named: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, comparisons = 200, list[int]()
    for at in range(number):
        write_rows(tmp_path / f"{at}.jsonl", [{"text": "a"}])
    by_hash, equal = Path.__hash__, Path.__eq__

    def hashed(path: Path) -> int:
        comparisons.append(1)
        return by_hash(path)

    def compared(path: Path, other: object) -> bool:
        comparisons.append(1)
        return equal(path, other)

    monkeypatch.setattr("pathlib.PurePath.__hash__", hashed)
    monkeypatch.setattr("pathlib.PurePath.__eq__", compared)
    resolved = sources.resolve(Source(path=str(tmp_path), files=named), 0)
    assert len(resolved.files) == number
    assert len(comparisons) < 20 * number


def test_a_directory_of_texts_has_no_row_files(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text("words")
    (tmp_path / "README.md").write_text("about")
    assert rows_of(tmp_path) == [{"text": "words"}]
    (tmp_path / "one.md").unlink()
    assert "a directory without data files" in refused(tmp_path)


def test_a_directory_of_everything_is_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_FILES", 10)
    for number in range(12):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "a"}\n')
    message = refused(tmp_path)
    assert "more than 10 files" in message
    assert "*.jsonl" in message
    assert len(rows_of(tmp_path / "*.jsonl")) == 12


def test_what_is_no_regular_file_is_refused_and_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    assert "no regular file" in refused(tmp_path / "rows.jsonl")
    assert "no regular file" in refused(tmp_path)
    assert "no regular file" in refused(tmp_path / "*.jsonl")
    (tmp_path / "rows.jsonl").unlink()
    os.mkfifo(tmp_path / "words.txt")
    assert "no regular file" in refused(tmp_path)
    (tmp_path / "words.txt").unlink()
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "gone")
    assert "rows.jsonl is a link that leads nowhere" in refused(tmp_path)
    for path in ("/dev/zero", "/dev/null"):
        assert "no regular file" in refused(path)
    assert refused("/proc/self/fd")
    for path, reason in (("a" * 5000, "a path of at most"), ("a\0b", "without the character NUL")):
        with pytest.raises(ValueError, match=reason):  # what is no path never gets to where files are read
            Source(path=path)


def test_a_header_that_names_a_column_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("text,id,text\na,1,b\n")
    (error,) = rows_of(file)
    assert isinstance(error, RowError)
    assert error.reason.startswith("the header names a column 'text' twice; 19 bytes")
    file.write_text("text,,\na,1,b\n")
    assert rows_of(file) == [{"text": "a", "": "b"}], "columns without a name are those of a spreadsheet"


def test_documents_of_files_that_hold_no_text_are_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    assert "documents: line, and no file of plain text" in refused(file, documents="line")


def test_settings_of_splits_mean_nothing_for_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("text\na\n")
    assert "name and revision and split for a file" in refused(file, name="x", revision="y", split="test")
    assert "leave name out" in refused(tmp_path / "*.csv", name="x")
    assert rows_of(file) == [{"text": "a"}]
