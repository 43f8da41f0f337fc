"""Kernels for GPUs, without one: interpreted beside their plain twins, and compiled for cards that are not here.

Skipped where Triton is not installed, as with torch for CPUs: ``pip install triton``, then ``pytest`` this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
SCRIPT = Path(__file__).with_name("triton_twins.py")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["twins", "compiled"])
def test_kernels_for_gpus(what: str, tmp_path: Path) -> None:
    own = {"TRITON_INTERPRET": "1"} if what == "twins" else {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), what]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told
    assert {name: text for name, text in told.items() if text} == {}
