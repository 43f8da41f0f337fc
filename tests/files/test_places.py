"""Where commands may write: nothing of somebody else's is touched."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import typer

import tiny
import tonnage
from tonnage.cli.main import app
from tonnage.config import check_output, read_config
from tonnage.decide.resumption import check_resumable
from tonnage.errors import UserError, refusals
from tonnage.files.places import begins_with, check_file, check_vacant, check_writable
from tonnage.files.writing import UNFINISHED, write_whole
from tonnage.rundir.directory import RunDirectory

NAMES = (
    *("config.yaml", "data.json", "plan.json", "report.html", "log.txt", "environment.json", "metrics.jsonl", "lock"),
    *("rows.json", "job.sh", "profile.json", "trace-0.json.gz", "answers.jsonl", "run-stranger-job.yaml", "notes.txt"),
    *("export/model.safetensors", "checkpoints/step-00000005/COMPLETE", "tokenizer/a", "workers/rank-0.log", ".hidden"),
    *(".report.html.7", ".partial/a", "plans/b", ".export/c", "resume.json", "tensorboard/d"),
)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    tiny.write_config(folder, 20, steps=2)
    return folder


def carried_out(*words: str) -> None:
    """Carry out a command, which may refuse."""
    with suppress(UserError, SystemExit, typer.Exit), refusals("it was refused"):
        app(list(words), standalone_mode=False)


@pytest.mark.parametrize("directories", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_no_command_touches_a_directory_of_somebody_else(material: Path, tmp_path: Path, directories: int) -> None:
    config = str(material / "config.yaml")
    found = read_config(config)
    for number in range(directories):
        chance, folder = random.Random(number), tmp_path / f"{number}" / "stranger"
        for name in chance.sample(NAMES, chance.randint(1, 8)):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(chance.randbytes(20) if chance.random() < 0.5 else b'{"host": "x"}\n')
        before, at = contents(folder), str(folder)
        file = str(folder / chance.choice(sorted(before)))
        pods = ("--image", "a", "--claim", "b")
        commands = (
            ("train", config, f"output={at}"),
            ("train", config, f"output={at}", "--prepare"),
            ("train", "--resume", at),
            ("profile", config, "--steps", "1", "--output", at),
            ("demo", "--output", at),
            ("init", found.model, found.data.train[0].path, "--output", file),
            ("import", "trl sft --learning_rate 1e-5", "--partial", "--output", file),
            ("generate", found.model, "--file", found.data.train[0].path, "--output", file),
            ("report", at),
            ("report", at, "--output", file),
            ("export", at, at),
            ("verify", at),
            ("stop", at),
            ("follow", at),
            ("launch", "kube", config, "output=stranger", *pods, "--to", at),
        )
        for words in commands if number == 0 else chance.sample(commands, 3):
            carried_out(*words)
            after = contents(folder)
            new = {name for name in after.keys() - before.keys() if not name.startswith("run-stranger-")}
            assert ({name: after.get(name) for name in before}, new) == (before, set()), words


def test_a_directory_is_refused_for_what_is_in_it(tmp_path: Path) -> None:
    check_vacant(tmp_path / "new", "a", "b")
    check_vacant(tmp_path, "a", "b")
    (tmp_path / f".data.json.7{UNFINISHED}").touch()
    (tmp_path / "own").touch()
    check_vacant(tmp_path, "a", "b", is_own=lambda path: path.name == "own")
    for name in "fedcba":
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"not empty: it holds a, b, c, d and 3 more(.|\n)*needed: N(.|\n)*change: C"):
        check_vacant(tmp_path, "N", "C")
    (tmp_path / "loop").symlink_to("loop")
    for name, kind in (("a", "a file"), ("loop", "a link")):
        with pytest.raises(UserError, match=f"{name} is {kind}"):
            check_vacant(tmp_path / name, "N", "C")


def test_a_file_takes_the_place_of_none_but_its_own(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("new", "empty", "own", "other", "link", "pipe", "folder", "looping")}
    places["empty"].touch()
    places["own"].write_text("ours 1")
    places["other"].write_text("theirs")
    places["link"].symlink_to(places["own"])
    places["looping"].symlink_to("looping")
    os.mkfifo(places["pipe"])
    places["folder"].mkdir()
    kinds = {"other": "other content", "link": f"a link(.|\n)*{places['own']}", "pipe": "a pipe"}
    kinds |= {"folder": "a directory", "looping": "a link", "/dev/null": "a device", "/dev/stdout": "a (link|device)"}
    for name in ("new", "empty", "own"):
        check_file(places[name], is_own=begins_with("ours"))
    with pytest.raises(UserError, match="what is read"):
        check_file(places["own"], is_own=begins_with("ours"), inputs=[places["link"], tmp_path / "none"])
    for name, kind in kinds.items():
        with pytest.raises(UserError, match=kind):
            check_file(places.get(name, Path(name)), is_own=begins_with("ours"))
        if name != "other":
            before = places.get(name, Path(name)).lstat()
            with pytest.raises(OSError, match=r"not supported|directory"):  # nor where nobody has looked before
                write_whole(places.get(name, Path(name)), "x")
            assert places.get(name, Path(name)).lstat() == before


def test_an_output_that_was_begun_and_not_finished_may_be_begun_again(material: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    words = [f"output={output}", f"data.cache={output}/cache", f"memory.offload_dirs={output}/deep/er"]
    config, run = read_config(str(material / "config.yaml"), words), RunDirectory(output)
    check_output(config)
    (output / "cache").mkdir(parents=True)
    (output / "deep").mkdir()
    run.data.write_text("{}")
    with pytest.raises(UserError, match=r"it holds data\.json\n"):  # which may be anybody's
        check_output(config)
    with run.locked():
        check_output(config)
    (output / "tokenizer").mkdir()
    check_output(config)  # its launcher was killed
    (output / "notes").touch()
    with pytest.raises(UserError, match=r"it holds notes\n"):
        check_output(config)


def test_a_run_at_work_is_not_to_be_removed(material: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    holder = "import sys, time; from tonnage.rundir.directory import RunDirectory\n"
    holder += "with RunDirectory(sys.argv[1]).locked(): print(flush=True); time.sleep(60)"
    run = RunDirectory(output)
    with subprocess.Popen([sys.executable, "-c", holder, str(output)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        run.config.touch()
        run.plan.touch()
        try:
            config = read_config(str(material / "config.yaml"), [f"output={output}"])
            refusing: list[Callable[[], None]] = [lambda: check_output(config), lambda: check_resumable(run, [], None)]
            for refused in refusing:
                with pytest.raises(UserError, match=f"process {process.pid}(.|\n)*tonnage stop") as caught:
                    refused()
                assert not re.search("remove|start it again", str(caught.value))
        finally:
            process.kill()


def test_workers_that_outlive_their_launcher_are_no_run_at_work(material: Path, tmp_path: Path) -> None:
    output, nobody = tmp_path / "run", "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    launcher = "import os, subprocess, sys; from tonnage.rundir.directory import RunDirectory\n"
    launcher += "with RunDirectory(sys.argv[1]).locked() as lock:\n"
    launcher += f"    worker = subprocess.Popen(['sleep', '60'], pass_fds=[lock], {nobody})\n"
    launcher += "    print(worker.pid, flush=True)\n"
    launcher += "    os._exit(0)"
    killed = subprocess.run([sys.executable, "-c", launcher, str(output)], capture_output=True, text=True, check=True)
    try:
        run = RunDirectory(output)
        assert run.is_locked()
        check_output(read_config(str(material / "config.yaml"), [f"output={output}"]))
        run.config.touch()
        run.plan.touch()
        with pytest.raises(UserError, match="no complete checkpoint"):
            check_resumable(run, [], None)
    finally:
        os.kill(int(killed.stdout), signal.SIGKILL)


@pytest.mark.parametrize("place", ["/proc/x", "/proc/x/y", "/sys/x"])
def test_a_place_that_takes_no_files_is_refused_before_anything_is_read(material: Path, place: str) -> None:
    with pytest.raises(UserError, match="could not be made"):
        check_output(read_config(str(material / "config.yaml"), [f"output={place}"]))
    with pytest.raises(OSError, match=r"No such file|denied|Read-only"):
        check_writable(Path(place))


HARMFUL = re.compile(r"\brm -|chmod -R|chown")


def test_no_advice_removes_or_hands_over_files() -> None:
    """Scripts of jobs and pods do: they remove an unfinished export of the run's own."""
    sources = Path(tonnage.__file__).parent
    lines = [
        f"{path.relative_to(sources)}: {line.strip()}"
        for path in sources.rglob("*.py")
        for line in path.read_text().splitlines()
        if HARMFUL.search(line)
    ]
    assert {line.partition(":")[0] for line in lines} == {"launch/kube.py", "launch/slurm.py"}, lines
