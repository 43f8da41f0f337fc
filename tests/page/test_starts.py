"""Trainings that the page begins: whatever the folder and the run are called, and what a refused one leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from page.conftest import TOKEN
from tonnage.config import read_config
from tonnage.page import commands as module
from tonnage.page.app import create_app

SECONDS = 60.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which YAML sees a comment, and where the page is begun."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp #1").mkdir()
    return Path("exp #1")


@pytest.fixture
def client(place: Path) -> Iterator[TestClient]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    app = create_app(place, TOKEN, only_local=True)
    with TestClient(app, base_url="http://127.0.0.1:8100", headers=headers) as client:
        yield client


def start(client: TestClient, name: str) -> Any:
    body = {"model": "no-such-model/at-all", "words": ["data.train=no-such-rows.jsonl"], "name": name}
    return client.post("/api/start", json=body)


def as_if_begun(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A training that is at work as long as its status is None."""
    command = SimpleNamespace(status=None, id="x", tell=lambda: {"command": "x"})
    commands = client.app.state.page.commands  # type: ignore[attr-defined]
    monkeypatch.setattr(commands, "start", lambda words: command)
    monkeypatch.setattr(commands, "get", lambda name: command)
    return command


@pytest.mark.parametrize("name", ["2024", "null", "1e5", "on", "first"])
def test_the_run_goes_into_the_folder_whatever_it_is_called(
    client: TestClient, place: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_begun(client, monkeypatch)
    assert start(client, name).status_code == 200
    config = read_config(str(place / f"{name}.yaml"), check_files=False)
    assert config.output == f"exp #1/{name}"


@pytest.mark.slow
def test_a_refused_training_leaves_its_name_free(client: TestClient, place: Path) -> None:
    for _ in range(2):
        begun = start(client, "first")
        assert begun.status_code == 200, begun.text
        deadline = time.monotonic() + SECONDS
        while (told := client.get("/api/command", params={"command": begun.json()["command"]}).json())[
            "status"
        ] is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert told["status"] > 0
        assert not list(place.iterdir())


def test_what_cannot_be_begun_leaves_no_config(
    client: TestClient, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_AT_ONCE", 0)
    answer = start(client, "first")
    assert (answer.status_code, "0 commands at work" in answer.json()["error"]) == (400, True)
    assert not list(place.iterdir())


@pytest.mark.parametrize("kept", ["its run is there", "it was changed", "it is at work", "it went well"])
def test_a_config_that_somebody_needs_is_kept(
    client: TestClient, place: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, config, run = as_if_begun(client, monkeypatch), place / "first.yaml", place / "first"
    assert start(client, "first").status_code == 200
    if kept == "its run is there":
        run.mkdir()
        (run / "config.yaml").touch()
    if kept == "it was changed":
        config.write_text(config.read_text() + "steps: 3\n")
    command.status = {"it is at work": None, "it went well": 0}.get(kept, 1)
    client.get("/api/command", params={"command": "x"})
    assert config.is_file()
    assert "choose another name" in start(client, "first").json()["error"]


def test_a_config_is_removed_when_its_training_was_refused(
    client: TestClient, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        command = as_if_begun(client, monkeypatch)
        assert start(client, "first").status_code == 200
        command.status = 2
    client.get("/api/command", params={"command": "x"})
    assert not list(place.iterdir())
