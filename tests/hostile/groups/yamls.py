"""The text of a config: wide, deep, doubled, tagged, aliased, cut, or no text at all."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import yaml

from hostile import mutations
from hostile.case import Case
from hostile.stock import Stock
from hostile.strings import CANARY


def make(chance: random.Random, folder: Path, stock: Stock) -> Case:
    """A config that is right but for its text."""
    path = folder / "work" / "config.yaml"
    right = yaml.safe_dump(stock.config(output="run"), sort_keys=False)
    text, broken = _text(chance, right)
    if text is None:
        _no_text(chance, path)
    else:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    command = chance.choice((["plan"], ["inspect"], ["train", "--dry-run"]))
    return Case([[command[0], str(path), *command[1:]]], broken=broken)


def _no_text(chance: random.Random, path: Path) -> None:
    way = chance.randrange(4)
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        path.symlink_to("/dev/zero")
    elif way == 2:
        path.mkdir()
    else:
        path.write_bytes(b"\0" * 100_000)


def _text(chance: random.Random, right: str) -> tuple[str | None, str]:
    """A text, and what is known to be wrong with it."""
    number = chance.choice((10, 1000, 100_000))
    lines = right.splitlines(keepends=True)
    at = chance.randrange(len(lines))
    way = chance.randrange(16)
    if way == 0:
        return None, "there is no text"
    if way == 1:
        return right + "".join(f"key{n}: {n}\n" for n in range(number)), "there are unknown keys"
    if way == 2:
        return right.replace("steps: 2", f"steps: {'[' * number}{']' * number}"), "steps is a list"
    if way == 3:
        top = [line for line in lines if line[0] not in " -"]
        return right + chance.choice(top), "a key stands there twice"
    if way == 4:
        tag = chance.choice(
            (
                f"!!python/object/apply:os.system ['touch {CANARY}']",
                f"!!python/object/new:os.system ['touch {CANARY}']",
                "!!python/name:os.system",
                "!!binary aaaa",
                "!!set {a, b}",
                "!!timestamp 2001-01-01",
                "!stranger x",
                "!!omap [a: 1]",
            )
        )
        return right.replace("steps: 2", f"steps: {tag}"), "steps is no number"
    if way == 5:
        levels = chance.choice((5, 9, 30))
        bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, levels))
        return bomb + right, "there are unknown keys"
    if way == 6:
        return right + "track: &a [*a]\n", "a list holds itself"
    if way == 7:
        return right + f"seed: &{'a' * number}\n", "an anchor stands alone" if False else ""
    if way == 8:
        sources = [{"path": str(n)} for n in range(min(number, 20_000))]
        return json.dumps({**yaml.safe_load(right), "data": {"train": sources}}), "no source is there"
    if way == 9:
        return "---\n".join([right] * chance.choice((2, 1000))), "there is more than one document"
    if way == 10:
        return right + "'" + mutations.text(chance), ""
    if way == 11:
        return "".join(lines[:at]) + mutations.text(chance) + "\n" + "".join(lines[at:]), ""
    if way == 12:
        return mutations.content(chance, right.encode()).decode("utf-8", "replace"), ""
    if way == 13:
        return right + f"<<: {chance.choice(('*x', '{steps: 3}', '[{seed: 1}, {seed: 2}]', '3', '&a {a: *a}'))}\n", ""
    if way == 14:
        return right.replace("steps: 2", f"steps: {'9' * number}"), "steps is absurd" if number > 12 else ""
    return right + "? [a, b]\n: 1\n", "a key is a list"
