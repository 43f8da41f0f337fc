"""``tonnage generate`` and ``tonnage chat`` as a user meets them, over a tiny random model."""

from __future__ import annotations

import io
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny
from tonnage.cli import chat
from tonnage.cli.main import app
from tonnage.errors import UserError
from tonnage.inference.generate import TALK, Decoding, Loaded, generate, load

ROWS: list[dict[str, Any]] = [
    {"instruction": "Say a", "output": "A", "id": 1},
    {"instruction": "Say something long about b", "output": "B", "id": 2},
    {"instruction": "c"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.llama_config(num_hidden_layers=2, initializer_range=0.2)
    return tiny.write_model(tmp_path_factory.mktemp("models") / "llama", config)


@pytest.fixture(scope="module")
def loaded(model: Path) -> Loaded:
    return load(model, template="alpaca")


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [*map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def asked(loaded: Loaded, *texts: str) -> list[str]:
    return generate(loaded, [[{"role": "user", "content": text}] for text in texts], Decoding(8))


def test_one_prompt_is_answered_on_standard_output(model: Path, loaded: Loaded) -> None:
    printed = run("generate", model, "--prompt", "Say a", "--template", "alpaca", "--max-new-tokens", 8)
    assert printed == asked(loaded, "Say a")[0] + "\n"


def test_a_file_is_answered_row_by_row(model: Path, loaded: Loaded, tmp_path: Path) -> None:
    rows, output = tiny.write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "answers.jsonl"
    output.write_text('{"generated": "of an earlier time"}\n')
    command = ["generate", model, "--file", rows, "--max-new-tokens", 8, "--batch-size", 2]
    run(*command, "--output", output)
    written = [json.loads(line) for line in output.read_text().splitlines()]
    answers = asked(loaded, *(str(row["instruction"]) for row in ROWS))
    assert written == [{**row, "generated": answer} for row, answer in zip(ROWS, answers, strict=True)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "rows.jsonl"]
    assert run(*command) == output.read_text()


def test_a_file_is_left_alone_when_answering_fails(model: Path, tmp_path: Path) -> None:
    rows, output = tiny.write_rows(tmp_path / "rows.jsonl", [{"prompt": "x" * 600}]), tmp_path / "answers.jsonl"
    output.write_text('{"generated": "of an earlier time"}\n')
    with pytest.raises(UserError, match="fewer than 512"):
        run("generate", model, "--file", rows, "--output", output)
    assert output.read_text() == '{"generated": "of an earlier time"}\n'


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_an_answer_longer_than_the_model_is_refused_before_it_is_loaded(
    model: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.model.pretrained.load_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    words = {"generate": ["--prompt", "a"], "chat": [], "serve": ["--port", "0"]}[command]
    for number in (512, 99_999_999):
        with pytest.raises(UserError, match=f"{number:,} tokens for an answer(.|\n)*fewer than 512"):
            run(command, model, *words, "--max-new-tokens", number)


@pytest.mark.parametrize("kind", ["a directory", "a link to nothing"])
def test_a_template_that_is_no_file_is_not_passed_over(tmp_path: Path, kind: str) -> None:
    path = tiny.write_model(tmp_path / "model", tiny.llama_config(num_hidden_layers=1)) / "chat_template.jinja"
    if kind == "a directory":
        path.mkdir()
    else:
        path.symlink_to("nothing")
    with pytest.raises(UserError, match=r"chat_template\.jinja: (no regular file|a link that leads nowhere)"):
        run("generate", path.parent, "--prompt", "a")


def test_a_system_message_stands_before_the_prompt(model: Path, loaded: Loaded) -> None:
    words = ["generate", model, "--prompt", "Say a", "--template", "alpaca", "--max-new-tokens", 8]
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Say a"}]
    assert run(*words, "--system", "Be brief") == generate(loaded, [messages], Decoding(8))[0] + "\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], "neither --prompt nor --file"),
        (["--prompt", "a", "--file", "b.jsonl"], "both --prompt and --file"),
        (["--prompt", "a", "--output", "b.jsonl"], "--output without --file"),
        (["--file", "b.jsonl", "--output", "no/such/place.jsonl"], "no directory no/such"),
        (["--file", "missing.jsonl"], "missing.jsonl"),
        (["--file", "b.jsonl", "--image", "b.png"], "--image without --prompt"),
        (["--prompt", "a", "--image", "missing.png"], r"missing\.png cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused(model: Path, words: list[str], found: str) -> None:
    with pytest.raises(UserError, match=found):
        run("generate", model, *words)


def talk(loaded: Loaded, text: str, monkeypatch: pytest.MonkeyPatch, system: str | None = None) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    chat.converse(loaded, Decoding(8), system)


def test_a_piped_chat_remembers_until_it_is_reset(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {"role": "user", "content": "Say a"}
    answer = generate(loaded, [[first]], Decoding(8))[0]
    second = generate(
        loaded, [[first, {"role": "assistant", "content": answer}, {"role": "user", "content": "b"}]], Decoding(8)
    )[0]
    talk(loaded, "Say a\n\nb\n/reset\nSay a\n/what\n/quit\nnever asked\n", monkeypatch)
    assert capsys.readouterr().out == f"{answer}\n{second}\n{answer}\n{chat.HELP}\n"


def test_a_chat_ends_with_its_input(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(loaded, "", monkeypatch)
    talk(loaded, "no line end", monkeypatch)


def test_an_interrupt_stops_the_answer_and_not_the_chat(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[list[str]] = []
    closed = 0

    def interrupted(_: Loaded, messages: list[dict[str, str]], __: Decoding) -> Generator[str, None, None]:
        nonlocal closed
        heard.append([message["content"] for message in messages])
        try:
            if len(heard) == 1:
                raise KeyboardInterrupt
            yield "two "
            raise KeyboardInterrupt
        finally:
            closed += 1

    monkeypatch.setattr("tonnage.inference.generate.stream", interrupted)
    talk(loaded, "one\ntwo\nthree\n", monkeypatch, system="Be brief")
    # Nothing was said to the first, so it is forgotten; what was said to the second stays.
    assert heard == [["Be brief", "one"], ["Be brief", "two"], ["Be brief", "two", "two ", "three"]]
    assert closed == 3
    assert capsys.readouterr().out.startswith("\ntwo \ntwo \n")


def test_a_question_that_cannot_be_answered_is_dropped(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(loaded, "x" * 600 + "\nSay a\n", monkeypatch)
    printed = capsys.readouterr()
    assert "fewer than 512" in printed.err
    assert printed.out == asked(loaded, "Say a")[0] + "\n"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PIL")
    from visions import LISTS_ONLY, draw_image, write_vision

    folder = tmp_path_factory.mktemp("seeing")
    for number in (1, 2):
        (folder / f"{number}.png").write_bytes(draw_image(number))
    return write_vision(folder / "llava", "llava", template=LISTS_ONLY)


def about(folder: Path, text: str, *numbers: int) -> list[dict[str, Any]]:
    images = [{"type": "image", "path": str(folder / f"{number}.png")} for number in numbers]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def test_images_are_shown_with_a_prompt_and_by_rows(seeing: Path, tmp_path: Path) -> None:
    loaded, folder = load(seeing, **TALK), seeing.parent
    one, two = (generate(loaded, [about(folder, "What?", *which)], Decoding(8))[0] for which in ((1,), (2, 1)))
    assert one != two
    words = ["generate", seeing, "--max-new-tokens", 8]
    assert run(*words, "--prompt", "What?", "--image", folder / "1.png") == one + "\n"
    images = ["--image", folder / "2.png", "--image", folder / "1.png"]
    assert run(*words, "--prompt", "<image><image>What?", *images) == two + "\n"
    with pytest.raises(UserError, match="1 placeholder for images, and 2 of them"):
        run(*words, "--prompt", "<image>What?", *images)
    rows = [{"messages": [{"role": "user", "content": "<image>What?"}], "images": ["1.png"]}]
    file = tiny.write_rows(folder / "rows.jsonl", rows)
    assert json.loads(run(*words, "--file", file)) == {**rows[0], "generated": one}


def test_a_chat_shows_images_with_the_next_line(
    seeing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded, folder = load(seeing, **TALK), seeing.parent
    first = about(folder, "What?", 1)
    answer = generate(loaded, [first], Decoding(8))[0]
    more = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]
    second = generate(loaded, [more], Decoding(8))[0]
    talk(loaded, f"/image {folder / '1.png'}\n/image missing.png\nWhat?\nWhy?\n", monkeypatch)
    printed = capsys.readouterr()
    assert printed.out == f"{answer}\n{second}\n"
    assert "1.png, 40 x 30" in printed.err
    assert "missing.png cannot be read" in printed.err


def test_a_model_of_text_is_shown_no_image(
    model: Path, loaded: Loaded, seeing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = seeing.parent / "1.png"
    monkeypatch.setattr("tonnage.model.pretrained.load_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match="images, and a model that takes none"):
        run("generate", model, "--prompt", "a", "--image", image)
    talk(loaded, f"/image {image}\nSay a\n", monkeypatch)
    printed = capsys.readouterr()
    assert "/image, and a model that takes none" in printed.err
    assert printed.out == asked(loaded, "Say a")[0] + "\n"
