"""The notebooks in ``examples/``, plain files with cells, carried out whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_grpo_is_a_page() -> None:
    lines = (EXAMPLES / "grpo.py").read_text().splitlines()
    assert len(lines) < 80
    assert lines[0] == "# %% [markdown]"
    assert sum(line == "# %%" for line in lines) >= 3


@pytest.mark.slow
def test_grpo_raises_exact_match_by_a_reward_alone(tmp_path: Path) -> None:
    said = carry_out("grpo.py", tmp_path)
    found = re.search(r"exact match .*: (\d+)% before, (\d+)% after", said)
    assert found is not None, said
    before, after = map(int, found.groups())
    assert after >= before + 20
    assert (tmp_path / "runs/grpo/export/config.json").exists()
