"""The command as people meet it: help that loads little, exit statuses, messages in a frame or plain."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from tonnage.cli import main as cli
from tonnage.config.keys import all_keys
from tonnage.errors import Problem, TonnageError, UserError, WorkerFailed

PROBLEMS = UserError(Problem("found [a]", "needed [b]", "change [c]", "file.yaml:3"), Problem("second", "thing"))


def tonnage(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tonnage.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_help_names_every_command() -> None:
    result = tonnage("--help")
    assert result.returncode == 0
    for panel, names in cli.COMMANDS.items():
        registered = [name for name in names if name in {command.name for command in cli.app.registered_commands}]
        assert not registered or panel in result.stdout
        assert all(name in result.stdout for name in registered)


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
    help_text = " ".join(tonnage("train", "--help").stdout.split())
    for key in all_keys():
        assert key.is_section or (f"{key.name} " in help_text and key.sentence in help_text), key.name
