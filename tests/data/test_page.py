"""What docs/data.md says of forms, configs and rows is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tonnage.config import read_config
from tonnage.data.reading.opening import PACKED
from tonnage.data.sources.files import KINDS
from tonnage.forms import document
from tonnage.forms.formats import FORMATS, MASKS, PRESETS, Form, detect
from tonnage.forms.reader import Reader
from tonnage.forms.turns import LISTS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_configs_are_read(text: str, tmp_path: Path) -> None:
    said = yaml.safe_load(text)["data"]
    path = tmp_path / "config.yaml"
    path.write_text(f"model: owner/model\n{text}")
    data = read_config(path, check_files=False).data.model_dump()
    for name, value in said.items():
        if isinstance(value, str | bool | int | float) and name != "train":
            assert str(data[name]) == str(value)
    sources = said["train"] if isinstance(said["train"], list) else [said["train"]]
    for source, found in zip(sources, data["train"], strict=True):
        for name, value in source.items() if isinstance(source, dict) else ():
            assert found[name] == value


def test_rows_are_read() -> None:
    weights = []
    for line in "".join(blocks("json")).splitlines():
        row = json.loads(line)
        (form,) = detect([row])
        (found,) = Reader(Form(form), images=True).read(row)
        weights.append([(turn.weight, turn.pieces) for turn in found.turns])
    assert weights == [
        [(0, None), (0, None), (0, None), (1, None)],
        [(0, None), (1, [(12, 0.0), (1, 1.0)])],
        [(0, None), (0.5, None)],
        *[[(0, None), (1, None)]] * 2,
    ]


def test_commands_are_configs(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: owner/model\ndata: {train: [a/b, c/d]}\n")
    for line in re.findall(r"`(data\.[^` ]+=[^`]*)`", PAGE):
        assert read_config(path, line.split(), check_files=False).data.train[-1].format == "gsm8k"


def test_the_tables_are_those_of_the_forms() -> None:
    assert document.render(PAGE) == PAGE, "run: python -m tonnage.forms.document docs/data.md"
    assert all(f"| `{name}` |" in PAGE for name in (*FORMATS, *PRESETS))


def test_every_field_and_ending_is_named() -> None:
    for word in (*LISTS, *PACKED, *KINDS, *MASKS):
        assert f"`{word}`" in PAGE, word
