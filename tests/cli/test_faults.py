"""Disks that are full or read-only, streams that are closed: one sentence, and nothing half written."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from entry import tonnage
from mounts import Disk, mounted
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.cli import main as cli
from tonnage.display.terminal import lost_output, streams, unheard
from tonnage.errors import OutputLost, Problem, UserError, refusals, refused
from tonnage.launch.local import run_workers
from tonnage.rundir.directory import RunDirectory

STREAMS = "import sys\nfrom tonnage.cli.main import main\nsys.argv[0] = 'tonnage'\nmain()\n"
READS = "from tonnage.cli import main as cli\ncli.app = lambda: print(input(), end='')\ncli.main()\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    write_model(folder / "model", llama_config(num_hidden_layers=1))
    config = {
        "model": str(folder / "model"),
        "data": {
            "train": str(write_rows(folder / "rows.jsonl", alpaca_rows(40))),
            "max_length": 128,
            "template": "plain",
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 4},
        "steps": 8,
        "launch": {"threads": 1},
        "track": [],
        "output": str(folder / "run"),
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "train_batch_size": 8}')
    return folder


def shell(command: str, code: str = STREAMS) -> subprocess.CompletedProcess[str]:
    """A command line with ``tonnage`` in it, carried out by bash; its status is that of tonnage."""
    tonnage = f"{sys.executable} -c '{code.replace(chr(39), chr(34))}'"
    command = f"set -o pipefail; {command.replace('tonnage', tonnage)}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("tonnage --version > /dev/full", 2, "standard output: could not be written: No space left on device"),
        ("tonnage import {0}/ds.json > /dev/full", 2, "standard output: could not be written: No space left on device"),
        ("tonnage import {0}/ds.json --json > /dev/full", 2, "standard output: could not be written: No space left"),
        ("tonnage import {0}/ds.json 2> /dev/null | true", 141, ""),
        ("tonnage --help | head -n 1 > /dev/null", 141, ""),
        ("tonnage --version >&-", 2, "standard output: could not be written: it is closed"),
        ("tonnage --version <&-", 0, ""),
        ("tonnage --version 2>&-", 0, ""),
        ("tonnage nonsense 2> /dev/full", 2, ""),
        ("tonnage verify /none <&- >&- 2>&-", 2, ""),
    ],
)
def test_streams_that_take_nothing(folder: Path, command: str, status: int, said: str) -> None:
    result = shell(command.replace("{0}", str(folder)))
    assert result.returncode == status, result
    assert said in result.stderr
    assert bool(said) == bool(result.stderr)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command", "status", "out", "said"),
    [
        ("tonnage <&-", 2, "", "error: standard input: closed\n  needed: lines to answer"),
        ("printf 'a\\xff\\n' | tonnage", 0, "a\ufffd", ""),
        ("tonnage 3>&1 >&- <<< x", 2, "", "standard output: could not be written: it is closed"),
    ],
)
def test_standard_input(command: str, status: int, out: str, said: str) -> None:
    result = shell(command, READS)
    assert (result.returncode, result.stdout) == (status, out), result
    assert said in result.stderr


class Full(io.StringIO):
    """A stream on a disk that has room for some writes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, text: str) -> int:
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_work_goes_on_if_its_output_is_lost_and_it_is_said_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full(2))
    done = []

    def app() -> None:
        with unheard():
            for number in range(9):
                print(number)
            done.append("work")
        raise SystemExit(0)

    monkeypatch.setattr(cli, "app", app)
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert done == ["work"]
    assert ended.value.code == 2
    assert errors.getvalue().startswith("error: standard output: could not be written: No space left on device\n")


def test_without_that_a_command_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full(2))
    with streams():
        print("one")
        with pytest.raises(OutputLost, match="No space left"):
            print("two")
        with pytest.raises(OutputLost):
            print("three")
        assert lost_output() is not None


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EIO, errno.ENAMETOOLONG]
)
def test_what_the_system_refuses_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def app() -> None:
        raise OSError(number, os.strerror(number), "/some/place")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: /some/place: {os.strerror(number)}")
    assert "  needed: " in shown
    assert "  change: " in shown


def test_what_it_does_not_know_stays_a_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise OSError(errno.EINVAL, "an argument of ours")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("Traceback")
    assert refused(OSError("no number")) is None


def test_errors_of_libraries_in_rust_count_as_well(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"it could not be written: No space left on device"),
        refusals("it could not be written", tmp_path),
    ):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError), refusals("it", tmp_path):
        raise RuntimeError("another")
    with pytest.raises(UserError, match=r"^a: b"), refusals("it", tmp_path):
        raise UserError(Problem("b", "c", where="a"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(tmp_path / "disk", "64k") as disk:
        yield disk


def fill(disk: Disk, left: int) -> None:
    """Leave so many bytes of a disk."""
    free = os.statvfs(disk.path)
    (disk.path / "filling").write_bytes(b"x" * (free.f_bavail * free.f_frsize - left))


def left_behind(disk: Disk) -> list[str]:
    return sorted(str(path.relative_to(disk.path)) for path in disk.path.rglob("*") if path.name != "filling")


@pytest.mark.privileged
@pytest.mark.parametrize("fault", ["full", "nearly full", "read-only"])
def test_places_that_take_nothing(folder: Path, disk: Disk, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that writes, to a disk without room, with room for a page, and one that cannot be written."""
    if fault == "read-only":
        assert disk.change("ro")
    else:
        fill(disk, 0 if fault == "full" else 4096)
    config, model, at = str(folder / "config.yaml"), str(folder / "model"), disk.path
    expected = "Read-only file system" if fault == "read-only" else "No space left on device"
    rows, prompt = str(folder / "rows.jsonl"), ("--max-new-tokens", "1")
    monkeypatch.setattr("tonnage.launch.local.run_workers", lambda *_, **__: pytest.fail("workers were started"))
    for words in (
        ("train", config, f"output={at}/run"),
        ("train", config, f"output={at}/run", "--prepare"),
        ("train", config, f"output={folder}/other", f"data.cache={at}/cache"),
        ("inspect", config, f"data.cache={at}/cache"),
        ("generate", model, "--file", rows, "--output", f"{at}/answers.jsonl", *prompt),
        ("import", str(folder / "ds.json"), "--output", f"{at}/config.yaml"),
        ("launch", "kube", config, "--image", "i", "--claim", "c", "--to", f"{at}/kube"),
        ("profile", config, "--steps", "1", "--output", f"{at}/profile"),
        ("demo", "--output", f"{at}/demo"),
    ):
        if fault == "nearly full" and words[0] in ("import", "generate", "profile"):
            continue  # which a page is enough for, at the beginning
        ended = tonnage(*words)
        assert ended.status == 2, (words, ended)
        assert ended.err.splitlines()[-3].startswith("error: "), ended.err
        assert expected in ended.err, (words, ended.err)
        assert str(at) in ended.err
        assert "Traceback" not in ended.err
        assert [path for path in left_behind(disk) if not path.startswith("cache")] == []
    whole = r"cache(/digests(/\w+)?|/documents(/\w+\.lock)?|/packs)?"
    assert [path for path in left_behind(disk) if not re.fullmatch(whole, path)] == []
    assert not (folder / "other").exists()


@pytest.mark.slow
@pytest.mark.privileged
def test_a_cache_that_is_only_a_cache_stops_nothing(
    folder: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tonnage.host.cachedir import say_once

    tonnage("plan", str(folder / "config.yaml"))  # the data are prepared
    assert disk.change("ro")
    monkeypatch.setenv("TONNAGE_CACHE", str(disk.path / "none"))
    say_once.cache_clear()
    for _ in range(2):
        assert tonnage("plan", str(folder / "config.yaml")).status == 0
    said = [record.getMessage() for record in caplog.records if record.name == "tonnage"]
    assert [line for line in said if "models are weighed again" in line] == [
        f"{disk.path}/none/profiles: cannot be written (Read-only file system); models are weighed again every time; "
        "TONNAGE_CACHE names another directory"
    ]
    assert len(said) == len(set(said))
    say_once.cache_clear()


def test_a_run_that_was_not_begun_leaves_its_directory_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found out between the first file that is written and the first worker."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in (
        "tonnage.planning.space.check_space",
        "tonnage.decide.written.write_config",
        "tonnage.planning.plan.Plan.write",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(name, refuse)
            ended = tonnage("train", str(folder / "config.yaml"), f"output={folder}/begun")
        assert ended.status == 2, ended
        assert "the run's directory could not be written: No space left" in ended.err
        assert not (folder / "begun").exists()
    (folder / "begun").mkdir()
    (folder / "begun" / "mine").touch()
    with monkeypatch.context() as patched:
        patched.setattr("tonnage.decide.written.write_config", refuse)
        tonnage("train", str(folder / "config.yaml"), f"output={folder}/begun")
    assert [path.name for path in (folder / "begun").iterdir()] == ["mine"]


def test_nothing_of_a_run_or_a_cache_is_for_others_to_write(folder: Path, tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        words = (f"output={tmp_path}/run", f"data.cache={tmp_path}/cache")
        assert tonnage("train", str(folder / "config.yaml"), *words, "--prepare").status == 0
    finally:
        os.umask(mask)
    made = list(tmp_path.rglob("*"))
    assert len(made) > 15
    assert [path for path in made if path.stat().st_mode & 0o022] == []
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    ended = tonnage("train", str(folder / "config.yaml"), f"output={tmp_path}/open")
    assert ended.status == 2
    assert "everybody may write" in ended.err
    assert "change: write output=... with another name" in ended.err  # it may be a directory of the system's
    assert list((tmp_path / "open").iterdir()) == []


def test_a_worker_says_in_a_sentence_what_it_could_not_write(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom tonnage.training import worker\n"
        "def refuse(*_):\n    raise OSError(28, os.strerror(28))\n"
        "worker._imported = refuse\nsys.exit(worker.main(sys.argv[1]))\n"
    )
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(UserError, match=r"what the run writes could not be written: No space left(.|\n)*--resume"):
        run_workers(run, 1, 1, command=[sys.executable, "-c", code, str(run.path)])
