"""Pushing, against a local stand-in for the hub's HTTP interface; the real client, in a process of its own."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import yaml

from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint.shards import TensorPart, hash_file, write_file
from tonnage.checkpoint.verify import CHECKSUMS
from tonnage.files.writing import write_json

TOKEN = "hf_token_of_nobody"


class Hub(ThreadingHTTPServer):
    """Takes what the client sends and keeps it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.refuses = False
        self.created: list[dict[str, Any]] = []
        self.large: dict[str, bytes] = {}
        """Content by its SHA-256."""
        self.committed: dict[str, bytes] = {}
        """Content by name."""
        self.tokens: set[str | None] = set()
        self.uploads: list[str] = []
        """SHA-256 of everything that was sent, as often as it was."""
        self.commits: list[dict[str, bytes]] = []
        """What the repository held after each."""
        self.is_public = False
        self.cut_at = -1
        """The number of the request at which the line is cut, or whoever sends it is killed."""
        self.cut: Callable[[], None] | None = None
        self.requests = 0

    def count(self) -> bool:
        """Whether a request is to be answered."""
        self.requests += 1
        if self.requests - 1 != self.cut_at:
            return True
        if self.cut is not None:
            self.cut()
        return False


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_POST(self) -> None:
        body = self.body()
        if not self.server.count():
            self.close_connection = True
            return
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.refuses:
            self.answer({"error": "Forbidden: you have no rights here"}, status=403)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{self.server.url}/me/mine", "name": "me/mine"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            kinds = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            self.answer(
                {"files": [{"path": n, "uploadMode": kind, "shouldIgnore": False} for n, kind in kinds.items()]}
            )
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**item, "actions": {"upload": {"href": f"{self.server.url}/store/{item['oid']}", "header": {}}}}
                if item["oid"] not in self.server.large
                else item
                for item in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.committed[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.committed[value["path"]] = self.server.large[value["oid"]]
                elif line["key"] == "deletedFile":
                    del self.server.committed[value["path"]]
            self.server.commits.append(dict(self.server.committed))
            self.answer({"commitUrl": f"{self.server.url}/me/mine/commit/1", "commitOid": "0" * 40, "hookOutput": ""})
        else:
            self.answer({})

    def do_PUT(self) -> None:
        body = self.body()
        if not self.server.count():
            self.close_connection = True
            return
        self.server.uploads.append(hashlib.sha256(body).hexdigest())
        self.server.large[hashlib.sha256(body).hexdigest()] = body
        self.answer({})

    def do_GET(self) -> None:
        if self.server.refuses:
            self.answer({"error": "Not found"}, status=404)
            return
        files = [{"rfilename": name} for name in self.server.committed]
        self.answer({"id": "me/mine", "private": not self.server.is_public, "siblings": files})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, value: dict[str, Any], status: int = 200, kind: str = "application/json") -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    directory = tmp_path / "out"
    directory.mkdir()
    write_file(directory / "model.safetensors", [TensorPart("w", (0, 0), torch.randn(40, 9))], in_parts=False)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "README.md").write_text("---\nlibrary_name: transformers\n---\n")
    write_json(
        directory / CHECKSUMS,
        {
            "files": {
                path.name: {"sha256": hash_file(path, "sha256"), "bytes": path.stat().st_size}
                for path in directory.iterdir()
            }
        },
    )
    (directory / ".cache").mkdir()
    return directory


def command(directory: Path, url: str, repository: str) -> dict[str, Any]:
    """What starts a process that pushes."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom tonnage.checkpoint.push import push\n"
        "from tonnage.errors import UserError\n"
        "try:\n    print(push(Path(sys.argv[1]), sys.argv[2]))\n"
        "except UserError as error:\n    sys.exit(f'error: {error}')\n"
    )
    return {"args": [sys.executable, "-c", script, str(directory), repository], "env": environment(url)}


def environment(url: str) -> dict[str, str]:
    """In which the hub is the stand-in, and somebody is logged in."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return kept | own


def pushed(directory: Path, url: str, repository: str = "me/mine") -> subprocess.CompletedProcess[str]:
    how = command(directory, url, repository)
    return subprocess.run(**how, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_everything_that_was_exported_arrives_and_nothing_else(exported: Path, hub: Hub) -> None:
    result = pushed(exported, hub.url)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{hub.url}/me/mine"
    assert hub.created == [{"name": "mine", "organization": "me", "visibility": "private"}]
    assert hub.committed == {path.name: path.read_bytes() for path in exported.iterdir() if path.is_file()}
    assert f"Bearer {TOKEN}" in hub.tokens
    assert TOKEN not in result.stdout + result.stderr


@pytest.mark.slow
def test_a_damaged_export_is_not_pushed(exported: Path, hub: Hub) -> None:
    content = bytearray((exported / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (exported / "model.safetensors").write_bytes(content)
    result = pushed(exported, hub.url)
    assert "model.safetensors: content that has changed" in result.stderr
    assert not hub.created


@pytest.mark.slow
def test_refusals_are_told_in_a_sentence(exported: Path, hub: Hub) -> None:
    hub.refuses = True
    for url, repository, expected in (
        (hub.url, "me/mine", "403"),
        ("http://127.0.0.1:9", "me/mine", "the hub cannot be reached"),
        (hub.url, "not a name", "not a name"),
    ):
        result = pushed(exported, url, repository)
        assert result.returncode == 1
        assert expected in result.stderr, result.stderr
        assert "Traceback" not in result.stderr
        assert f"--push {repository}: " in result.stderr
        assert TOKEN not in result.stderr


@pytest.mark.slow
def test_weights_of_an_earlier_export_go_and_other_peoples_files_stay(exported: Path, hub: Hub) -> None:
    hub.committed = {"model-00002-of-00002.safetensors": b"old", "model.safetensors": b"old", "picture.png": b"theirs"}
    result = pushed(exported, hub.url)
    assert result.returncode == 0, result.stderr
    names = {path.name for path in exported.iterdir() if path.is_file()}
    assert set(hub.committed) == {*names, "picture.png"}
    assert len(hub.commits) == 1


@pytest.mark.slow
def test_nothing_private_goes_where_everybody_reads(exported: Path, hub: Hub) -> None:
    hub.is_public = True
    result = pushed(exported, hub.url)
    assert "a repository that everybody can read" in result.stderr
    assert not hub.commits
    assert not hub.uploads


@pytest.mark.slow
@pytest.mark.parametrize(
    "every", [pytest.param(False, id="some"), pytest.param(True, id="every", marks=pytest.mark.matrix)]
)
def test_a_push_that_is_killed_at_any_request_is_whole_before_and_goes_on(
    exported: Path, hub: Hub, every: bool
) -> None:
    """One request after another is the last one; then the same push is made again."""
    before = {"model.safetensors": b"of an earlier step"}
    whole = {path.name: path.read_bytes() for path in exported.iterdir() if path.is_file()}
    assert pushed(exported, hub.url).returncode == 0
    needed = hub.requests
    assert needed > 4
    for number in range(needed) if every else (needed - 1,):  # which is the commit
        hub.committed, hub.commits, hub.large, hub.uploads = dict(before), [], {}, []
        hub.requests, hub.cut_at = 0, number
        killed = subprocess.Popen(**command(exported, hub.url, "me/mine"))
        hub.cut = killed.kill
        assert killed.wait(timeout=60) != 0, number
        assert hub.committed == before, number
        hub.cut_at = -1
        assert pushed(exported, hub.url).returncode == 0, number
        assert hub.committed == whole, number
        assert len(hub.commits) == 1, number
        assert len(hub.uploads) == len(set(hub.uploads)), number  # what had arrived was not sent again


@pytest.mark.slow
def test_every_save_of_a_run_is_pushed_and_no_secret_is_kept(tmp_path: Path, hub: Hub) -> None:
    """The hub refuses at first and the run goes on; afterwards everything arrives, the newest last."""
    hub.refuses = True
    config = write_run(tmp_path)
    trained = run_tonnage("train", config, url=hub.url)
    assert trained.returncode == 0, trained.stderr
    assert "Not pushed" in trained.stdout
    assert not hub.commits
    hub.refuses = False
    again = run_tonnage("train", "--resume", tmp_path / "run", url=hub.url)
    assert again.returncode == 0, again.stderr
    assert hub.created[0]["visibility"] == "private"
    assert hub.committed["model.safetensors"] == (tmp_path / "run/export/model.safetensors").read_bytes()
    assert b"library_name: transformers" in hub.committed["README.md"]
    noted = json.loads((tmp_path / "run/push/pushed.json").read_text())
    assert len(noted["done"]) + len(noted["overtaken"]) == 3
    assert len(hub.commits) == len(noted["done"]) >= 2
    assert [path.name for path in (tmp_path / "run/push").iterdir() if path.is_dir()] == []
    kept = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert TOKEN.encode() not in kept + (trained.stdout + trained.stderr + again.stdout + again.stderr).encode()
    commits = len(hub.commits)
    assert run_tonnage("train", "--resume", tmp_path / "run", url=hub.url).returncode == 0
    assert len(hub.commits) == commits
    nobody = run_tonnage("train", config, "output=other", url=hub.url, HF_TOKEN="", HF_HOME=str(tmp_path / "home"))
    assert nobody.returncode == 2
    assert "nobody is logged in" in nobody.stderr


def run_tonnage(*words: object, url: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A command with the stand-in for its hub."""
    line = [sys.executable, "-m", "tonnage.cli.main", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=240, env=environment(url) | more, check=False)


def write_run(folder: Path) -> Path:
    """The config of a short run that saves three times and pushes."""
    write_model(folder / "model", llama_config(num_hidden_layers=1))
    write_rows(folder / "rows.jsonl", alpaca_rows(40))
    config = {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": 192,
            "template": "plain",
            "cache": str(folder / "c"),
        },
        "batch": {"sequences": 4},
        "steps": 3,
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 1, "push": "me/mine", "keep": 3},
        "launch": {"threads": 1},
        "output": str(folder / "run"),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder / "config.yaml"
