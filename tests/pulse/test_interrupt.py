"""Runs that are killed, stopped and started again, as users, schedulers and power cuts do it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tiny import write_config

TIMED = ("step_seconds", "core_wait", "tokens_per_second", "memory", "eval_seconds")
COMMAND = [sys.executable, "-m", "tonnage", "train"]


@pytest.mark.matrix
def test_kills_in_every_phase_leave_nothing_and_change_nothing(tmp_path: Path) -> None:
    """The full form is ``killing.py --kills 200``; its result is ``benchmarks/results/kills.json``."""
    script = Path(__file__).with_name("killing.py")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, str(script), "--kills", "3", "--jobs", "1", "--directory", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    tally = json.loads(result.stdout.splitlines()[-1])
    assert tally["kills"] >= 3
    assert tally["wrong"] == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupt")
    write_config(
        folder,
        300,
        batch={"sequences": 8},
        steps=5000,
        optimizer={"lr": 3e-3, "schedule": "constant", "warmup": 0},
        checkpoint={"every": 5},
    )
    return folder


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, process_group=0
    )


def records(run: Path) -> dict[int, dict[str, Any]]:
    """Records of steps, without times."""
    if not (run / "metrics.jsonl").exists():
        return {}
    text = (run / "metrics.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    steps = [record for record in found if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    return {record["step"]: {k: v for k, v in record.items() if k not in TIMED} for record in steps}


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while len(records(run)) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_through_a_kill_and_two_preemptions(folder: Path) -> None:
    """One run: its launcher is killed, a scheduler sends SIGTERM and then SIGUSR1, and the rest is never done twice."""
    run = folder / "run"
    process = started(folder, "config.yaml", f"output={run}")
    wait_for_step(run, 12, process)
    process.kill()  # the launcher alone; its guardian ends the workers
    process.communicate()
    first = records(run)

    process = started(folder, "--resume", str(run))
    wait_for_step(run, len(first) + 6, process)
    second = started(folder, "--resume", str(run))
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 2
    assert f"another run works in this directory (process {process.pid} on " in out

    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == 3, out
    assert "Stopped as asked (SIGTERM), and saved." in out
    assert not (run / "export").exists()
    again = records(run)
    assert {step: again[step] for step in first} == first  # what was lost was trained again, to the bit
    stopped = max(again)
    assert (run / "checkpoints" / f"step-{stopped:08d}" / "COMPLETE").exists()

    process = started(folder, "--resume", str(run))
    wait_for_step(run, stopped + 3, process)
    os.killpg(process.pid, signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 3, out
    assert "(SIGUSR1)" in out
    assert f"going on from step-{stopped:08d}" in (run / "log.txt").read_text()
    last = records(run)
    assert {step: last[step] for step in again} == again

    result = subprocess.run(
        [*COMMAND, "--resume", str(run), f"steps={max(last)}", "--allow-changes"],
        capture_output=True, text=True, cwd=folder, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert records(run) == last
    assert (run / "export" / "config.json").exists()
