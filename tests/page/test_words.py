"""What the page lets through to the command line: keys and values of a config, and no path out of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient

from tonnage.config import read_config
from tonnage.errors import UserError
from tonnage.page.folder import Folder
from tonnage.page.words import as_yaml, checked, checked_model, checked_name


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "rows.jsonl").touch()
    (tmp_path / "secret").touch()
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "secret")
    return tmp_path / "inside"


GOOD = (
    "optimizer.lr=1e-4",
    "data.train=rows.jsonl",
    "data.train=new.jsonl",
    "data.train=openai/gsm8k",
    "data.train=[{path: rows.jsonl}]",
    "output=runs/a",
    "evaluate.gate={eval_loss: '< 2'}",
    "data.system=Say: a/b -- or ../not this",
)
OUT = (
    "data.train=/etc/passwd",
    "data.train=../secret",
    "data.train=~/x",
    "data.train=link",
    "data.train=[rows.jsonl, ../secret]",
    "data={train: [{path: /etc/passwd}]}",
    "output=a/../../b",
    "output=/tmp/elsewhere",
    "memory.offload_dirs=[/mnt/x]",
)
NO_WORDS = ("--force", "-h", "config.yaml", "", "=1", "a b=1", "--lr=1", 1, None, "x=" + "1" * 5000)


def test_keys_and_values_are_let_through(here: Path) -> None:
    assert checked(Folder(here), here, GOOD[:-1]) == list(GOOD[:-1])


@pytest.mark.parametrize("word", OUT)
def test_paths_out_of_the_folder_are_not(here: Path, word: str) -> None:
    with pytest.raises(UserError, match="not below"):
        checked(Folder(here), here, [word])


@pytest.mark.parametrize("word", NO_WORDS)
def test_what_is_no_override_is_not(here: Path, word: object) -> None:
    with pytest.raises(UserError):
        checked(Folder(here), here, [word])


@pytest.mark.parametrize("model", ["", "--json", "-m", "/etc", "../secret", "link", "~", "x" * 5000])
def test_what_is_no_model_of_the_folder_is_not(here: Path, model: str) -> None:
    with pytest.raises(UserError):
        checked_model(Folder(here), here, model)
    assert checked_model(Folder(here), here, "Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", ".a", "a b", "a" * 200, "a\0"])
def test_what_is_no_name_of_a_run_is_not(name: str) -> None:
    with pytest.raises(UserError):
        checked_name(name)
    assert checked_name("first-1.b_c") == "first-1.b_c"


def test_the_config_says_what_the_overrides_say(here: Path) -> None:
    words = ["data.train=rows.jsonl", "optimizer.lr=1e-4", "steps=20", "batch.sequences=4", "adapter.rank=16"]
    words += ["output=runs/a", "memory.micro_batch=2", "memory.moments=fp32", "data.train.format=alpaca"]
    words += ["launch.with=slurm", "launch.time=1:30:00", "objective=dpo", "objective.beta=0.3"]
    path = here / "config.yaml"
    path.write_text(as_yaml("Qwen/Qwen2.5-0.5B", words))
    (here / "bare.yaml").write_text("model: Qwen/Qwen2.5-0.5B\ndata: {train: x}\n")
    said = read_config(str(path), check_files=False)
    assert said == read_config(str(here / "bare.yaml"), words, check_files=False)
    assert yaml.safe_load(path.read_text())["memory"] == {"micro_batch": 2, "moments": "fp32"}


ASKED: dict[str, dict[str, object]] = {
    "/api/plan": {"model": "m", "words": [], "hardware": "", "in_place_of": ""},
    "/api/config": {"model": "m", "words": []},
    "/api/start": {"model": "m", "words": [], "name": "new"},
    "/api/inspect": {"config": "first", "words": [], "rows": 3, "in_place_of": ""},
    "/api/chat/load": {"model": "m", "template": "auto"},
}
WRONG = [
    *(("/api/plan", {"hardware": hardware}) for hardware in ("--why", "8xH100 --why;", "a\nb", "-1")),
    *((path, {"words": [OUT[0]]}) for path in ASKED if path != "/api/chat/load"),
    *((path, {"words": ["--force"]}) for path in ASKED if path != "/api/chat/load"),
    *((path, {"model": "../x"}) for path in ASKED if path != "/api/inspect"),
    ("/api/chat/load", {"template": "--trust-remote-code"}),
    ("/api/chat/load", {"template": "../x.jinja"}),
    ("/api/start", {"name": "../new"}),
    ("/api/start", {"name": "a/b"}),
    ("/api/start", {"name": "first"}),  # a run that is there
    ("/api/inspect", {"config": "../x.yaml"}),
    ("/api/inspect", {"config": "nothing"}),
    ("/api/inspect", {"rows": 0}),
    ("/api/inspect", {"rows": 10**9}),
]


@pytest.mark.parametrize(("path", "change"), WRONG)
def test_no_command_is_begun_for_what_is_refused(
    client: TestClient, folder: Path, path: str, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    client.app.state.page.commands.folder = folder  # type: ignore[attr-defined]
    before = sorted(folder.rglob("*"))
    answer = client.post(path, json=ASKED[path] | change)
    assert answer.status_code == 400, answer.text
    assert client.get("/api/commands").json() == {"commands": []}
    assert sorted(folder.rglob("*")) == before
