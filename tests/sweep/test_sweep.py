"""A fixed slice of the sweep over all model families, and its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from sweep import families
from sweep.exact import Off, judge
from sweep.trial import BAD, attempt

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
RESULT = PAGE.parents[1] / "benchmarks" / "results" / "models_exact.json"
SLICE = {
    "bert": "refused",
    "glm_moe_dsa": "refused",
    "mamba2": "padded",
    "qwen3_moe": "packed",
}
REST = {
    "deepseek_v3": "packed",
    "gemma3n_text": "packed",
    "gpt_oss": "packed",
    "lfm2": "padded",
    "llama4_text": "padded",
    "qwen3_5_moe_text": "padded",
}
"""Of the matrix: they take long, or are like one that other tests train."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SLICE, *(pytest.param(name, marks=pytest.mark.matrix) for name in REST)])
def test_a_family_trains_as_in_plain_transformers_or_is_refused(name: str, tmp_path: Path) -> None:
    outcome = attempt(name, tmp_path)
    assert outcome.kind == (SLICE | REST)[name], outcome


EXACT = ["gemma3n_text", "llama4_text", "youtu"]
"""One that writes to products in place, one whose rows are padded, one of which a row is zero once it is loaded."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*EXACT, *(pytest.param(name, marks=pytest.mark.matrix) for name in families.NAMES if name not in EXACT)]
)
def test_gradients_are_off_from_fp64_by_no_more_than_plain_fp32_is(name: str, tmp_path: Path) -> None:
    found = judge(name, tmp_path)
    assert found.kind not in BAD, found
    assert name not in EXACT or found.kind == "exact"


def test_a_difference_beyond_that_of_fp32_is_seen() -> None:
    noise = Off(1e-7, 1e-7, 6e-7)
    assert not Off(1.9e-6, 1.9e-6, 4.7e-6).beyond(noise)
    assert Off(2.1e-6, 0.0, 0.0).beyond(noise)
    assert Off(0.0, 0.0, 4.9e-6).beyond(noise)


def test_no_family_is_known_to_be_inexact() -> None:
    result = json.loads(RESULT.read_text())
    assert not [family["name"] for family in result["families"] if family["kind"] in BAD]


@pytest.mark.matrix
def test_what_a_model_itself_keeps_still_is_there_again_when_a_run_goes_on() -> None:
    """Its routers' bias is in no optimizer; it was left as memory came, and no export had it."""
    command = [sys.executable, "-m", "tests.sweep", "--layouts", "ernie4_5_moe"]
    done = subprocess.run(command, cwd=PAGE.parents[1], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["ernie4_5_moe", "packed"]), done.stdout + done.stderr


def test_the_page_has_every_family_and_nothing_bad() -> None:
    text = PAGE.read_text()
    rows = re.findall(r"^\| ([\w-]+) \| ([a-z ]+) \|", text, flags=re.MULTILINE)
    assert not [row for row in rows if row[1] in BAD]
    if f"transformers {transformers.__version__}," in text:
        assert tuple(name for name, _ in rows if name != "family") == families.NAMES
