"""A folder of runs that were recorded, not trained, and the page over it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from report.recorded import decided, record
from tonnage.page.app import create_app
from tonnage.page.rows import SIGN_SECONDS
from tonnage.rundir.directory import RunDirectory

TOKEN = "token-of-the-tests"
STEPS = 40


def note_position(run: RunDirectory, phase: str, step: int, *, ago: float = 0.0) -> None:
    """Leave what a worker would note of where it is, or noted so many seconds ago."""
    now = time.time() - ago
    run.workers.mkdir(exist_ok=True)
    place = {"phase": phase, "step": step, "micro_batch": 0, "num_micro_batches": 2, "seconds": now, "alive": now}
    run.worker_position(0).write_text(json.dumps(place).ljust(512))


def record_step(run: RunDirectory, step: int) -> None:
    """Write a step more, as training would."""
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1.5, "tokens": 10, "step_seconds": 3.6}) + "\n")


def furnished(decided: RunDirectory, folder: Path) -> None:
    """Runs in every state, of one that was decided."""
    runs = {name: RunDirectory(folder / name) for name in ("first", "stopped", "failed", "killed", "prepared")}
    for run in runs.values():
        shutil.copytree(decided.path, run.path)
    record(runs["first"], STEPS)
    note_position(runs["first"], "done", STEPS)
    for name in ("stopped", "failed", "killed"):
        record(runs[name], 22)
        runs[name].outcome.unlink()
    note_position(runs["stopped"], "stopped", 22)
    note_position(runs["failed"], "backward", 22, ago=2 * SIGN_SECONDS)
    note_position(runs["killed"], "forward", 22, ago=2 * SIGN_SECONDS)
    runs["failed"].write_error(0, RuntimeError("no memory <b>left</b>"), 1)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs that every test has a copy of."""
    folder = tmp_path_factory.mktemp("page")
    furnished(decided(folder, steps=STEPS), folder / "runs")
    return folder / "runs"


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy of them, to write in."""
    return Path(shutil.copytree(recorded, tmp_path / "runs"))


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    """The page, asked by somebody who has its token."""
    app = create_app(folder, TOKEN, only_local=True)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with TestClient(app, base_url="http://127.0.0.1:8100", headers=headers) as client:
        yield client
