"""Whatever strangers write into names, rows, tokens, answers and errors: nothing of it commands a terminal.

The commands run in this process on a terminal of the kind ``dumb``, for which nothing of ours writes a control
character either; so none at all may come out.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import tonnage as package
from entry import FakeTerminal, tonnage
from hostile.strings import MARKUP, TERMINAL, UNSEEN, inside
from tiny import byte_tokenizer, llama_config
from tonnage.cli import main as cli
from tonnage.display.progress import RunDisplay
from tonnage.display.terminal import Terminal, put, put_json, say, streams, to_json
from tonnage.errors import Problem, UserError, WorkerFailed
from tonnage.files.visible import visible
from tonnage.inference import generate as inference
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile

NAME = "n\x1b[31m\u202e[bold]\x9b[red]"
"""Of files and fields: valid in a path, in JSON and, escaped, in YAML."""
END = "[/INST]"
TOKEN = "<\x1b]0;t\x07>"


@pytest.fixture(autouse=True)
def dumb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")


def seen(text: str) -> str:
    """A text that was printed, once it is known to command nothing."""
    assert UNSEEN.findall(text) == []
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows and a config in which all names are hostile, and tokens as well."""
    folder = tmp_path_factory.mktemp("terminal") / NAME
    folder.mkdir()
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": [TOKEN]})
    answer = "{% generation %}{{ m.content + '[/INST]' }}{% endgeneration %}"
    asked = f"{{{{ '{TOKEN}' + m.content }}}}"
    each = f"{{% if m.role == 'assistant' %}}{answer}{{% else %}}{asked}{{% endif %}}"
    tokenizer.chat_template = f"{{% for m in messages %}}{each}{{% endfor %}}"
    model = AutoModelForCausalLM.from_config(llama_config(num_hidden_layers=1, vocab_size=len(tokenizer)))
    model.save_pretrained(folder / NAME)
    tokenizer.save_pretrained(folder / NAME)
    rows = [
        {"instruction": f"{bad} say {number}", "input": bad, "output": f"{bad} [bold]x[/bold] {number}", NAME: bad}
        for number in range(30)
        for bad in TERMINAL[:8]
    ]
    (folder / f"{NAME}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": NAME,
        "data": {"train": f"{NAME}.jsonl", "max_length": 256, "cache": "cache", "validation": 0.1},
        "batch": {"sequences": 4},
        "steps": 2,
        "launch": {"threads": 1},
        "track": [],
        "output": f"runs/{NAME}",
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder: Path) -> Iterator[None]:
    with inside(folder):
        yield


def shown(*words: str, status: object = 0, said: str = "") -> str:
    """What a command prints on a terminal, both streams."""
    ended = tonnage(*words, terminal=True, said=said)
    assert ended.status == status, repr(ended.err)[-1500:]
    assert "Traceback" not in ended.err
    return seen(ended.out) + seen(ended.err)


@pytest.mark.matrix
def test_data_and_plan() -> None:
    text = shown("inspect", "config.yaml", "--rows", "60")
    assert "\\x1b[31mred" in text
    assert "a\\rb say" in text  # rich would drop it
    assert "[bold]x[/bold]" in text
    assert f"a turn ends with {END}" in text
    assert f"{visible(NAME)}.jsonl" in text
    text = shown("train", "config.yaml", "--dry-run")
    assert f"a turn ends with {END}" in text
    for words in (
        ("plan", "config.yaml"),
        ("plan", NAME),
        ("launch", "kube", "config.yaml", "--image", "i", "--claim", "c", "--to", NAME),
    ):
        shown(*words)


@pytest.mark.slow
def test_json_holds_the_same_and_is_safe() -> None:
    ended = tonnage("inspect", "config.yaml", "--json", "--rows", "9", terminal=True)
    assert ended.status == 0
    documents = json.loads(seen(ended.out))["documents"]
    assert any(token["text"] == TOKEN for document in documents for token in document["tokens"])
    assert documents[0]["file"].endswith(f"{NAME}.jsonl")
    assert json.loads(tonnage("inspect", "config.yaml", "--json", "--rows", "9").out)["documents"] == documents
    assert json.loads(seen(tonnage("plan", "config.yaml", "--json", terminal=True).out))["data"]["train_path"]


def test_bad_rows_and_fields_that_nobody_knows() -> None:
    Path("bad.jsonl").write_text(json.dumps({NAME: 1, "\x1b[1m": 2}) + "\n")
    text = shown("inspect", "config.yaml", "data.train=bad.jsonl", status=2)
    assert "\\x1b[31m" in text
    Path(f"empty{NAME}.jsonl").write_text("\x1b[31m\n")
    shown("inspect", "config.yaml", f"data.train={json.dumps(f'empty{NAME}.jsonl')}", status=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(bad, marks=[pytest.mark.matrix] if number % 2 else [])
        for number, bad in enumerate((*TERMINAL, *MARKUP))
    ],
)
def test_errors_repeat_what_was_given_visibly(bad: str) -> None:
    quoted = json.dumps(bad)
    for words in (
        *[(command, bad) for command in ("plan", "verify", "follow", "chat", "import")],
        *[("plan", "config.yaml", word) for word in (f"model={quoted}", f"{bad}=1", f"launch.with={quoted}", bad)],
        *[("export", bad, "x"), ("generate", bad, "--prompt", "x"), ("eval", bad, "--data", "x"), (bad,)],
        *[
            ("train", f"{bad}.yaml"),
            ("train", "--resume", bad),
            ("train", f"--{bad}"),
            ("plan", NAME, "--hardware", bad),
        ],
    ):
        ended = tonnage(*words, terminal=True)
        assert ended.status == 2, (words, ended)
        assert "Traceback" not in ended.err
        text = seen(ended.out) + seen(ended.err)
        assert text
        seen(tonnage(*words).err)


def test_import(tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 3}, "train_batch_size": NAME, NAME: NAME, "\x1b[1m[bold]": "[red]"})
    )
    command = tmp_path / "run.sh"
    command.write_text(f"torchrun t.py --learning_rate 1 --model_name_or_path 'a{NAME}' --{NAME} '{NAME}'\n")
    assert "\\x1b[31m" in shown("import", "--partial", str(path), str(command))
    seen(tonnage("import", str(path), "--json", terminal=True).out)
    written = tmp_path / "config.yaml"
    assert tonnage("import", str(path), str(command), "--partial", "--output", str(written)).status == 0
    ended = tonnage("plan", str(written), "data.train=x")  # whatever it lacks, it is YAML
    assert "a character that YAML does not allow" not in ended.err


@pytest.mark.slow
def test_answers_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal they are visible, to a program they are as they are."""
    answer = "".join(TERMINAL[:8])
    monkeypatch.setattr(inference, "generate", lambda loaded, asked, *_, **__: [answer] * len(asked))
    monkeypatch.setattr(inference, "stream", lambda *_: (piece for piece in answer))
    assert visible(answer) in shown("generate", NAME, "--prompt", "x")
    assert tonnage("generate", NAME, "--prompt", "x").out == f"{answer}\n"
    rows = f"{NAME}.jsonl"
    shown("generate", NAME, "--file", rows)
    lines = tonnage("generate", NAME, "--file", rows).out.splitlines()
    assert json.loads(lines[0])["generated"] == answer
    assert visible(answer) in shown("chat", NAME, said="hello\n")
    assert answer in tonnage("chat", NAME, said="hello\n").out
    shown("eval", NAME, "--data", rows, "--max-length", "256")


def test_a_run_as_it_happens(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / NAME)
    run.workers.mkdir(parents=True)
    PositionFile(run.worker_position(0)).update(phase="\x1b[31m[bold]")
    for console in (
        Terminal(file=FakeTerminal()),
        Terminal(file=io.StringIO()),
        Terminal(file=FakeTerminal(), force_terminal=True),
    ):
        with RunDisplay(run, 10, console=console) as display:
            run.log.write_text(f"2026-01-01 00:00:00 {NAME}\n")
            display.poll()
            display.tell(NAME)
            display.poll()
            run.log.unlink()
        assert isinstance(console.file, io.StringIO)
        assert "\\x1b[31m" in seen(console.file.getvalue())


@pytest.mark.slow
def test_a_whole_run() -> None:
    """Training, and everything that is done with a run, on a terminal; and by somebody who lets all write all."""
    run = f"runs/{NAME}"
    mask = os.umask(0)
    try:
        text = shown("train", "config.yaml")
    finally:
        os.umask(mask)
    assert [path for path in (Path("runs"), *Path("runs").rglob("*")) if path.stat().st_mode & 0o022] == []
    assert f"Model: {visible(run)}/export" in text
    for words in (("verify", run), ("follow", run), ("export", run, f"out{NAME}"), ("train", "--resume", run)):
        shown(*words)
    shown("generate", run, "--prompt", "x", "--max-new-tokens", "4")
    shown("train", "config.yaml", status=2)
    log = RunDirectory(run).worker_log(0)
    assert log.exists()


def test_errors_of_workers() -> None:
    for error in (
        WorkerFailed("".join(TERMINAL)),
        UserError(Problem(*["".join(TERMINAL)] * 4)),
        UserError(Problem("[/INST]", "[bold]")),
    ):
        for file in (FakeTerminal(), io.StringIO()):
            cli.show_error(error, Terminal(file=file, width=200))
            seen(file.getvalue())
            assert "[/INST]" in file.getvalue() or "\\x1b[31mred" in file.getvalue()


def everything_that_prints(text: str) -> Iterator[Any]:
    """The ways in which rich is given text."""
    yield text
    yield Text(text)
    yield Panel(text)
    yield Panel(Text(text))
    table = Table(text, title=text, caption=text)
    table.add_row(text)
    table.add_row(Text(text))
    yield table


@pytest.mark.parametrize("bad", [*TERMINAL, *MARKUP])
def test_a_console_of_ours_shows_any_text_as_it_is(bad: str) -> None:
    for renderable in everything_that_prints(bad):
        file = FakeTerminal()
        Terminal(file=file, width=300).print(renderable)
        text = seen(file.getvalue())
        assert visible(bad) in text or isinstance(getattr(renderable, "renderable", renderable), Text)  # drops some
    file = FakeTerminal()
    console = Terminal(file=file, width=300)
    console.rule(bad)
    say(console, bad, (bad, "bold"))
    with Live(bad, console=console):
        pass
    assert visible(bad) in seen(file.getvalue())


def test_our_own_colours_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = FakeTerminal()
    say(Terminal(file=file, color_system="standard", no_color=False), "a ", ("b\x1b[0m", "bold"))
    assert file.getvalue() == "a \x1b[1mb\\x1b[0m\x1b[0m\n"


def test_what_programs_read(capsys: pytest.CaptureFixture[str]) -> None:
    put("\x1b[31m")
    put_json({"\x1b": "\x9b\x7f\u202eé\udc80"})
    assert capsys.readouterr().out == '\x1b[31m\n{\n  "\\u001b": "\\u009b\\u007f\\u202eé\\udc80"\n}\n'
    for value in (*TERMINAL, *MARKUP, "é", "\n\t", "😀"):
        assert json.loads(to_json({value: [value]})) == {value: [value]}
        to_json(value).encode()


def test_traps_are_shown_as_python_writes_them() -> None:
    assert (
        visible("a\x1b[31m\r\n\t\x00\x7f\x9b\u202e\u2069\udc80é😀\\")
        == r"a\x1b[31m\r" + "\n\t" + r"\x00\x7f\x9b\u202e\u2069\udc80é😀" + "\\"
    )
    for text in TERMINAL:
        assert visible(visible(text)) == visible(text) != text
        assert UNSEEN.search(visible(text)) is None


SOURCES = sorted(Path(package.__file__).parent.rglob("*.py"))


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2], node


@pytest.mark.slow
def test_consoles_are_made_in_one_place_and_nothing_reads_markup() -> None:
    """The kind of fault, not its cases: a console of rich's own parses names, and so do these of its parts."""
    parsed = {"from_markup", "render_markup"}
    for path in SOURCES:
        for name, call in calls(ast.parse(path.read_text())):
            where = f"{path}:{call.lineno}"
            assert name != "Console", f"{where}: use display.terminal.terminal()"
            assert name not in parsed, where
            assert not any(
                keyword.arg == "markup" and ast.unparse(keyword.value) == "True" for keyword in call.keywords
            ), where
            if name in ("TextColumn", "Spinner"):
                words = [keyword.arg for keyword in call.keywords]
                assert "markup" in words or isinstance(call.args[0], ast.Constant | ast.IfExp), where
            if name == "status":  # a spinner's text is read as markup
                foreign = [part for part in ast.walk(call.args[0]) if isinstance(part, ast.FormattedValue)]
                assert all(re.search(r"steps|tokens|workers", ast.unparse(part.value)) for part in foreign), where
        styled = re.findall(r"\[/?(?:bold|dim|italic|red|green|yellow|cyan)[^\]]*\]|\[/\]", path.read_text())
        assert [found for found in styled if path.name != "terminal.py"] == [], path


@pytest.mark.slow
def test_nothing_else_prints() -> None:
    """What is printed without a console goes through ``put`` or is ours."""
    allowed = {"main.py", "chat.py", "terminal.py", "document.py", "page.py", "sample.py", "worker.py", "measure.py"}
    allowed |= {"__main__.py", "machine.py"}  # of the proof, where there may be no rich
    for path in SOURCES:
        bare = [call for _, call in calls(ast.parse(path.read_text())) if ast.unparse(call.func) == "print"]
        assert not bare or path.name in allowed, path


def test_a_console_of_rich_alone_would_not_do() -> None:
    file = FakeTerminal()
    Console(file=file, width=300, color_system=None).print(Text("a\x1b[31m"))
    assert UNSEEN.search(file.getvalue())


@pytest.mark.parametrize("bad", TERMINAL)
def test_what_libraries_tell_is_visible_too(bad: str, caplog: pytest.LogCaptureFixture) -> None:
    transformers.logging.set_verbosity_warning()
    with streams():
        logging.getLogger("transformers.of.some.kind").warning("%s is UNEXPECTED", bad)
    assert not UNSEEN.search(caplog.messages[-1])
    assert caplog.messages[-1] == f"{visible(bad)} is UNEXPECTED"


def test_a_library_whose_words_do_not_fit_ends_no_command(caplog: pytest.LogCaptureFixture) -> None:
    transformers.logging.set_verbosity_warning()
    with streams():
        logging.getLogger("transformers.of.some.kind").warning("deprecated", FutureWarning)
        logging.getLogger("transformers.of.some.kind").warning("%d\x1b", "no number")
    assert [message.startswith(("deprecated", "%d")) for message in caplog.messages] == [True, True]
    assert not UNSEEN.search("".join(caplog.messages))
