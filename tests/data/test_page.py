"""What docs/data.md says of forms, configs and rows is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tonnage.config import read_config
from tonnage.data.formats import FORMATS, LISTS, MASKS, PRESETS, Form, detect
from tonnage.data.opening import PACKED
from tonnage.data.reader import Reader
from tonnage.data.sources import KINDS

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
        (found,) = Reader(Form(form)).read(row)
        weights.append((found.weights, found.pieces))
    assert weights == [([0, 0, 0, 1], {}), ([0, 1], {1: [(12, 0.0), (1, 1.0)]}), ([0, 0.5], {})]


def test_commands_are_configs(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: owner/model\ndata: {train: [a/b, c/d]}\n")
    for line in re.findall(r"`(data\.[^` ]+=[^`]*)`", PAGE):
        assert read_config(path, line.split(), check_files=False).data.train[-1].format == "gsm8k"


def test_tables_name_every_form_preset_field_and_ending() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (`\w.*)\|$", PAGE, re.MULTILINE))
    for name, form in FORMATS.items():
        for field in form.must:
            assert f"`{field}`" in rows[name], (name, field)
    for name, (form_name, columns) in PRESETS.items():
        assert f"`{name}`" in PAGE
        for ours, theirs in columns.items():
            assert rows[name].startswith(f"`{form_name}`")
            assert f"`{ours}: {theirs}`" in rows[name]
    for word in (*LISTS, *PACKED, *KINDS, *(mask for mask in MASKS if mask != "assistant_mask")):
        assert f"`{word}`" in PAGE, word
