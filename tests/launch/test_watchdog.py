"""A worker that stands still ends the run, with its name and its place, within the configured time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.model.attention import compile_loops
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import Position
from tonnage.rundir.stalls import describe

TIMEOUT = 4.0


def worker_pid(run: RunDirectory, rank: int) -> int:
    """The process that holds the log of a worker open as its output."""
    log = run.worker_log(rank).stat()
    for entry in Path("/proc").iterdir():
        try:
            output = (entry / "fd" / "1").stat() if entry.name.isdigit() else None
        except OSError:
            continue
        if output and (output.st_dev, output.st_ino) == (log.st_dev, log.st_ino):
            return int(entry.name)
    raise AssertionError("no such worker")


@pytest.mark.matrix
@pytest.mark.parametrize("workers", [2, 1])
def test_a_stopped_worker_is_named_with_its_phase(tmp_path: Path, workers: int) -> None:
    """By the others, or by the launcher where there is none."""
    last = workers - 1
    write_model(tmp_path / "model", llama_config())
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(300))
    compile_loops(torch.float32)  # so that no worker waits longer than that for another that does
    text = {
        "model": str(tmp_path / "model"),
        "data": {
            "train": str(tmp_path / "rows.jsonl"),
            "max_length": 128,
            "template": "plain",
            "cache": str(tmp_path / "cache"),
        },
        "batch": {"sequences": 8},
        "steps": 100_000,
        "precision": "fp32",
        "memory": {"micro_batch": 1},
        "launch": {"workers": workers, "threads": 1, "timeout": TIMEOUT},
        "track": [],
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "config.yaml").write_text(json.dumps(text))
    run = RunDirectory(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-m", "tonnage", "train", str(tmp_path / "config.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while run.read_position(last).step < 3:
            assert process.poll() is None, process.stdout and process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(worker_pid(run, last), signal.SIGSTOP)
        at = run.read_position(last)
        began = time.monotonic()
        output, _ = process.communicate(timeout=60)
        assert time.monotonic() - began < TIMEOUT + 15
    finally:
        process.kill()
    assert process.returncode == 1
    assert "Traceback" not in output
    assert f"no progress for {TIMEOUT:g} s (launch.timeout); worker {last} ({at.phase}, step {at.step}" in output
    assert "is not running" in output
    assert "worker 0: " in output


def test_the_one_furthest_behind_is_named_when_all_run() -> None:
    now = time.time()
    forward = Position("forward", 7, 2, 4, now - 30, now)
    backward = Position("backward", 7, 2, 4, now - 30, now)
    before = Position("step", 7, 0, 4, now - 30, now)
    saving = Position("save", 7, 0, 0, now - 30, now)
    loading = Position("load", 0, 0, 0, now - 30, now)
    for positions, last in (
        ([backward, forward, backward], 1),
        ([forward, forward, before], 2),
        ([saving, saving, backward], 2),
        ([loading, forward], 0),
    ):
        text = describe(positions, [], 30)
        assert f"worker {last} is furthest behind ({positions[last]})" in text
        assert len(text.splitlines()) == 1 + len(positions)
