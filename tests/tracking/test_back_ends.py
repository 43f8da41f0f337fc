"""The trackers themselves, on this machine: a run and the rest of it, and a network that is gone.

Each test is skipped where its package is not installed:
``pip install 'tonnage[wandb,mlflow,trackio]'``
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sqlite3
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tonnage.rundir.directory import RunDirectory
from tonnage.tracking.news import Note
from tonnage.tracking.trackers import END_SECONDS, Trackers
from tracking.fake_runs import PRIVATE, fake_run, go_on_from, said, take_steps

SECRET = "0123456789abcdef0123456789abcdef01234567"
SECONDS = 120.0
BLOCK_BYTES = 1 << 15


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"pip install 'tonnage[{name}]'")


def follow(run: RunDirectory, name: str, first: int, last: int, seconds: float = SECONDS) -> None:
    trackers = Trackers(run)
    trackers.start((name,), samples=True)
    take_steps(run, first, last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(END_SECONDS, "finished", seconds)
        trackers.end("finished")


def twice(folder: Path, name: str) -> RunDirectory:
    """Four steps, and from the second on two more, which are not the first's."""
    run = fake_run(folder, track=name, track_samples=True)
    follow(run, name, 1, 4)
    before = Note.of(run, name)
    go_on_from(run, 2)
    follow(run, name, 3, 5)
    assert not [line for line in said(run).splitlines() if "not done yet" not in line]
    assert Note.of(run, name).id == before.id
    assert Note.of(run, name).unsent(run, samples=True) == 0
    return run


def test_tensorboard_hides_steps_that_are_trained_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = twice(tmp_path, "tensorboard")
    shown = EventAccumulator(str(run.path / "tensorboard"), purge_orphaned_data=True).Reload()
    assert [event.step for event in shown.Scalars("loss")] == [1, 2, 3, 4, 5]
    assert [event.value for event in shown.Scalars("memory/host_peak")] == [2.0**30] * 5
    assert [event.step for event in shown.Scalars("eval_loss")] == [5]
    assert "What is 2 + 2?" in str(shown.Tensors("samples/2"))
    assert PRIVATE not in str(shown.Tensors("config"))


@needs("wandb")
@pytest.mark.matrix
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    run = twice(tmp_path, "wandb")
    parts = sorted((run.path / "wandb").glob("offline-run-*"))
    assert {part.name.rsplit("-", 1)[1] for part in parts} == {Note.of(run, "wandb").id}
    records = [list(stored(part)) for part in parts]
    logged = [
        [
            {"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for record in some
            if record.WhichOneof("record_type") == "history"
        ]
        for some in records
    ]
    assert [[one["step"] for one in some if "loss" in one] for some in logged] == [[1, 2, 3, 4], [3, 4, 5]]
    assert [[one["eval_loss"] for one in some if "eval_loss" in one] for some in logged] == [[0.5], [0.5]]
    assert [sum(any(key.startswith("samples") for key in one) for one in some) for some in logged] == [1, 1]
    hosts = {record.run.host for some in records for record in some if record.WhichOneof("record_type") == "run"}
    assert hosts == {""}
    everything = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path != run.config)
    assert SECRET.encode() not in everything
    assert PRIVATE.encode() not in everything


def stored(part: Path) -> Iterator[Any]:
    """Records of a run as they are kept until they are sent: in the format of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    content, place, data = next(part.glob("*.wandb")).read_bytes(), 7, b""
    while place + 7 <= len(content):
        if BLOCK_BYTES - place % BLOCK_BYTES < 7:  # filled up with zeros
            place += BLOCK_BYTES - place % BLOCK_BYTES
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        data += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record.FromString(data)
            data = b""
            yield record


@needs("mlflow")
@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["sqlite", "server"])
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    store, files = f"sqlite:///{tmp_path}/runs.db", tmp_path / "files"
    monkeypatch.chdir(tmp_path)
    with mlflow_server(store, files) if kind == "server" else nullcontext(store) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        run = twice(tmp_path, "mlflow")
    with closing(sqlite3.connect(tmp_path / "runs.db")) as base:
        assert base.execute("select run_uuid, name, status, user_id from runs").fetchall() == [
            (Note.of(run, "mlflow").id, "sums", "FINISHED", "unknown")
        ]
        steps = base.execute("select step from metrics where key = 'loss' order by timestamp, step").fetchall()
        assert [step for (step,) in steps] == [1, 2, 3, 4, 3, 4, 5]
        assert base.execute("select step from metrics where key = 'eval_loss' order by step").fetchall() == [(4,), (5,)]
        told = dict(base.execute("select key, value from params").fetchall())
        assert (told["model"], told["data.train.0.path"]) == ("tiny", "rows.jsonl")
        assert base.execute("select key from tags").fetchall() == [("mlflow.runName",)]
    samples = sorted(path for path in tmp_path.rglob("step-*.json") if "samples" in str(path))
    assert [path.name for path in samples] == ["step-00000004-1.json", "step-00000005-1.json"]
    assert json.loads(samples[0].read_text())[1]["answer"] == "2"


@contextmanager
def mlflow_server(store: str, files: Path) -> Iterator[str]:
    """Its address; a server of one worker, of which nothing is left afterwards."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store, "--artifacts-destination", str(files)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, 9)
        server.wait()


@needs("trackio")
@pytest.mark.slow
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run = twice(tmp_path, "trackio")
    (path,) = (tmp_path / "trackio").glob("*.db")
    with closing(sqlite3.connect(path)) as base:
        found = [(step, json.loads(text)) for step, text in base.execute("select step, metrics from metrics")]
        assert {name for (name,) in base.execute("select run_name from metrics")} == {Note.of(run, "trackio").id}
        configs = [json.loads(text) for (text,) in base.execute("select config from configs")]
    assert [step for step, values in found if "loss" in values] == [1, 2, 3, 4, 3, 4, 5]
    assert [step for step, values in found if "eval_loss" in values] == [4, 5]
    assert [step for step, values in found if "samples" in values] == [4, 5]
    assert [config["model"] for config in configs] == ["tiny"]
    assert PRIVATE.encode() not in path.read_bytes()


NOWHERE = "http://127.0.0.1:9"
"""The port of a service that nobody offers any more."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variables"),
    [
        pytest.param("wandb", {"WANDB_BASE_URL": NOWHERE, "WANDB_API_KEY": SECRET}, marks=needs("wandb")),
        pytest.param("mlflow", {"MLFLOW_TRACKING_URI": f"http://me:{SECRET}@127.0.0.1:9"}, marks=needs("mlflow")),
        pytest.param("trackio", {"TRACKIO_SERVER_URL": f"{NOWHERE}?write_token={SECRET}"}, marks=needs("trackio")),
    ],
)
def test_the_network_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, variables: dict[str, str]
) -> None:
    for variable, value in {**variables, "TRACKIO_DIR": str(tmp_path / "trackio")}.items():
        monkeypatch.setenv(variable, value)
    run = fake_run(tmp_path, track=name, track_samples=True)
    began = time.monotonic()
    follow(run, name, 1, 3, seconds=20.0)
    assert time.monotonic() - began < 60.0
    lines = [line.split(" ", 2)[2] for line in said(run).splitlines()]
    if name == "trackio":  # which keeps what it cannot send in its own directory, until it can
        with closing(sqlite3.connect(next((tmp_path / "trackio").glob("*.db")))) as base:
            assert base.execute("select count(*) from metrics").fetchone() == (5,)
        assert lines == []
    else:
        assert f"{name}: had not ended 20 s after the run; 6 record(s) were not sent" in lines[-1]
        assert name == "wandb" or "trying again" in lines[0], "which waits for a minute itself"
    assert not [path for path in run.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
