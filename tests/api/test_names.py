"""What ``import tonnage`` offers: exactly these names, loaded when they are asked for, documented by what runs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tonnage
from forked import work
from tiny import alpaca_rows, llama_config, write_model, write_rows

NAMES = {"plan", "train", "start", "open_run", "Run", "Plan", "Session", "UserError"}
INSTANT = """
import sys, time, typing
before, began = set(sys.modules), time.process_time()
import tonnage
taken = time.process_time() - began
assert dir(tonnage)
print(taken, len(set(sys.modules) - before), sorted({"torch", "transformers", "numpy", "pydantic"} & set(sys.modules)))
"""


def test_the_public_list_is_this() -> None:
    assert set(tonnage.__all__) == NAMES | {"__version__"}
    assert set(dir(tonnage)) >= NAMES
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = tonnage.trian  # type: ignore[attr-defined]


def test_every_public_name_is_typed_and_documented() -> None:
    for name in NAMES:
        found = getattr(tonnage, name)
        assert ">>> " in found.__doc__, name
        if inspect.isfunction(found):
            assert "Raises:" in found.__doc__, name
            signature = inspect.signature(found)
            assert signature.return_annotation is not inspect.Signature.empty
            assert all(one.annotation is not inspect.Parameter.empty for one in signature.parameters.values())


def test_importing_it_is_instant_and_loads_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", INSTANT], capture_output=True, text=True, check=True)
    taken, number, heavy = done.stdout.split(maxsplit=2)
    assert float(taken) < 0.1
    assert int(number) < 10
    assert heavy.strip() == "[]"


@pytest.mark.slow
def test_docstrings_do_what_they_show(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny", llama_config(num_hidden_layers=1, initializer_range=0.3))
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(60))
    work("api.documented", (1, [str(tmp_path), "docstrings"]))


@pytest.mark.slow
def test_the_page_does_what_it_shows(tmp_path: Path) -> None:
    write_model(tmp_path / "EleutherAI" / "pythia-70m", llama_config(num_hidden_layers=1, initializer_range=0.3))
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(60))
    config = {
        "model": "EleutherAI/pythia-70m",
        "data": {"train": "rows.jsonl", "max_length": 128, "template": "plain"},
        "batch": {"sequences": 8},
        "steps": 12,
    }
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(config))
    work("api.documented", (1, [str(tmp_path), "page"]))
