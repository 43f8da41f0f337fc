"""Who may ask the page, and what nobody is told: attacks that are tried and refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from page.conftest import TOKEN
from tonnage.page.app import create_app
from tonnage.page.guard import POLICY

READS = (
    "/api/runs",
    "/api/runs/live",
    "/api/run?run=first",
    "/api/run/live?run=first",
    "/api/run/sections?run=first",
    "/api/run/log?run=first",
    "/api/run/output?run=first",
    "/api/run/saved?run=first",
    "/api/commands",
    "/api/command?command=x",
)
WRITES = ("/api/run/tags", "/api/run/stop", "/api/run/resume", "/api/verify", "/api/command/end")
OUTSIDE = ("..", "../secret", "first/../../secret", "/etc", "//etc", "first/../..", "~", "\0", "a" * 5000, "link")


@pytest.mark.parametrize("path", [*READS, "/api/nothing"])
def test_without_the_token_nothing_is_told(client: TestClient, path: str) -> None:
    for word in ("", "Bearer", "Bearer ", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN.upper()}"):
        answer = client.get(path, headers={"Authorization": word})
        assert answer.status_code == 403
        assert "token" in answer.json()["error"]
    assert (
        client.get(f"{path}{'&' if '?' in path else '?'}token={TOKEN}", headers={"Authorization": ""}).status_code
        == 403
    )


@pytest.mark.parametrize("path", WRITES)
def test_without_the_token_nothing_is_done(client: TestClient, path: str) -> None:
    answer = client.post(path, json={"run": "first"}, headers={"Authorization": "Bearer x"})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:8101"},
        {"Origin": "https://127.0.0.1:8100"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Host": "evil.example"},
        {"Host": "evil.example:8100"},
        {"Host": "127.0.0.1.evil.example:8100"},
        {"Host": "[evil"},
        {"Host": ""},
    ],
)
def test_other_pages_and_names_are_refused_though_they_know_the_token(
    client: TestClient, headers: dict[str, str]
) -> None:
    for path in ("/api/runs", "/", "/static/app.js"):
        assert client.get(path, headers=headers).status_code == 403
    assert client.post("/api/run/stop", json={"run": "first"}, headers=headers).status_code == 403


def test_this_page_and_a_visit_are_let_in(client: TestClient) -> None:
    own = {"Origin": "http://127.0.0.1:8100", "Sec-Fetch-Site": "same-origin"}
    assert client.get("/api/runs", headers=own).status_code == 200
    visit = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Authorization": ""}
    assert client.get("/", headers=visit).status_code == 200
    assert client.get("/api/runs", headers={"Host": "localhost:8100"}).status_code == 200
    assert client.get("/api/runs", headers={"Host": "[::1]:8100"}).status_code == 200


def test_with_other_machines_any_name_will_do_but_not_any_origin(folder: Path) -> None:
    app = create_app(folder, TOKEN, only_local=False)
    own = {"Authorization": f"Bearer {TOKEN}", "Host": "gpu7:8100"}
    with TestClient(app) as client:
        assert client.get("/api/runs", headers=own).status_code == 200
        assert client.get("/api/runs", headers={**own, "Origin": "http://gpu7:8100"}).status_code == 200
        assert client.get("/api/runs", headers={**own, "Origin": "http://gpu8:8100"}).status_code == 403
        assert client.get("/api/runs", headers={"Host": "gpu7:8100"}).status_code == 403


def test_every_answer_carries_the_policy(client: TestClient) -> None:
    assert "unsafe" not in POLICY.replace("style-src-attr 'unsafe-inline'", "")
    for path in ("/", "/static/app.js", "/static/page.css", "/api/runs", "/api/nothing", "/nothing"):
        answer = client.get(path)
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
    assert client.get("/", headers={"Host": "evil"}).headers["content-security-policy"] == POLICY


def test_the_page_holds_no_script_and_no_style_of_its_own(client: TestClient) -> None:
    html = client.get("/").text
    assert re.findall(r"<script(?![^>]*src=)|<style| on\w+=|style=", html) == []
    assert TOKEN not in html
    for name in re.findall(r'(?:src|href)="/static/([^"]+)"', html):
        assert client.get(f"/static/{name}").status_code == 200
    assert re.findall(r"https?://(?!127\.0\.0\.1)[^\s\"']+", html) == []


@pytest.mark.parametrize("name", ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "index.html", "app.py", "", ".", "x.js"])
def test_only_files_of_the_page_are_static(client: TestClient, name: str) -> None:
    assert client.get(f"/static/{name}").status_code == 404


@pytest.mark.parametrize("name", OUTSIDE)
def test_paths_never_leave_the_folder(client: TestClient, folder: Path, name: str) -> None:
    secret = folder.parent / "secret"
    secret.mkdir()
    for entry in (folder / "first").iterdir():
        if entry.is_file():
            (secret / entry.name).write_bytes(entry.read_bytes())
    (folder / "link").symlink_to(secret)
    reads = ("/api/run", "/api/run/live", "/api/run/sections", "/api/run/log", "/api/run/output", "/api/run/saved")
    for path in reads:
        assert client.get(path, params={"run": name}).status_code == 400
    for path in ("/api/run/stop", "/api/run/resume"):
        assert client.post(path, json={"run": name}).status_code == 400
    assert client.post("/api/run/tags", json={"run": name, "tags": [], "note": ""}).status_code == 400
    assert client.post("/api/verify", json={"path": name}).status_code == 400
    assert "link" not in [row["run"] for row in client.get("/api/runs").json()["runs"]]
    assert client.get("/api/commands").json() == {"commands": []}


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl", "config.yaml", "plan.json", "workers", "tags.json"])
def test_a_link_out_of_the_folder_inside_of_a_run_is_not_followed(client: TestClient, folder: Path, name: str) -> None:
    run, secret = folder / "stopped", folder.parent / "secret"
    source = run / name
    if source.exists():
        source.rename(secret)
    else:
        secret.write_text('{"tags": ["secret"], "note": ""}')
    source.symlink_to(secret)
    for path in ("/api/run", "/api/run/sections", "/api/run/log", "/api/run/output"):
        answer = client.get(path, params={"run": "stopped"})
        assert (answer.status_code, "not below" in answer.json()["error"]) == (400, True)
    (row,) = [row for row in client.get("/api/runs").json()["runs"] if row["run"] == "stopped"]
    assert (row["state"], row["tags"], row["loss"]) == ("failed", [], None)
    assert row["message"].startswith("not shown")


def test_a_link_within_the_folder_is_a_run(client: TestClient, folder: Path) -> None:
    (folder / "newest").symlink_to(folder / "first")
    (folder / "round").symlink_to(folder)
    names = [row["run"] for row in client.get("/api/runs").json()["runs"]]
    assert names == ["failed", "first", "killed", "newest", "prepared", "stopped"]
    assert client.get("/api/run", params={"run": "newest"}).json()["row"]["state"] == "done"


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x1b[31m"


def test_markup_in_names_logs_and_rows_stays_text(client: TestClient, folder: Path) -> None:
    name = "<script>alert(0)</script>"
    run = folder / "x<img src=x onerror=alert(3)>"
    (folder / "failed").rename(run)
    (run / "log.txt").write_text(HOSTILE)
    rows = json.loads((run / "rows.json").read_text())
    for row in rows["sources"][0]["rows"]:
        for piece in row["pieces"]:
            piece["text"] = HOSTILE
    (run / "rows.json").write_text(json.dumps(rows))
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "number": 1, "prompt": HOSTILE, "answer": name}) + "\n")
    sections = client.get("/api/run/sections", params={"run": run.name}).text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in sections
    assert not re.search(r"<script|<img src=x|\u202e|\x1b", sections)
    answer = client.get("/api/run/log", params={"run": run.name})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["text"] == HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b")


def test_what_a_stranger_wrote_is_no_defect(client: TestClient, folder: Path) -> None:
    """Files of another form make a run that is shown less of, or refused in words; never a failure of the server."""
    nonsense = (
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b'{"step": "x"}\n',
        b'{"step": 1, "loss": {}}\n' * 3,
        b"\xff\xfe" * 99,
    )
    deep = b"[" * 100_000
    more = (b'{"step": 1, "loss": 1e999, "memory": 3}\n' * 3, b'{"step": 9e99, "loss": "x"}\n', deep, b"1" * 10_000)
    for number, content in enumerate([*nonsense, *more]):
        for file in ("metrics.jsonl", "plan.json", "config.yaml", "tags.json", "workers/rank-0.position"):
            run = folder / f"n{number}-{file.replace('/', '-')}"
            run.mkdir()
            for entry in ("config.yaml", "plan.json", "metrics.jsonl"):
                (run / entry).write_bytes((folder / "stopped" / entry).read_bytes())
            (run / file).parent.mkdir(exist_ok=True)
            (run / file).write_bytes(content)
    os.mkfifo(folder / "n0-tags.json" / "log.txt")
    os.mkfifo(folder / "n0-tags.json" / "samples.jsonl")
    rows = {row["run"]: row for row in client.get("/api/runs").json()["runs"]}
    assert len(rows) == 5 + 5 * len([*nonsense, *more])
    for name in rows:
        for path in ("/api/run", "/api/run/sections", "/api/run/log"):
            if (name, path) != ("n0-tags.json", "/api/run/sections"):  # which waits for a writer of the pipe
                assert client.get(path, params={"run": name}).status_code in (200, 400), name


@pytest.mark.parametrize(
    "body", [b"", b"x", b"[]", b"{}", b'{"run": 1}', b'{"run": "first", "more": 1}', b"[" * 10_000]
)
def test_other_questions_are_refused(client: TestClient, body: bytes) -> None:
    json_type = {"Content-Type": "application/json"}
    assert client.post("/api/run/stop", content=body, headers=json_type).status_code == 400
    text_type = {"Content-Type": "text/plain"}
    assert client.post("/api/run/stop", content=b'{"run": "first"}', headers=text_type).status_code == 400
    assert client.post("/api/run/stop", content=b"x" * (2 << 20), headers=json_type).status_code == 400
    assert client.get("/api/commands").json() == {"commands": []}
