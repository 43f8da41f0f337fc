"""Who may ask the page, and what nobody is told: attacks that are tried and refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from page.conftest import TOKEN
from tonnage.page.app import create_app
from tonnage.page.guard import POLICY

ROUTES = [
    (method, route.path)
    for route in create_app(Path(), TOKEN, only_local=True).routes
    if isinstance(route, Route) and route.path.startswith("/api")
    for method in sorted((route.methods or set()) - {"HEAD"})
]
"""All that the page tells and does."""
OUTSIDE = ("..", "../secret", "first/../../secret", "/etc", "//etc", "first/../..", "~", "\0", "a" * 5000, "link")


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", "/api/nothing")])
def test_without_the_token_nothing_is_told_and_nothing_done(client: TestClient, method: str, path: str) -> None:
    for word in ("", "Bearer", "Bearer ", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN.upper()}"):
        answer = client.request(method, path, params={"token": TOKEN}, headers={"Authorization": word})
        assert answer.status_code == 403
        assert "token" in answer.json()["error"]


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
    for method, path in (*ROUTES, ("GET", "/"), ("GET", "/static/app.js")):
        assert client.request(method, path, headers=headers).status_code == 403, path


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
    client.app.state.page.commands.folder = folder  # type: ignore[attr-defined]
    reads = [path for method, path in ROUTES if method == "GET" and path.startswith("/api/run/")]
    assert len(reads) == 5
    for path in ("/api/run", "/api/compare", *reads):
        assert client.get(path, params={"run": name}).status_code == 400, path
    for path, body in (
        ("/api/run/stop", {"run": name}),
        ("/api/run/resume", {"run": name}),
        ("/api/run/tags", {"run": name, "tags": [], "note": ""}),
        ("/api/verify", {"path": name}),
        ("/api/inspect", {"config": name, "words": [], "rows": 3, "in_place_of": ""}),
        ("/api/chat/load", {"model": name, "template": "auto"}),
    ):
        assert client.post(path, json=body).status_code == 400, path
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


@pytest.mark.slow
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
    rows = {row["run"]: row for row in client.get("/api/runs").json()["runs"]}
    assert len(rows) == 5 + 5 * len([*nonsense, *more])
    for name in rows:
        for path in ("/api/run", "/api/run/sections", "/api/run/log"):
            assert client.get(path, params={"run": name}).status_code in (200, 400), name


@pytest.mark.parametrize(
    "file", ["samples.jsonl", "workers/rank-0.position", "config.yaml", "tokenizer/tokenizer.json"]
)
def test_nobody_waits_for_a_pipe_or_a_socket(client: TestClient, folder: Path, file: str) -> None:
    """In a run's directory, in place of a file."""
    path = folder / "stopped" / file
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    for _, read in ROUTES:
        if read.startswith("/api/run") and read not in ("/api/runs", "/api/runs/live"):
            answer = client.get(read, params={"run": "stopped"})
            assert answer.status_code in (400, 405), read
    (row,) = [row for row in client.get("/api/runs").json()["runs"] if row["run"] == "stopped"]
    assert row["message"] == "not shown: no file and no directory"


@pytest.mark.parametrize("trusting", [False, True])
def test_no_code_of_a_stranger_is_run(client: TestClient, folder: Path, trusting: bool) -> None:
    """Whose config trusts the code of its model: not for a click."""
    client.app.state.page.commands.folder = folder  # type: ignore[attr-defined]
    begun: list[list[str]] = []
    as_if = SimpleNamespace(status=0, tell=dict, end=dict)
    client.app.state.page.commands.start = lambda words, **_: begun.append(words) or as_if  # type: ignore[attr-defined, func-returns-value]
    config = folder / "stopped" / "config.yaml"
    text = config.read_text()
    assert "trust_remote_code: false" in text
    config.write_text(text.replace("trust_remote_code: false", f"trust_remote_code: {str(trusting).lower()}"))
    resume, inspect = {"run": "stopped"}, {"config": "stopped", "words": [], "rows": 3, "in_place_of": ""}
    asked = {
        "/api/run/resume": (resume, "tonnage train --resume stopped", True),
        "/api/inspect": (inspect, "tonnage inspect stopped/config.yaml", trusting),
        "/api/chat/load": ({"model": "stopped", "template": "auto"}, "tonnage serve stopped", trusting),
    }
    for open_to_all in (config, config.parent):
        open_to_all.chmod(0o777)
        for path, (body, line, is_refused) in asked.items():
            begun.clear()
            answer = client.post(path, json=body)
            assert (answer.status_code, len(begun)) == ((400, 0) if is_refused else (200, 1)), path
            assert not is_refused or re.search(f"everybody may write.*{line}", answer.json()["error"], re.DOTALL)
        open_to_all.chmod(0o755)


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
