"""JSON that we wrote comes back as it was typed, or is refused with its key; texts are read within bounds."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge

from tonnage.errors import UserError
from tonnage.files.reading import NotJson, parse_object, parse_record, read_bytes, read_object, read_record, read_text


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    step: Annotated[int, Ge(0)]
    kind: Literal["a", "b"]
    rate: float
    inner: Inner
    others: dict[str, Inner] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


SOUND = Record(3, "a", 2, Inner("é", (1, 2)), {"x": Inner("y")}, {"any": [1, None, {"thing": True}]})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(asdict(SOUND) | {"of a newer version": 1}))
    assert read_record(path, Record) == SOUND
    assert read_object(path, Record)["of a newer version"] == 1
    assert parse_record('{"step": 0, "kind": "b", "rate": 1e-3, "inner": {"name": ""}}', Record, "x").rate == 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, r"step is -1\n  needed: greater than or equal to 0"),
        ({"step": "3"}, 'step is "3"'),
        ({"step": 3.0}, "step is 3.0"),
        ({"step": True}, "step is true"),
        ({"step": None}, "step is null"),
        ({"step": 2**63}, "the number 9223372036854775808 is too large"),
        ({"rate": 1e300}, r"the number 1e\+300 is too large"),
        ({"kind": "c"}, "kind is \"c\"\n  needed: 'a' or 'b'"),
        ({"inner": {}}, "inner.name is missing"),
        ({"inner": []}, r"inner is \[\]"),
        ({"inner": {"name": "x", "sizes": [1, "2"]}}, 'inner.sizes.1 is "2"'),
        ({"others": {"k" * 200: 1}}, r"others.k+\.\.\. is 1"),
        ({"more": {"a": 10**400}}, "too large"),
        ({"step": "x", "rate": "y", "kind": "z", "inner": 0}, "1 more values like that"),
    ],
)
def test_what_has_another_type_is_refused_with_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_record(json.dumps(asdict(SOUND) | changes), Record, "place.json")
    assert all(problem.where == "place.json" for problem in caught.value.problems)
    assert not isinstance(caught.value, NotJson)


@pytest.mark.parametrize("text", ["", "{", "{]", "x", b"\xff", '{"step": 1}x', "\0"])
def test_what_is_no_json(text: str | bytes) -> None:
    with pytest.raises(NotJson, match="no JSON"):
        parse_object(text, Record, "place.json")


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", '{"step": -Infinity}', "9" * 5000, "1e999", "[" * 200 + "]" * 200]
)
def test_numbers_and_depths_that_json_has_not(text: str) -> None:
    with pytest.raises(UserError, match=r"place.json: ") as caught:
        parse_object(text, Record, "place.json")
    assert len(str(caught.value)) < 300
    with pytest.raises(UserError):
        parse_object("[" * 100_000, Record, "place.json")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_record(tmp_path / "none.json", Record)
    with pytest.raises(UserError, match="a directory"):
        read_record(tmp_path, Record)
    with pytest.raises(UserError, match="a device"):
        read_record(Path("/dev/zero"), Record)


def test_texts_are_bounded_and_regular(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(path, 6, "a text") == "abc"
    with pytest.raises(UserError, match=r"6 bytes(.|\n)*a text, of at most 5 bytes"):
        read_text(path, 5, "a text")
    path.write_bytes(b"a\xff")
    with pytest.raises(UserError, match=r"byte 1 \(0xff\) is not UTF-8"):
        read_text(path, 5, "a text")
    for kind in (FileNotFoundError, IsADirectoryError):
        with pytest.raises(kind):
            read_bytes(tmp_path if kind is IsADirectoryError else tmp_path / "none", 5, "a text")


def test_pipes(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    began = time.monotonic()
    with pytest.raises(UserError, match="nobody writes"):
        read_bytes(path, 5, "a text")
    assert time.monotonic() - began < 30

    def write(content: bytes, pause: float) -> None:
        with path.open("wb") as file:
            time.sleep(pause)
            file.write(content)

    for content, pause in ((b"late", 0.7), (b"x" * 100, 0)):
        writer = threading.Thread(target=write, args=(content, pause))
        writer.start()
        if len(content) < 5:
            assert read_bytes(path, 5, "a text") == content
        else:
            with pytest.raises(UserError, match="a pipe of more than 5 bytes"):
                read_bytes(path, 5, "a text")
        writer.join()
