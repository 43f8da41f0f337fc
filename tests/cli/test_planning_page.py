"""Every command of docs/planning.md runs, on a tiny model of the name that it has."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

import entry
from tiny import alpaca_rows, llama_config, write_model, write_rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
COMMANDS = re.findall(r"^(tonnage plan .*)$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for name in ("pythia-1b", "pythia-12b"):
        llama_config(num_hidden_layers=1).save_pretrained(folder / "EleutherAI" / name)
    write_model(folder / "model", llama_config(num_hidden_layers=1, max_position_embeddings=1024))
    config = {
        "model": "model",
        "data": {
            "train": str(write_rows(folder / "rows.jsonl", alpaca_rows(60))),
            "max_length": 128,
            "template": "plain",
        },
        "batch": {"sequences": 8},
    }
    (folder / "gsm8k.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_the_page_shows_what_can_be_asked() -> None:
    options = re.findall(r"--[a-z-]+", " ".join(COMMANDS))
    assert {"--largest", "--hardware", "--price", "--zero-table", "--json"} <= set(options)
    assert {"rank", "max_length", "micro_batch"} == {*re.findall(r"--largest (\w+)", " ".join(COMMANDS))}


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    ended = entry.tonnage(*shlex.split(line)[1:])
    assert ended.status in (None, 0), ended.err
    if "--json" in line:
        json.loads(ended.out)
