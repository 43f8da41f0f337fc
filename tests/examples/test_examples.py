"""The notebooks in ``examples/``, plain files with cells, carried out whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def carry_out(name: str, folder: Path) -> str:
    """What a notebook prints, in a process of its own in ``folder``."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=folder,
        env=os.environ | {"TONNAGE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_every_example_is_a_notebook_that_the_docs_list() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    found = sorted(EXAMPLES.glob("*.py"))
    assert {path.name for path in found} == set(re.findall(r"\(\.\./examples/(\w+\.py)\)", page))
    assert len(found) == 5
    for path in found:
        lines = path.read_text().splitlines()
        assert lines[0] == "# %% [markdown]"
        assert lines[1].startswith("# # ")
        assert sum(line == "# %%" for line in lines) >= 3


def test_grpo_is_a_page() -> None:
    assert len((EXAMPLES / "grpo.py").read_text().splitlines()) < 80


@pytest.mark.matrix
def test_a_first_run(tmp_path: Path) -> None:
    said = carry_out("first_run.py", tmp_path)
    found = re.search(r"^(\d+) of (\d+) steps, loss ([\d.]+) -> ([\d.]+), eval loss", said, re.MULTILINE)
    assert found is not None, said
    assert found[1] == found[2]
    assert float(found[4]) < float(found[3]) / 2
    assert "The door is open. Say the opposite. -> The " in said
    assert (tmp_path / "runs/first-run/run/report.html").exists()


@pytest.mark.matrix
def test_plans_before_renting(tmp_path: Path) -> None:
    said = carry_out("plan_before_you_rent.py", tmp_path)
    assert re.search(r"RTX4090:64GB +all weights +does not fit: [\d.]+ GB", said), said
    costs = [float(cost) for cost in re.findall(r"costs +([\d.]+)$", said, re.MULTILINE)]
    assert len(costs) == 8
    assert min(costs) > 0
    assert "  weights " in said


@pytest.mark.matrix
def test_a_loss_of_ones_own_learns_the_good_answers(tmp_path: Path) -> None:
    said = carry_out("own_rows_and_loss.py", tmp_path)
    found = re.search(r"good answers: (\d+)% trained as usual, (\d+)% trained by their scores", said)
    assert found is not None, said
    usual, scored = map(int, found.groups())
    assert scored >= usual + 20
    assert "needed: a sum" in said
    assert not (tmp_path / "runs/own-mean").exists()


@pytest.mark.matrix
def test_a_run_on_ray_is_stopped_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    said = carry_out("ray_cluster.py", tmp_path)
    stopped, done = (int(steps) for steps in re.findall(r"^(\d+) of 100 steps", said, re.MULTILINE))
    assert 10 <= stopped < done == 100
    assert (tmp_path / "runs/ray/run/export/model.safetensors").exists()


@pytest.mark.matrix
def test_grpo_raises_exact_match_by_a_reward_alone(tmp_path: Path) -> None:
    said = carry_out("grpo.py", tmp_path)
    found = re.search(r"exact match .*: (\d+)% before, (\d+)% after", said)
    assert found is not None, said
    before, after = map(int, found.groups())
    assert after >= before + 20
    assert (tmp_path / "runs/grpo/export/config.json").exists()
