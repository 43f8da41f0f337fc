"""``tonnage profile``: real steps on real workers, summed up by cause."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.cli.profile import profile
from tonnage.errors import UserError
from tonnage.train.profiling import COMMUNICATION, HEAD, PRODUCTS, UPDATE


@pytest.fixture
def config(tmp_path: Path) -> str:
    write_model(tmp_path / "model", llama_config())
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(100))
    content = {
        "model": str(tmp_path / "model"),
        "data": {
            "train": str(tmp_path / "rows.jsonl"),
            "max_length": 128,
            "template": "plain",
            "cache": str(tmp_path / "cache"),
        },
        "batch": {"sequences": 4},
        "steps": 5,
        "launch": {"workers": 2, "threads": 1},
        "memory": {"zero": 3},
        "output": str(tmp_path / "run"),
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_two_workers_leave_an_account_a_picture_and_traces(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile(config, steps=2)
    said = capsys.readouterr().out
    assert "matrix products" in said
    assert "Floor:" in said
    folder = tmp_path / "run-profile"
    figures = json.loads((folder / "profile.json").read_text())
    assert figures["workers"] == 2
    causes = figures["causes"]
    assert sum(causes.values()) == pytest.approx(figures["step_seconds"], rel=0.05)
    assert min(causes[name] for name in (PRODUCTS, HEAD, UPDATE, COMMUNICATION)) > 0
    assert 0 < figures["floor_seconds"] < figures["step_seconds"]
    ElementTree.parse(folder / "profile.svg")
    for rank in (0, 1):
        with gzip.open(folder / f"trace-{rank}.json.gz") as file:
            assert json.load(file)["traceEvents"]
    assert not (tmp_path / "run").exists()  # it was no run


def test_a_run_too_short_is_refused(config: str) -> None:
    with pytest.raises(UserError, match="needed: 9"):
        profile(config, steps=4)
