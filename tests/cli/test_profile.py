"""``tonnage profile``: real steps on real workers, summed up by cause."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from forked import work
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.cli.profile import profile
from tonnage.errors import UserError
from tonnage.rundir.directory import RunDirectory
from tonnage.training.profiling import COMMUNICATION, HEAD, PRODUCTS, STAGES, UPDATE


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.launch.local.run_workers", forked_workers)


def forked_workers(
    run: RunDirectory, num_workers: int, threads: int, *, poll: Callable[[], None], command: Sequence[str]
) -> int:
    """The workers that the command would start, without their imports (those of ``test_readme`` have them)."""
    work("profile_runs", (num_workers, [str(run.path), command[-1]]))
    return 0


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


@pytest.mark.slow
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


@pytest.mark.matrix
def test_what_each_worker_of_an_axis_does_is_told(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {}
    for axes in ("{}", "{tensor: 2}", "{pipeline: 2}"):
        folder = tmp_path / axes
        profile(config, [f"parallel={axes}", "memory.micro_batch=1"], steps=1, output=folder)
        made[axes] = json.loads((folder / "profile.json").read_text())
    said = capsys.readouterr().out
    shard, tensor, pipeline = made.values()
    for figures in made.values():
        assert figures["workers"] == len(figures["by_worker"]) == 2
        for worker in figures["by_worker"]:
            assert sum(worker["causes"].values()) == pytest.approx(worker["step_seconds"], rel=0.05)
        # The same products, on as many workers, but of blanks at the end of a row whose tokens two ranks divide.
        blanks = figures["computed_tokens"] - shard["computed_tokens"]
        assert 0 <= blanks <= 2
        of_blanks = blanks / shard["computed_tokens"] * shard["flops"]
        assert figures["flops"] == pytest.approx(shard["flops"] + of_blanks, rel=1e-3 * (blanks > 0) + 1e-6)
    first, last = (worker["causes"] for worker in pipeline["by_worker"])
    assert (first[HEAD], last[HEAD] > 0) == (0, True)  # which is in the last stage alone
    assert first[STAGES] > 0
    assert last[STAGES] > 0
    assert shard["causes"][STAGES] == tensor["causes"][STAGES] == 0
    sums = {name: _calls(figures, "c10d::allreduce_") for name, figures in made.items()}
    assert sums["{tensor: 2}"] > sums["{}"] + 2 * 4  # in every block of every micro-batch
    assert "waiting for other stages" in said


def _calls(figures: dict[str, Any], name: str) -> float:
    return sum(float(one["calls"]) for one in figures["operations"] if one["name"] == name)


def test_a_run_too_short_is_refused(config: str) -> None:
    with pytest.raises(UserError, match="needed: 9"):
        profile(config, steps=4)
