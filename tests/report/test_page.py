"""The report: what is in it, that nothing of it comes from elsewhere, and that text of strangers stays text."""

from __future__ import annotations

import json
import math
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import entry
from report.recorded import decided, record
from tiny import alpaca_rows, write_rows
from tonnage.errors import UserError, WorkerFailed
from tonnage.report.curves import STRETCHES, curves
from tonnage.report.gathered import gather
from tonnage.report.page import leave_report, render, reported_if_it_fails, write_report
from tonnage.rundir.directory import RunDirectory

EVIL = "<script>alert(1)<!--<img src=x onerror=alert(2)>"


class Read(HTMLParser):
    """Elements, what refers to something outside, and text by element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.refers: list[str] = []
        self.handlers: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.refers += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset", "data")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self._inside = tag
        self.text += " " * (tag in ("td", "th", "p", "h3", "span"))
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def run(folder: Path) -> RunDirectory:
    run = decided(folder, optimizer={"lr": 0.002})
    record(run, 40, at7={"loss": None, "grad_norm": None, "skipped": True, "not_finite": "gradient of lm_head"})
    return run


def test_it_says_what_was_trained_planned_measured_and_set(run: RunDirectory) -> None:
    assert entry.tonnage("report", str(run.path)).status in (None, 0)
    page = Read(run.report.read_text())
    text = " ".join(page.text.split())
    for told in (
        "on 48 rows of rows.jsonl",
        "40 of 40",
        "1 step was skipped",
        "gradient of lm_head",
        "The run was begun 2 times",
        "going on with step 20",
        "backward of the last block",
        "measured, by phase",
        "memory of a worker 650 MB 700 MB +8%",
        "Say in capitals.",
        "at 20 evaluations, some of which are left out",
        "SAY <B>C</B>",
        "optimizer.lr 0.002",
        "torch",
    ):
        assert told in text, told


def test_defaults_are_told_from_what_was_set(run: RunDirectory) -> None:
    told = {one.name: one.is_default for one in gather(run.path).settings}
    assert not any(told[name] for name in ("model", "optimizer.lr", "steps", "batch.sequences", "data.train.path"))
    for name in ("optimizer.clip", "precision", "memory.zero", "launch.with", "evaluate.every", "data.train.format"):
        assert told[name], name
    assert sum(told.values()) > 50


def test_nothing_comes_from_elsewhere(run: RunDirectory) -> None:
    page = Read(render([gather(run.path)]))
    assert page.refers == ["data:,"]
    assert "link" in page.elements
    assert page.scripts[0].startswith('{"runs":')
    assert "http" not in page.scripts[1].replace("http://www.w3.org/2000/svg", "")


def test_images_are_pictures_that_the_page_holds(run: RunDirectory, tmp_path: Path) -> None:
    own = RunDirectory(tmp_path / "run")
    shutil.copytree(run.path, own.path)
    rows = json.loads(own.rows.read_text())
    pieces = rows["sources"][0]["rows"][0]["pieces"]
    pieces[:0] = [
        {"text": "<image: cat.png>", "weight": 0.0, "special": True, "thumbnail": thumbnail}
        for thumbnail in ("data:image/jpeg;base64,AAAA", "https://evil.example/cat.png", "data:text/html,x")
    ]
    own.rows.write_text(json.dumps(rows))
    page = Read(render([gather(own.path)]))
    assert page.refers == ["data:,", "data:image/jpeg;base64,AAAA"]
    assert page.text.count("<image: cat.png>") == 3


def test_text_of_files_stays_text(folder: Path, tmp_path: Path) -> None:
    model = EVIL.replace("/", "")
    run = decided(tmp_path, model, output=str(tmp_path / "run<script>alert(3)"))
    rows = [{**row, "output": "</script>" + EVIL} for row in alpaca_rows(20)]
    write_rows(tmp_path / "rows.jsonl", rows)
    run = decided(tmp_path, model, output=str(tmp_path / "run<script>alert(4)"))
    record(run, 10, at3={"skipped": True, "not_finite": "</script>" + EVIL})
    page = Read(render([gather(run.path), gather(run.path)]))
    assert page.elements.count("script") == 2
    assert "img" not in page.elements
    assert not page.handlers
    assert page.text.count("</script>" + EVIL) > 20
    assert json.loads(page.scripts[0])["runs"][0]["name"].endswith("run<script>alert(4)")
    assert "'sha256-" in render([gather(run.path)])


def test_long_runs_are_thinned_and_keep_their_peaks() -> None:
    number = 20 * STRETCHES + 7
    records: list[dict[str, Any]] = [{"step": step, "loss": 1.0, "tokens": 10} for step in range(1, number + 1)]
    records[4321]["loss"], records[9876]["loss"], records[100]["loss"] = 9.0, -3.0, None
    found = curves(records)
    loss = found["series"]["loss"]
    assert len(found["x"]["step"]) == len(loss["mean"]) == STRETCHES
    assert (max(loss["most"]), min(loss["least"])) == (9.0, -3.0)
    assert found["x"]["step"][-1] == number
    assert found["x"]["tokens"][-1] == 10 * number
    at = next(at for at, step in enumerate(found["x"]["step"]) if step >= 4322)
    assert loss["most"][at] == 9.0
    assert math.isclose(loss["mean"][at], 1 + 8 / 20, rel_tol=0.05)


def test_short_runs_are_drawn_whole_with_gaps() -> None:
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": None, "skipped": True},
        {"step": 3, "loss": 1.0},
    ]
    found = curves([*records, {"step": 3, "eval_loss": 1.5}])
    assert found["series"] == {"loss": {"mean": [2, None, 1]}}
    assert found["skipped"] == [2]
    assert found["evaluations"]["loss"] == [1.5]
    assert curves([])["series"] == {}


def test_runs_are_compared(run: RunDirectory, folder: Path, tmp_path: Path) -> None:
    other = decided(folder, optimizer={"lr": 0.004}, output=str(folder / "other"))
    record(other, 30)
    with pytest.raises(UserError, match="2 runs and no --output"):
        write_report([run.path, other.path])
    path = write_report([run.path, other.path], tmp_path / "both.html")
    text = " ".join(Read(path.read_text()).text.split())
    assert "What is set differently optimizer.lr 0.002 0.004 output" in text
    assert "40 of 40 30 of 40" in text


def test_a_run_that_has_not_begun_and_one_that_lacks_files_have_a_report(folder: Path) -> None:
    run = decided(folder, output=str(folder / "begun"))
    assert "0 of 40" in render([gather(run.path)])
    for path in (run.data, run.rows, run.environment):
        path.unlink()
    assert "0 of 40" in render([gather(run.path)])


def test_a_run_that_fails_leaves_a_report(folder: Path) -> None:
    run = decided(folder, output=str(folder / "failed"))
    with pytest.raises(WorkerFailed), reported_if_it_fails(run):
        raise WorkerFailed("worker 0 died")
    assert "0 of 40" in run.report.read_text()


def test_no_run_and_damaged_runs_are_refused_in_words(folder: Path, tmp_path: Path) -> None:
    assert "no run" in entry.refusal("report", str(tmp_path))
    run = decided(folder, output=str(folder / "damaged"))
    run.rows.write_text('{"sources": [{"name": 3}]}')
    assert "rows.json: sources.0.name is 3" in entry.refusal("report", str(run.path))
    assert leave_report(run).startswith("no report was written: ")
    assert not run.report.exists()
