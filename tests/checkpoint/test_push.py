"""Pushing, against a local stand-in for the hub's HTTP interface; the real client, in a process of its own."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from tonnage.checkpoint.shards import Part, hash_file, write_file
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


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_POST(self) -> None:
        body = self.body()
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
            self.answer({"commitUrl": f"{self.server.url}/me/mine/commit/1", "commitOid": "0" * 40, "hookOutput": ""})
        else:
            self.answer({})

    def do_PUT(self) -> None:
        body = self.body()
        self.server.large[hashlib.sha256(body).hexdigest()] = body
        self.answer({})

    def do_GET(self) -> None:
        self.answer({"error": "Not found"} if self.server.refuses else {}, status=404 if self.server.refuses else 200)

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
    write_file(directory / "model.safetensors", [Part("w", (0, 0), torch.randn(40, 9))], in_parts=False)
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


def pushed(directory: Path, url: str, repository: str = "me/mine") -> subprocess.CompletedProcess[str]:
    script = (
        "import sys\nfrom pathlib import Path\nfrom tonnage.checkpoint.push import push\n"
        "from tonnage.errors import UserError\n"
        "try:\n    print(push(Path(sys.argv[1]), sys.argv[2]))\n"
        "except UserError as error:\n    sys.exit(f'error: {error}')\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", script, str(directory), repository]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_everything_that_was_exported_arrives_and_nothing_else(exported: Path, hub: Hub) -> None:
    result = pushed(exported, hub.url)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{hub.url}/me/mine"
    assert hub.created == [{"name": "mine", "organization": "me", "visibility": "private"}]
    assert hub.committed == {path.name: path.read_bytes() for path in exported.iterdir() if path.is_file()}
    assert f"Bearer {TOKEN}" in hub.tokens
    assert TOKEN not in result.stdout + result.stderr


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
