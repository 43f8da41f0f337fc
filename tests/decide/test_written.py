"""What a run writes down of where it is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pretended import pretend_gpus
from tiny import write_config
from tonnage.decide.decision import decide
from tonnage.decide.written import write_run
from tonnage.rundir.directory import RunDirectory

SMI = """#!/bin/sh
case "$1" in
*memory.free*) echo 80000 ;;
*name,driver_version*) echo "NVIDIA H100 80GB HBM3, 580.95.05" ;;
esac
"""


@pytest.mark.parametrize("number", [0, 2])
def test_a_run_for_gpus_names_them_and_their_drivers(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    write_config(tmp_path, 20, steps=2)
    run = RunDirectory(tmp_path / "run")
    if number:
        pretend_gpus(monkeypatch, number)
    write_run(run, decide(str(tmp_path / "config.yaml"), [f"output={run.path}"]))
    environment = json.loads(run.environment.read_text())
    told = {name: environment.get(name) for name in ("devices", "cuda")}
    expected = {"devices": ["NVIDIA H100 80GB HBM3, 580.95.05"], "cuda": torch.version.cuda or ""}
    assert told == (expected if number else {"devices": None, "cuda": None})
