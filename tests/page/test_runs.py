"""What the page says of runs: their states and figures, as their files tell them, and again when these change."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from page.conftest import STEPS, note_position
from report.recorded import record
from tonnage.page.folder import Folder
from tonnage.page.looks import first_look, further_looks
from tonnage.page.rows import SPARKS, Row, _spark
from tonnage.page.watched import Watched
from tonnage.report.curves import curves
from tonnage.report.gathered import gather
from tonnage.report.page import render_sections
from tonnage.rundir.directory import RunDirectory


def rows_of(client: TestClient) -> dict[str, dict[str, Any]]:
    client.app.state.page.folder._next_look = 0.0  # type: ignore[attr-defined]
    return {row["run"]: row for row in client.get("/api/runs").json()["runs"]}


def test_the_state_of_every_run(client: TestClient, folder: Path) -> None:
    rows = rows_of(client)
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        "first": "done",
        "stopped": "stopped",
        "failed": "failed",
        "killed": "failed",
        "prepared": "waiting",
    }
    assert rows["failed"]["message"] == "worker 0: RuntimeError: no memory <b>left</b>"
    assert rows["killed"]["message"] == "its workers ended without a word: forward, step 22"
    first, records = rows["first"], RunDirectory(folder / "first").read_metrics()
    steps = [record for record in records if "loss" in record]
    assert (first["step"], first["num_steps"]) == (STEPS, STEPS)
    assert first["loss"] == pytest.approx(steps[-1]["loss"], rel=1e-5)
    assert first["evaluation"] == pytest.approx(
        [one for one in records if "eval_loss" in one][-1]["eval_loss"], rel=1e-5
    )
    assert first["tokens_per_second"] == pytest.approx(steps[-1]["tokens_per_second"], rel=1e-5)
    assert first["memory_bytes"] == steps[-1]["memory"]["host_peak"]
    spark, losses = first["spark"], [step["loss"] for step in steps]
    assert len(spark) > 20
    assert spark[-1] == pytest.approx(losses[-1], rel=1e-5)
    assert all(any(abs(value - loss) < 1e-4 for loss in losses) for value in spark)


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux tells who holds a lock")
def test_a_run_that_is_locked_trains(client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.page.watched.LOCK_SECONDS", 0.0)
    run = RunDirectory(folder / "killed")
    assert rows_of(client)["killed"]["state"] == "failed"
    with run.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("{}")
        file.flush()
        row = rows_of(client)["killed"]
        assert (row["state"], row["doing"]) == ("training", "forward")
        assert 18 * 0.4 < row["remaining_seconds"] < 18 * 0.45
        note_position(run, "stopped", 22)
    assert rows_of(client)["killed"]["state"] == "stopped"


def test_looking_takes_no_lock(client: TestClient, folder: Path) -> None:
    """A launcher that begins while the page looks would be refused."""
    run = RunDirectory(folder / "stopped")
    run.lock.write_text("{}")
    script = (
        "import fcntl, sys, time\n"
        "end = time.monotonic() + 1.5\n"
        "while time.monotonic() < end:\n"
        "    with open(sys.argv[1], 'r+') as file:\n"
        "        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, run.lock]) as process:
        while process.poll() is None:
            client.get("/api/run", params={"run": "stopped"})
    assert process.returncode == 0


def test_curves_and_sections_are_those_of_the_report(client: TestClient, folder: Path) -> None:
    look = client.get("/api/run", params={"run": "first"}).json()
    expected = curves(RunDirectory(folder / "first").read_metrics())
    assert {key: look["curves"][key] for key in expected} == expected
    assert look["curves"]["restarts"] == [STEPS // 2]
    sections = client.get("/api/run/sections", params={"run": "first"}).text
    assert sections == render_sections(gather(folder / "first"))
    assert "Plan and outcome" in sections


def test_metrics_are_read_on_from_where_they_ended(folder: Path) -> None:
    run, watched = RunDirectory(folder / "stopped"), Watched(Folder(folder))
    look = further_looks(watched, "stopped", first_look(watched, "stopped"))
    assert look() is None
    lines = run.metrics.read_bytes()
    run.metrics.write_bytes(lines)
    more = json.dumps({"step": 23, "loss": 1.5, "tokens": 10, "step_seconds": 3.6}).encode()
    with run.metrics.open("ab") as file:
        file.write(more[:20])
        file.flush()
        assert watched.look("stopped")[1].measured.num_steps == 22
        file.write(more[20:] + b"\n")
    news = look()
    assert news is not None
    assert (news["since"], news["steps"], news["row"]["step"]) == (22, 23, 23)
    assert news["curves"]["x"]["step"] == [23]
    assert news["curves"]["series"]["loss"] == {"mean": [1.5]}
    whole = curves(run.read_metrics())
    assert watched.look("stopped")[1].measured.thinned(1500) == whole
    assert news["curves"]["x"]["hours"] == whole["x"]["hours"][-1:]
    version = watched.look("stopped")[1].version
    assert run.rewind_metrics(10) > 0
    assert watched.look("stopped")[1].measured.num_steps == 10
    assert watched.look("stopped")[1].version == version + 1
    news = look()
    assert news is not None
    assert "curves" not in news  # whoever watches begins again


def test_tags_and_notes_are_kept_in_the_run(client: TestClient, folder: Path) -> None:
    body = {"run": "first", "tags": [" gsm8k", "gsm8k", "", "best  of all"], "note": "lr was too high\n<b>"}
    assert client.post("/api/run/tags", json=body).json() == {"tags": ["gsm8k", "best of all"], "note": body["note"]}
    row = rows_of(client)["first"]
    assert (row["tags"], row["note"]) == (["gsm8k", "best of all"], body["note"])
    assert json.loads((folder / "first" / "tags.json").read_text())["tags"] == ["gsm8k", "best of all"]
    for change in ({"tags": ["x"] * 5 + [str(n) for n in range(30)]}, {"tags": ["x" * 100]}, {"note": "x" * 20_000}):
        assert client.post("/api/run/tags", json={**body, **change}).status_code == 400
    assert client.post("/api/run/tags", json={**body, "tags": [1]}).status_code == 400


def test_new_runs_appear_and_old_ones_go(client: TestClient, folder: Path) -> None:
    assert "later" not in rows_of(client)
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "first").rename(folder / "deep" / "er" / "later")
    rows = rows_of(client)
    assert rows["deep/er/later"]["state"] == "done"
    assert "first" not in rows
    assert client.get("/api/run", params={"run": "first"}).status_code == 400


def test_the_folder_may_be_a_run_itself(folder: Path) -> None:
    watched = Watched(Folder(folder / "first"))
    assert [row.run for row in watched.rows()] == ["."]
    assert watched.look(".")[0].state == "done"


def test_a_long_run_is_listed_without_reading_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(folder / "stopped")
    record(run, 5000)
    (row,) = [row for row in Watched(Folder(folder)).rows() if row.run == "stopped"]
    assert row.step == 5000
    assert len(row.spark) == SPARKS + 1


@pytest.mark.parametrize("num_steps", [1, 3, 12, 30])
def test_the_sparkline_of_a_short_run_has_its_steps(tmp_path: Path, num_steps: int) -> None:
    """All of few; of more, none is far from its neighbours."""
    metrics = tmp_path / "metrics.jsonl"
    padding = {"tokens_per_second": 1000.0, "memory": {"device_peak": 123_456_789, "host_peak": 123_456_789}}
    records = [{"step": step, "loss": float(step), **padding} for step in range(1, num_steps + 1)]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    spark = [int(loss or 0) for loss in _spark(metrics)]
    assert (spark[0], spark[-1]) == (1, num_steps)
    most = 1 if num_steps < 28 else 2
    assert all(0 < after - before <= most for before, after in itertools.pairwise(spark))


def test_the_server_needs_no_torch(folder: Path) -> None:
    """Whatever it is asked about runs."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from starlette.testclient import TestClient\n"
        "from tonnage.page.app import create_app\n"
        "app = create_app(Path(sys.argv[1]), 'token', only_local=True)\n"
        "with TestClient(app, base_url='http://localhost', headers={'Authorization': 'Bearer token'}) as client:\n"
        "    for path in sys.argv[2:]:\n"
        "        assert client.get(path).status_code == 200, path\n"
        "print([name for name in ('torch', 'transformers', 'numba') if name in sys.modules])"
    )
    about = ("", "/sections", "/log", "/output", "/saved")
    paths = ["/api/runs", "/api/choices", "/api/compare?run=first&run=stopped"]
    paths += [f"/api/run{path}?run=first" for path in about]
    command = [sys.executable, "-c", script, str(folder), *paths]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_looking_at_runs_keeps_nobody_waiting(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in threads, and never in that which answers everybody."""
    rows = Watched.rows

    def aside(watched: Watched) -> list[Row]:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return rows(watched)

    monkeypatch.setattr(Watched, "rows", aside)
    for path in ("/api/runs", "/api/choices"):
        assert client.get(path).status_code == 200


def test_the_command_needs_no_folder() -> None:
    """It is over the folder in which it is begun; here it gets as far as an address that it cannot listen at."""
    command = [sys.executable, "-m", "tonnage", "page", "--port", "0", "--host", "192.0.2.1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "192.0.2.1" in result.stderr
