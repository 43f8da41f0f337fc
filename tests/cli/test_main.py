"""The command as people meet it: help that loads little, exit statuses, messages in a frame or plain."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import get_type_hints

import pytest
from rich.console import Console

from tonnage.cli import main as cli
from tonnage.config.keys import all_keys
from tonnage.errors import Problem, TonnageError, UserError, WorkerFailed
from tonnage.files.paths import path_word, word

PROBLEMS = UserError(Problem("found [a]", "needed [b]", "change [c]", "file.yaml:3"), Problem("second", "thing"))


def tonnage(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tonnage", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_help_names_every_command() -> None:
    result = tonnage("--help")
    assert result.returncode == 0
    for panel, names in cli.COMMANDS.items():
        registered = [name for name in names if name in {command.name for command in cli.app.registered_commands}]
        assert not registered or panel in result.stdout
        assert all(name in result.stdout for name in registered)


def test_a_shell_completes_commands() -> None:
    asked = {"_TONNAGE_COMPLETE": "complete_bash", "COMP_WORDS": "tonnage ex", "COMP_CWORD": "1"}
    command = [str(Path(sys.executable).with_name("tonnage"))]
    result = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=False, timeout=60)
    assert result.stdout.split() == ["export"]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['tonnage', '--help']\nfrom tonnage.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pydantic', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "assert len(sys.modules) < 450, len(sys.modules)\n"  # 343 when it was written, which takes half a second
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr


def test_every_command_takes_memory_of_a_gpu_as_workers_do() -> None:
    """Which torch must be told before it is imported."""
    code = (
        "import os, sys\nfrom tonnage.cli import main as cli\n"
        "cli.app = lambda: print(os.environ.get('PYTORCH_ALLOC_CONF'), 'torch' in sys.modules)\ncli.main()"
    )
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "expandable_segments:True False\n"


def test_version() -> None:
    assert tonnage("--version").stdout.startswith("tonnage ")


@pytest.mark.parametrize("arguments", [("nonsense",), ("--nonsense",)])
def test_usage_errors_are_the_users(arguments: tuple[str, ...]) -> None:
    result = tonnage(*arguments)
    assert result.returncode == 2
    assert "nonsense" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (PROBLEMS, 2, "error: file.yaml:3: found [a]\n  needed: needed [b]\n  change: change [c]\nsecond"),
        (WorkerFailed("worker 1 (of 2) failed"), 1, "error: worker 1 (of 2) failed\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_statuses(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    shown: str,
) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == status
    assert capsys.readouterr().err.startswith(shown)


def test_our_own_defects_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise ZeroDivisionError("\x1b[31m")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("ZeroDivisionError: \\x1b[31m\n")


def shown_on_a_terminal(error: TonnageError, width: int = 60) -> str:
    file = io.StringIO()
    cli.show_error(error, Console(file=file, force_terminal=True, width=width, color_system=None))
    return file.getvalue()


def test_problems_are_framed_on_a_terminal() -> None:
    shown = shown_on_a_terminal(PROBLEMS)
    assert "2 problems" in shown
    for part in ("file.yaml:3: found [a]", "needed: needed [b]", "change: change [c]", "second"):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= 60


def test_a_failed_worker_is_shown_whole_on_a_terminal() -> None:
    message = "worker 0 (of 1) failed: ValueError: [bold]\n\nTraceback\n  line"
    shown = shown_on_a_terminal(WorkerFailed(message))
    assert all(line.strip() in shown for line in message.splitlines())


def test_help_of_train_lists_every_key_of_a_config() -> None:
    help_text = tonnage("train", "--help").stdout
    without_breaks = "".join(help_text.split())  # a line may also end at a hyphen
    for key in all_keys():
        is_there = f"{key.name} " in help_text and "".join(key.sentence.split()) in without_breaks
        assert key.is_section or is_there, key.name


PATHS = re.compile(r"\b(CONFIG|RUN|MODEL|ROWS|DIR|FILE)\b")


@pytest.mark.parametrize("name", [name for names in cli.COMMANDS.values() for name in names])
def test_every_path_on_a_command_line_may_begin_with_a_tilde(name: str) -> None:
    module = import_module(f"tonnage.cli.{name}{'_' * iskeyword(name)}")
    function = getattr(module, name if hasattr(module, name) else f"{name}_")
    for parameter, annotation in get_type_hints(function, include_extras=True).items():
        for told in getattr(annotation, "__metadata__", ()):
            names_a_path = bool(PATHS.search(told.metavar or "")) and "KEY=VALUE" not in told.metavar
            names_a_path &= "COMMAND" not in (
                told.metavar or ""
            )  # whose words are not a path's: `import` tells them apart
            assert (told.parser in (word, path_word)) == names_a_path, (name, parameter)


def test_a_second_interrupt_is_as_quiet_as_the_first() -> None:
    script = (
        "import atexit, signal, sys\n"
        "from tonnage.cli import main\n"
        "main.app = lambda: signal.raise_signal(signal.SIGINT)\n"
        "atexit.register(signal.raise_signal, signal.SIGINT)\n"
        "main.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_tilde_is_a_home_directory_however_it_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for words in (["verify", "~/gone"], ["train", "--resume=~/gone"], ["import", "~/gone"], ["plan", "~/gone.yaml"]):
        monkeypatch.setattr("sys.argv", ["tonnage", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        assert f"{tmp_path}/gone" in capsys.readouterr().err.replace("\n", "")
    monkeypatch.setattr("sys.argv", ["tonnage", "follow", "~no-such-user-here/run"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "the home directory of somebody whom this machine knows" in capsys.readouterr().err
