"""What evaluations are asked for and cannot tell is refused before anything is loaded, with what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tonnage.config import read_config
from tonnage.config.bounds import Bound, is_better
from tonnage.errors import UserError

VALID = {"validation": 0.1}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"evaluate": {"scorer": "numbers"}}, "evaluate.scorer"),
    ({"evaluate": {"scorer": "number"}}, "evaluate.scorer, but there are no validation rows"),
    ({"data": VALID, "evaluate": {"scorer": "regex"}}, "there is no pattern"),
    ({"data": VALID, "evaluate": {"scorer": "number", "pattern": "x"}}, "there is a pattern"),
    ({"data": VALID, "evaluate": {"scorer": "regex", "pattern": "("}}, "a regular expression"),
    ({"data": VALID, "evaluate": {"patience": 2}}, "evaluated only at its end"),
    ({"checkpoint": {"best": "eval_loss"}}, "checkpoint.best, but there are no validation rows"),
    ({"data": VALID, "checkpoint": {"best": "number"}}, "evaluate.scorer=number"),
    ({"data": VALID, "evaluate": {"gate": {"exact_match": ">= 0.6"}}}, "nothing tells exact_match"),
    ({"data": VALID, "evaluate": {"gate": {"exact_match": "0.6"}}}, "figures with bounds"),
    ({"data": VALID, "evaluate": {"gate": {"exactmatch": ">= 0.6"}}}, "exactmatch"),
    ({"data": VALID, "evaluate": {"gate": {"forgets": "<= 0.1"}}}, "no general rows"),
    ({"evaluate": {"gate": {"eval_loss": "< 2"}}}, "gate.eval_loss, but there are no validation rows"),
    ({"data": VALID, "evaluate": {"general": "missing.jsonl"}}, "no such file: missing.jsonl"),
]


def read(folder: Path, changes: dict[str, Any]) -> Any:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    text = {"model": str(folder / "model"), "output": str(folder / "run"), **changes}
    text["data"] = {"train": str(folder / "rows.jsonl"), **changes.get("data", {})}
    (folder / "config.yaml").write_text(json.dumps(text))
    return read_config(str(folder / "config.yaml"), check_files="missing" in json.dumps(changes))


@pytest.mark.parametrize(("changes", "said"), CASES)
def test_what_cannot_be_told_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        read(tmp_path, changes)


def test_what_can_be_told_is_taken(tmp_path: Path) -> None:
    gate = {"number": ">= 0.6", "exact_match": ">0", "forgets": "<= 0.02", "perplexity": "< 1e2"}
    general = [{"path": str(tmp_path / "rows.jsonl"), "format": "completion"}]
    evaluate = {"every": 5, "scorer": "number", "gate": gate, "general": general, "patience": 2}
    config = read(tmp_path, {"data": VALID, "evaluate": evaluate, "checkpoint": {"best": "number"}})
    assert config.evaluate.general[0].format == "completion"
    assert config.checkpoint.best == "number"


def test_bounds_and_what_is_better() -> None:
    assert [Bound.of(text).holds(0.5) for text in (">= 0.5", "> 0.5", "<=.5", "< 5e-1")] == [True, False, True, False]
    assert not Bound.of("<= 1").holds(float("nan"))
    assert is_better("eval_loss", 1.0, 2.0)
    assert is_better("number", 1.0, 0.5)
    assert is_better("number", 0.0, None)
    assert not is_better("number", 0.5, 0.5)
    assert not is_better("eval_loss", float("nan"), None)
