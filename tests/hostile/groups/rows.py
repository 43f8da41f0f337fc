"""Rows and their files: every form and packing, right ones that must be counted to the token, and broken ones that must
not pass."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hostile import mutations
from hostile.case import Case
from hostile.forking import Ended
from hostile.stock import Stock

Row = dict[str, Any]
FLAT = ("alpaca", "completion")
"""Forms whose rows are plain columns."""


@dataclass(frozen=True)
class Made:
    """A row, and what is trained of it."""

    row: Row
    supervised: int
    """Tokens: bytes of the answers and a closing token for each."""


def make(chance: random.Random, folder: Path, stock: Stock) -> Case:
    """Rows of one form in a file of one kind, of which some may be broken."""
    work = folder / "work"
    way = chance.randrange(10)
    if way == 0:
        return _places(chance, work, stock)
    if way == 1:
        return _heavy(chance, work, stock)
    form = chance.choice(sorted(FORMS))
    made = [FORMS[form](chance) for _ in range(chance.choice((1, 2, 5, 20)))]
    rows, broken, several = [one.row for one in made], "", False
    expected: int | None = sum(one.supervised for one in made)
    if way < 5:
        at = chance.randrange(len(rows))
        rows[at], broken = chance.choice(BREAKS)(chance, rows[at], form)
        several = isinstance(rows[at], list)  # which may be rows themselves
        broken = "" if several and isinstance(next(iter(rows[at]), None), dict) else broken
        expected = None
    elif way < 7:
        at = chance.randrange(len(rows))
        rows[at], expected = mutations.changed(chance, rows[at], chance.choice((1, 1, 2))), None
    packing = chance.choice(sorted(FLAT_PACKINGS if form in FLAT and not broken and way >= 7 else PACKINGS))
    try:
        name, content = {**PACKINGS, **FLAT_PACKINGS}[packing](rows)
    except (ValueError, TypeError, AttributeError, OverflowError, pa.ArrowException):  # which such a file cannot hold
        name, content = PACKINGS["lines"](rows)
    damaged = False
    if way >= 7 and chance.randrange(3) == 0:
        content, cut = _damaged(chance, content, packing)
        damaged, broken, expected = True, cut, None
    (work / name).write_bytes(content)
    skip = chance.randrange(4) == 0
    sound = way >= 7 and not damaged
    keys: dict[str, Any] = {"train": name, "max_length": 512}
    if skip:
        keys["on_bad_row"] = "skip"
    (work / "config.yaml").write_text(json.dumps(stock.config(data=keys, output="run")))
    use = chance.randrange(8)
    if use == 0 and form != "text":
        asks = ["generate", str(stock.model("llama")), "--file", name, "--template", "plain", "--max-new-tokens", "2"]
        return Case(
            [
                asks,
            ]
            if chance.randrange(2)
            else [[*asks, "--output", "answers.jsonl"]]
        )
    if use == 1:
        words = [
            "eval",
            str(stock.model("llama")),
            "--data",
            name,
            "--template",
            "plain",
            "--exact-match",
            "0",
            "--max-length",
            "512",
        ]
        return Case([words], broken=broken)
    if use == 2 and chance.randrange(4) == 0:
        return Case(
            [["train", "config.yaml", "--prepare"], ["work", "run"]],
            broken=broken if not skip else "",
            sound=sound and len(rows) > 4,
        )

    def counts(ended: Sequence[Ended]) -> str:
        if ended[-1].status:
            return ""
        total = json.loads(ended[-1].out)["account"]["total"]
        most = sum(_conversations(row) for row in rows) if form == "instances" else len(rows)
        if not (damaged or several) and not len(rows) <= total["rows_read"] <= most and form != "tree":
            return f"{total['rows_read']} rows were read of {len(rows)}"
        if damaged and total["bytes_unread"] > 0.01 * total["bytes"]:
            return f"{total['bytes_unread']} of {total['bytes']} bytes were not read"
        if broken and skip and not total["rows_bad"]:
            return f"no row was bad, although {broken}"
        if expected is not None and not broken and total["supervised"]["read"] != expected:
            return f"{total['supervised']['read']} supervised tokens of {expected}"
        return ""

    return Case([["inspect", "config.yaml", "--json"]], broken=broken, sound=sound, check=counts,
                named=("rows_bad",) if skip else ())  # fmt: skip


def _words(chance: random.Random) -> str:
    alphabet = chance.choice(("abcdefgh", "abcdefgh", "äöü漢字かな", "🙂\u0301\u200d", " \t.,;:!?\"'\\{}[]<>|"))
    text = "".join(chance.choices(alphabet, k=chance.randrange(1, 20)))
    return text if text.strip() else "a"


def _trained(*answers: str) -> int:
    return sum(len(answer.encode()) + 1 for answer in answers)


def _alpaca(chance: random.Random) -> Made:
    answer = _words(chance)
    return Made(
        {"instruction": "i" + _words(chance), "input": chance.choice(("", _words(chance))), "output": answer},
        _trained(answer),
    )


def _completion(chance: random.Random) -> Made:
    answer = _words(chance)
    return Made({"prompt": "p" + _words(chance), "completion": answer}, _trained(answer))


def _turns(chance: random.Random, role: str, content: str, names: tuple[str, str]) -> tuple[list[Row], int]:
    turns: list[Row] = []
    trained = 0
    for _ in range(chance.choice((1, 1, 2, 3))):
        answer, asked = _words(chance), _words(chance)
        turns += [{role: names[0], content: asked}, {role: names[1], content: answer}]
        flag = chance.choice((None, None, None, True, 1, False, 0)) if trained else None
        if flag is not None:
            turns[-1][chance.choice(("train", "loss", "weight"))] = flag
        if flag is None or flag:
            trained += _trained(answer)
    return turns, trained


def _messages(chance: random.Random) -> Made:
    turns, trained = _turns(chance, "role", "content", chance.choice((("user", "assistant"), ("human", "ai"))))
    row: Row = {"messages": turns}
    if chance.randrange(4) == 0:
        row["system"] = _words(chance)
    if chance.randrange(4) == 0:
        row["score"] = 3
    if chance.randrange(5) == 0:
        row["messages"] = json.dumps(turns)
    return Made(row, trained)


def _sharegpt(chance: random.Random) -> Made:
    turns, trained = _turns(chance, "from", "value", chance.choice((("human", "gpt"), ("user", "assistant"))))
    return Made({"conversations": turns}, trained)


def _pairs(chance: random.Random) -> Made:
    answers = [_words(chance) for _ in range(chance.choice((1, 3)))]
    return Made({"conversation": [{"input": "q", "output": answer} for answer in answers]}, _trained(*answers))


def _strings(chance: random.Random) -> Made:
    answers = [_words(chance) for _ in range(chance.choice((1, 3)))]
    return Made({"data": [word for answer in answers for word in ("q", answer)]}, _trained(*answers))


def _gemini(chance: random.Random) -> Made:
    answer = _words(chance)
    turns = [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": answer}]}]
    return Made({"contents": turns}, _trained(answer))


def _conversations(row: Any) -> int:
    """How many rows a seed task is at most: one for each of its instances."""
    instances = row.get("instances") if isinstance(row, dict) else None
    return max(1, len(instances)) if isinstance(instances, list) else 1


def _instances(chance: random.Random) -> Made:
    answer = _words(chance)
    return Made({"instruction": "do", "instances": [{"input": "", "output": answer}]}, _trained(answer))


def _tree(chance: random.Random) -> Made:
    answers = [f"{number}{_words(chance)}" for number in range(chance.choice((1, 2)))]
    replies = [{"text": answer, "role": "assistant", "replies": []} for answer in answers]
    return Made({"prompt": {"text": "q", "role": "prompter", "replies": replies}}, _trained(*answers))


FORMS: dict[str, Callable[[random.Random], Made]] = {
    "alpaca": _alpaca,
    "completion": _completion,
    "messages": _messages,
    "sharegpt": _sharegpt,
    "pairs": _pairs,
    "strings": _strings,
    "gemini": _gemini,
    "instances": _instances,
    "tree": _tree,
}


def _answer_gone(chance: random.Random, row: Row, form: str) -> tuple[Row, str]:
    empty = chance.choice((None, "", " \n", 3, ["a"], True))
    changed: Row = json.loads(json.dumps(row))
    match form:
        case "alpaca":
            changed["output"] = empty
        case "completion":
            changed["completion"] = empty
        case "messages" | "sharegpt":
            name = "messages" if form == "messages" else "conversations"
            if isinstance(changed[name], str):
                changed[name] = json.loads(changed[name])
            changed[name][-1]["content" if form == "messages" else "value"] = None if empty == ["a"] else empty
        case "pairs":
            changed["conversation"][-1]["output"] = empty
        case "strings":
            changed["data"][-1] = "" if empty in (None, " \n") else empty
        case "gemini":
            changed["contents"][-1]["parts"] = [{"text": empty}] if empty != ["a"] else []
        case "instances":
            changed["instances"][0]["output"] = empty
        case "tree":
            changed["prompt"]["replies"] = []
    return changed, f"an answer is {empty!r}"


def _beside(chance: random.Random, row: Row, form: str) -> tuple[Row, str]:
    """A field that gives the row another meaning."""
    more: Row = chance.choice(
        (
            {"image": "a.png"},
            {"images": ["a.png"]},
            {"audio": {"path": "a.wav"}},
            {"label": True},
            {"label": False},
            {"chosen": "a", "rejected": "b"},
            {"kto_tag": True},
            {"loss_weight": "heavy"},
            {"loss_weight": -1},
            {"train_detail": [1]},
        )
    )
    return {**row, **more}, f"there is {next(iter(more))} beside"


def _turn(chance: random.Random, row: Row, form: str) -> tuple[Row, str]:
    """A message that cannot be meant so."""
    if form not in ("messages", "sharegpt"):
        return _answer_gone(chance, row, form)
    name, role, content = ("messages", "role", "content") if form == "messages" else ("conversations", "from", "value")
    turns = json.loads(row[name]) if isinstance(row[name], str) else json.loads(json.dumps(row[name]))
    way = chance.randrange(7)
    if way == 0:
        turns[-1][role] = chance.choice(("narrator", "", "assistent", "x\x1b[31m"))
        return {**row, name: turns}, "a role is unknown"
    if way == 1:
        del turns[chance.randrange(len(turns))][role]
        return {**row, name: turns}, "a message has no role"
    if way == 2:
        turns[-1][chance.choice(("train", "loss", "weight"))] = chance.choice(("maybe", -1, [True], "true", 1e30))
        return {**row, name: turns}, "a flag is none"
    if way == 3:
        turns[0][content] = [{"type": "image_url", "image_url": {"url": "a"}}, {"type": "text", "text": "a"}]
        return {**row, name: turns}, "a message holds an image"
    if way == 4:
        turns[0][content] = "<image>\nWhat is it?"
        return {**row, name: turns}, "a message holds a placeholder"
    if way == 5:
        turns[-1]["train_detail"] = [{"begin_offset": 0, "end_offset": 1, "train": False}]
        return {**row, name: turns}, "there is train_detail"
    turns = [turn for number, turn in enumerate(turns) if number % 2 == 0]
    return {**row, name: turns}, "there is no answer"


def _no_row(chance: random.Random, row: Row, form: str) -> tuple[Any, str]:
    return chance.choice((3, "a", [1, 2], None, True, [row], {})), "a row is none"


BREAKS: tuple[Callable[[random.Random, Row, str], tuple[Any, str]], ...] = (
    *(_answer_gone, _beside, _beside, _turn, _turn, _no_row),
)


def _lines(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _parquet(rows: list[Row]) -> bytes:
    file = io.BytesIO()
    names = dict.fromkeys(name for row in rows for name in row)  # Arrow takes those of the first row alone
    pq.write_table(pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows]), file)
    return file.getvalue()


def _csv(rows: list[Row], mark: str = ",") -> bytes:
    file = io.StringIO(newline="")
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(file, names, delimiter=mark)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def _zst(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)  # type: ignore[no-any-return]


PACKINGS: dict[str, Callable[[list[Row]], tuple[str, bytes]]] = {
    "lines": lambda rows: ("rows.jsonl", _lines(rows)),
    "list": lambda rows: ("rows.json", json.dumps(rows).encode()),
    "printed": lambda rows: ("rows.json", "\n".join(json.dumps(row, indent=2) for row in rows).encode()),
    "holds": lambda rows: (
        "rows.json",
        json.dumps({"version": "1", "data": rows}, indent=1, ensure_ascii=False).encode(),
    ),
    "gz": lambda rows: ("rows.jsonl.gz", gzip.compress(_lines(rows), mtime=0)),
    "zst": lambda rows: ("rows.jsonl.zst", _zst(_lines(rows))),
    "parquet": lambda rows: ("rows.parquet", _parquet(rows)),
}
FLAT_PACKINGS: dict[str, Callable[[list[Row]], tuple[str, bytes]]] = {
    "csv": lambda rows: ("rows.csv", _csv(rows)),
    "tsv": lambda rows: ("rows.tsv", _csv(rows, "\t")),
    "csv.gz": lambda rows: ("rows.csv.gz", gzip.compress(_csv(rows), mtime=0)),
    "parquet": PACKINGS["parquet"],
}


def _damaged(chance: random.Random, content: bytes, packing: str) -> tuple[bytes, str]:
    """A file cut short, where that cannot be right, with a mark of its format at any place, or with anything else done
    to its bytes."""
    way = chance.randrange(4)
    if way < 2:
        return mutations.content(chance, content), ""
    if way == 2:
        at = chance.randrange(len(content) + 1)
        return content[:at] + chance.choice((b'"', b"]", b"}", b"{", b",", b";", b"\n", b"\0")) + content[at:], ""
    if packing in ("csv", "tsv"):
        return content + b'"open', "a quote is never closed"
    at = len(content) - chance.randrange(3, max(4, len(content) // 2))
    if packing in ("lines", "printed") and (at < 1 or content[at - 1 : at] in b"}\n" or content[at : at + 1] == b"\n"):
        return content[:-3], "a file is cut"
    return content[: max(at, 1)], "a file is cut"


def _places(chance: random.Random, work: Path, stock: Stock) -> Case:
    """Sources that are no files of rows."""
    way = chance.randrange(10)
    path, broken = "rows.jsonl", "there are no rows"
    if way == 0:
        path = chance.choice(
            ("/", "/proc", "/sys", "/dev", "/dev/zero", "/dev/stdin", "/dev/fd", "/proc/self", "..", ".")
        )
    elif way == 1:
        os.mkfifo(work / path)
    elif way == 2:
        (work / path).symlink_to(chance.choice(("/dev/zero", "rows.jsonl", "nothing")))
    elif way == 3:
        (work / path).mkdir()
    elif way == 4:
        path = chance.choice(
            ("x" * 5000, "*" * 200, "[" * 300, "**/" * 50 + "*.jsonl", "\0", "a\nb", "../outside/*", "{a,b}")
        )
        broken = "" if path == "../outside/*" else broken  # a text, and whoever names it may train on it
    elif way == 5:
        (work / "rows").mkdir()
        (work / "rows" / "again").symlink_to(work / "rows")
        (work / "rows" / "secret.jsonl").symlink_to(work.parent / "outside" / "secret.txt")
        path = "rows"
    elif way == 6:
        (work / path).write_bytes(b"")
    elif way == 7:
        (work / path).write_bytes(
            chance.choice((b"\n\n\n", b"[]", b"{}", b"null", b"[[]]", b"[null]", b'{"data": []}', b"\xef\xbb\xbf"))
        )
    elif way == 8:
        path = "rows.jsonl.gz"
        (work / path).write_bytes(gzip.compress(b" " * (64 << 20), 1))
    else:
        path = chance.choice(("rows.txt", "rows.md"))
        (work / path).write_bytes(mutations.content(chance, b"one\n\ntwo\n" * 50))
        broken = ""
    config = stock.config(data={"train": path, "validation": chance.choice((0.0, 0.5))}, output="run")
    (work / "config.yaml").write_text(json.dumps(config))
    words = chance.choice(
        (["inspect", "config.yaml", "--json"], ["plan", "config.yaml"], ["train", "config.yaml", "--dry-run"])
    )
    return Case([words], broken=broken)


def _heavy(chance: random.Random, work: Path, stock: Stock) -> Case:
    """Rows that are large in one way or another."""
    way, name = chance.randrange(7), "rows.jsonl"
    number = chance.choice((100, 5000, 100_000))
    row: Any
    if way == 0:
        row = {"messages": [{"role": ("user", "assistant")[n % 2], "content": "a"} for n in range(number)]}
    elif way == 1:
        row = {"instruction": "i", "output": "o" * number * 10}
    elif way == 2:
        row = {"instruction": "i", "output": "o", **{f"field {n}": n for n in range(number)}}
    elif way == 3:
        (work / name).write_text('{"instruction": "i", "output": "o", "x": ' + mutations.deep(chance) + "}\n")
        row = None
    elif way == 4:
        node: Row = {"text": "a", "role": "assistant", "replies": []}
        for n in range(min(number, 400)):
            node = {
                "text": "a",
                "role": ("prompter", "assistant")[n % 2],
                "replies": [node] * chance.choice((1, 1, 1, 2)) if n < 300 else [node],
            }
        row = (
            {"prompt": {"text": "q", "role": "prompter", "replies": [node]}}
            if chance.randrange(2)
            else {
                "prompt": {
                    "text": "q",
                    "role": "prompter",
                    "replies": [{"text": str(n), "role": "assistant"} for n in range(number)],
                }
            }
        )
        if len(json.dumps(row, check_circular=False)) > 1 << 24 if _small(row) else True:
            row = {"prompt": {"text": "q", "role": "prompter", "replies": [{"text": "a", "role": "assistant"}] * 5000}}
    elif way == 5:
        name = "rows.parquet"
        number = min(number, 30_000)
        words = pa.DictionaryArray.from_arrays(pa.array([0] * number, pa.int32()), pa.array(["o" * 10_000]))
        column = (
            pa.ListArray.from_arrays(pa.array([0, number], pa.int32()), words) if chance.randrange(2) else words[:500]
        )
        pq.write_table(pa.table({"instruction": column, "output": column}), work / name)
        row = None
    else:
        row = {"instruction": "i", "output": "o", "loss_weight": 1, "n": int("9" * 400)}
    if row is not None:
        (work / name).write_text(json.dumps(row) + "\n")
    over = chance.choice(("error", "drop", "truncate", "split"))
    data = {"train": name, "over_length": over, "max_loss": 1.0}
    (work / "config.yaml").write_text(json.dumps(stock.config(data=data, output="run")))
    return Case([["inspect", "config.yaml"]])


def _small(row: Any, most: int = 50_000) -> bool:
    """Whether a value that holds itself many times over is small when written out."""
    waiting, count = [row], 0
    while waiting and count < most:
        one = waiting.pop()
        count += 1
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else []
    return count < most
