"""The README's script as a script and in a Jupyter kernel; a run in a kernel that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

import tonnage
from api.kernels import client_of, outputs_of, readme_script
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.rundir.directory import RunDirectory, complete_checkpoints

ANSWER = "Tuesday"
SHOWN = ["run", "run.plan", "run.metrics.tail(3)"]


def test_the_script_of_the_readme_has_ten_lines() -> None:
    assert readme_script().count("\n") == 10


@pytest.mark.matrix
def test_the_script_of_the_readme_prints_an_answer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", readme_script()],
        cwd=tmp_path,
        env=os.environ | {"TONNAGE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    summary, answer = done.stdout.splitlines()
    assert " steps, loss " in summary
    assert answer == ANSWER


@pytest.mark.matrix
def test_the_script_of_the_readme_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "cache"))
    train, ask = readme_script().replace("epochs=1", "epochs=0.1").split("\nprint", 1)
    cells = [train, f"print{ask}", *SHOWN]
    (trained, asked, *shown) = outputs_of(client_of(cells, tmp_path))
    for outputs in (trained, asked, *shown):
        assert outputs
        assert all(output["output_type"] in ("stream", "display_data", "execute_result") for output in outputs)
        assert not any(output.get("name") == "stderr" for output in outputs), outputs
    (curves,) = trained  # one output, which was updated until the end
    assert " steps, loss " in curves["data"]["text/html"]
    assert curves["data"]["text/html"].count("<svg") >= 4
    summary, answer = "".join(output["text"] for output in asked).splitlines()
    assert " steps, loss " in summary
    assert answer
    for (output,), words in zip(shown, ("curves", "backward of the last block", "loss"), strict=True):
        html = output["data"]["text/html"]
        assert len(html) > 500
        assert words == "curves" or words in html


RUN = """
import os, tonnage
print(os.getpid(), flush=True)
data = {"train": "rows.jsonl", "max_length": 128, "template": "plain"}
keys = {"batch": {"sequences": 4}, "launch": {"workers": 2, "threads": 1}, "checkpoint": {"every": 5}}
with tonnage.start("model", data, steps=STEPS, output="OUTPUT", **keys) as running:
    losses = [step.loss for step in running]
"""
STEPS = 100


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_model(tmp_path / "model", llama_config(num_hidden_layers=1, initializer_range=0.3))
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(80))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def killed_in_a_process(folder: Path, code: str, run: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder)
    wait_for_steps(run, 12)
    process.kill()
    process.wait()


def killed_in_a_kernel(folder: Path, code: str, run: Path) -> None:
    pytest.importorskip("ipykernel", reason="no Jupyter kernel (pip install ipykernel nbclient)")
    manager = import_module("jupyter_client").KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder))
    channel = manager.client()
    channel.start_channels()
    try:
        channel.wait_for_ready(timeout=60)
        channel.execute(code)
        wait_for_steps(run, 12)
        os.kill(manager.provisioner.pid, signal.SIGKILL)
    finally:
        channel.stop_channels()
        manager.shutdown_kernel(now=True)


def wait_for_steps(run: Path, steps: int) -> None:
    deadline = time.monotonic() + 200
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"grad_norm"') < steps:
        assert time.monotonic() < deadline, [path.read_text() for path in run.glob("workers/*.log")]
        time.sleep(0.05)


def processes_that_name(words: str) -> list[str]:
    """Command lines of processes that have ``words`` in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if words in line]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(killed_in_a_process, id="process"),
        pytest.param(killed_in_a_kernel, id="kernel", marks=pytest.mark.matrix),
    ],
)
def test_a_killed_program_leaves_no_worker_and_a_run_that_goes_on(
    kill: Callable[[Path, str, Path], None], folder: Path
) -> None:
    """SIGKILL; the run is free within seconds, and ends with the losses of one that nobody has killed."""
    code = RUN.replace("STEPS", str(STEPS))
    run = folder / "killed"
    kill(folder, code.replace("OUTPUT", "killed"), run)
    directory = RunDirectory(run)
    deadline = time.monotonic() + 15
    while directory.is_locked() or processes_that_name("tonnage.training.worker killed"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed = tonnage.open_run(run)
    assert 12 <= len(killed.steps) < STEPS
    assert complete_checkpoints(directory.checkpoints)
    going_on = "import tonnage; tonnage.open_run('killed').resume()"
    subprocess.run([sys.executable, "-c", going_on], cwd=folder, check=True)
    subprocess.run([sys.executable, "-c", code.replace("OUTPUT", "whole")], cwd=folder, check=True)
    assert [step.loss for step in killed.steps] == [step.loss for step in tonnage.open_run("whole").steps]
    assert len(killed.steps) == STEPS
    assert killed.export.exists()


@pytest.mark.matrix
def test_two_runs_that_begin_at_once_in_one_directory(folder: Path) -> None:
    """One of two threads of a program has it, and the other is refused."""
    program = """
import threading, tonnage
data = {"train": "rows.jsonl", "max_length": 128, "template": "plain"}
keys = {"batch": {"sequences": 4}, "launch": {"workers": 1, "threads": 1}, "steps": 3}
ended = []
def work():
    try:
        ended.append(len(list(tonnage.start("model", data, output="once", **keys))))
    except tonnage.UserError as error:
        ended.append(str(error))
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(ended, key=str))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[3, '"), done.stdout
    assert "another run works in this directory" in done.stdout or "already holds a run" in done.stdout
    assert len(tonnage.open_run("once").steps) == 3
