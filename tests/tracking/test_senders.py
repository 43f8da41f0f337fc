"""A tracker's process beside a run, with a package in place of Weights & Biases that does as it is told."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tonnage.tracking.news import Note
from tonnage.tracking.trackers import END_SECONDS, Trackers
from tracking.fake_runs import fake_run, go_on_from, said, take_steps

PACKAGE = """
import json, os, time

MOOD, HEARD = os.environ["FAKE_MOOD"], os.environ["FAKE_HEARD"]
calls = 0

def note(**what):
    with open(HEARD, "a") as file:
        file.write(json.dumps(what) + "\\n")

class Settings:
    def __init__(self, **_): pass

class Table:
    def __init__(self, columns, data): self.rows = [dict(zip(columns, row)) for row in data]

class Run:
    id = "theirs"
    def define_metric(self, *_, **__): pass
    def log(self, values):
        global calls
        calls += 1
        if MOOD == "hangs in log": time.sleep(600)
        if MOOD == "fails once" and calls == 3: raise ConnectionError("gone: " + os.environ["FAKE_TOKEN"])
        note(log={key: getattr(value, "rows", value) for key, value in values.items()})
    def finish(self, exit_code):
        if MOOD == "hangs at the end": time.sleep(600)
        note(finish=exit_code)

def init(id, config, **_):
    if MOOD == "hangs": time.sleep(600)
    if MOOD == "fails": raise ConnectionError("gone: " + os.environ["FAKE_TOKEN"])
    if MOOD == "dies": os._exit(9)
    note(init=id, config=config)
    return Run()
"""


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the package writes down how it was called."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(PACKAGE)
    path = os.pathsep.join([str(tmp_path / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("FAKE_HEARD", str(tmp_path / "heard"))
    monkeypatch.setenv("FAKE_TOKEN", "a-secret-of-mine")
    monkeypatch.setenv("FAKE_MOOD", "works")
    return tmp_path / "heard"


def calls(heard: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in heard.read_text().splitlines()] if heard.exists() else []


def steps(heard: Path) -> list[int]:
    return [call["log"]["step"] for call in calls(heard) if "log" in call and "loss" in call["log"]]


def follow(run: Any, first: int, last: int, *, seconds: float = 30.0, samples: bool = False) -> float:
    """Steps with a tracker beside them; seconds that its end took."""
    trackers = Trackers(run)
    trackers.start(("wandb",), samples=samples)
    take_steps(run, first, last)
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(END_SECONDS, "finished", seconds)
        trackers.end("finished")
    return time.monotonic() - began


def test_a_run_and_then_the_rest_of_it_in_the_same_run_of_the_tracker(tmp_path: Path, heard: Path) -> None:
    run = fake_run(tmp_path)
    follow(run, 1, 4)
    first = calls(heard)
    assert first[0]["init"] is None
    assert first[0]["config"]["model"] == "tiny"
    assert first[-2:] == [{"log": {"step": 4, "eval_loss": 0.5}}, {"finish": 0}]
    assert steps(heard) == [1, 2, 3, 4]
    assert not [call for call in first if "samples" in call.get("log", {})], "not asked for"
    go_on_from(run, 2)
    heard.unlink()
    follow(run, 3, 5)
    assert calls(heard)[0]["init"] == "theirs"
    assert steps(heard) == [3, 4, 5]
    assert said(run) == ""


@pytest.mark.parametrize("mood", ["hangs", pytest.param("hangs in log", marks=pytest.mark.slow)])
def test_a_tracker_that_hangs_is_left_behind_and_a_resume_sends_the_rest(
    tmp_path: Path, heard: Path, monkeypatch: pytest.MonkeyPatch, mood: str
) -> None:
    run = fake_run(tmp_path)
    monkeypatch.setenv("FAKE_MOOD", mood)
    assert follow(run, 1, 4, seconds=2.0) < 10
    assert "wandb: had not ended 2 s after the run; 5 record(s) were not sent" in said(run)
    monkeypatch.setenv("FAKE_MOOD", "works")
    go_on_from(run, 4)
    follow(run, 5, 6)
    assert steps(heard) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_failures_are_said_once_without_secrets_and_tried_again(
    tmp_path: Path, heard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fake_run(tmp_path, track="wandb", track_samples=True)
    monkeypatch.setenv("FAKE_MOOD", "fails once")
    follow(run, 1, 4, samples=True)
    assert set(steps(heard)) == {1, 2, 3, 4}
    assert calls(heard)[-1] == {"finish": 0}
    (rows,) = (call["log"]["samples"] for call in calls(heard) if "samples" in call.get("log", {}))
    assert rows[1] == {"step": 4, "number": 2, "prompt": "What is 2 + 2?", "answer": "2", "expected": "4"}
    lines = [line.split(" ", 2)[2] for line in said(run).splitlines()]
    assert [line for line in lines if "not done yet" not in line] == [  # which a slow machine adds, or not
        "wandb: ConnectionError: gone: ***; trying again, and training goes on",
        "wandb: works again",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mood", "told"),
    [
        ("fails", "had not ended 4 s after the run; 7 record(s) were not sent; the run's own files have them"),
        (
            "hangs at the end",
            "had not ended 4 s after the run; it was given everything, but may not have kept the last",
        ),
        ("dies", "ended with 9; 7 record(s) were not sent"),
    ],
)
def test_what_is_lost_is_said_at_the_end(
    tmp_path: Path, heard: Path, monkeypatch: pytest.MonkeyPatch, mood: str, told: str
) -> None:
    run = fake_run(tmp_path, track="wandb", track_samples=True)
    monkeypatch.setenv("FAKE_MOOD", mood)
    follow(run, 1, 4, seconds=4.0, samples=True)
    assert told in said(run)
    assert ("wandb: not done yet; waiting for 4 s at most" in said(run)) == (mood != "dies")
    assert said(run).count("trying again") == (mood == "fails")


def test_a_sender_ends_with_a_worker_that_is_gone(tmp_path: Path, heard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fake_run(tmp_path)
    monkeypatch.setenv("FAKE_MOOD", "hangs")
    trackers = Trackers(run)
    trackers.start(("wandb",), samples=False)
    sender = trackers._senders["wandb"]
    assert sender.stdin is not None
    sender.stdin.close()
    assert sender.wait(10) == 1


def test_no_process_where_nothing_is_tracked_or_none_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fake_run(tmp_path)
    trackers = Trackers(run)
    trackers.start((), samples=False)
    trackers.end("finished")
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    trackers.start(("wandb",), samples=False)
    trackers.end("finished")
    assert "wandb: not started: No such file or directory" in said(run)
    assert Note.of(run, "wandb") == Note()
