"""The page in Chromium over real runs: every view opens without a word on the console and without a failed request; a
run is planned, started, watched, stopped, resumed to its end and talked to by clicks alone."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from page.conftest import furnished
from report.browser import Browser, chromium
from report.recorded import decided
from tonnage.files.reading import parse_record
from tonnage.planning.plan import Plan
from tonnage.planning.words import size
from tonnage.rundir.directory import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason="no Chromium")]
STEPS = 400
SECONDS = 120.0
"""For a command of the page, which loads torch, on a machine that does other things."""


@dataclass(frozen=True)
class Served:
    """A page at work, the folder that it is over, and its address."""

    folder: Path
    address: str


@contextmanager
def page_over(folder: Path) -> Iterator[Served]:
    """``tonnage page`` over a folder, in a process of its own."""
    command = [sys.executable, "-m", "tonnage", "page", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = ""
        while "token=" not in told or not told.endswith("\n"):
            told += process.stderr.readline()
            assert process.poll() is None, told
        yield Served(folder, told[told.index("http://") :].split()[0])
        process.terminate()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("browser")
    shape = tiny.llama_config(num_hidden_layers=1, initializer_range=0.3, max_position_embeddings=256)
    tiny.write_model(folder / "model", shape)  # whose answers are shorter than the longest where nobody says
    tiny.write_rows(folder / "rows.jsonl", tiny.alpaca_rows(60))
    made = decided(folder, output=str(folder / "made"), steps=40)
    furnished(made, folder / "runs")
    shutil.rmtree(made.path)
    (folder / "config.yaml").unlink()
    with page_over(folder) as served:
        yield served
    for lock in folder.glob("*/lock"):  # what trains goes on without the page
        holder = json.loads(lock.read_text() or "{}").get("pid")
        if RunDirectory(lock.parent).is_locked() and holder:
            os.killpg(holder, signal.SIGKILL)


@pytest.fixture(scope="module")
def browser(served: Served) -> Iterator[Browser]:
    with Browser() as browser:
        browser.resize(1280, 900)
        browser.open(served.address)
        browser.wait("document.querySelector('table.runs')")
        yield browser


@pytest.fixture(autouse=True)
def in_silence(browser: Browser) -> Iterator[None]:
    """Nobody but the page is asked, nothing fails, and nothing is said on the console."""
    yield
    assert browser.console == []
    assert browser.failed == []
    address = "http://127.0.0.1:"
    assert [url for url in browser.requests if not url.startswith((address, "data:"))] == []


def go(browser: Browser, place: str, until: str) -> None:
    browser.run(f"location.hash = {json.dumps('#/' + place)}")
    browser.wait(until)


def fill(browser: Browser, label: str, value: str) -> None:
    """Type into the field that a label names."""
    script = (
        "((label, value) => { const field = [...document.querySelectorAll('.field')].find((one) => "
        "one.querySelector('.label').textContent === label).querySelector('input, select, textarea'); "
        "field.value = value; "
        "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, { bubbles: true })); })"
    )
    browser.run(f"{script}({json.dumps(label)}, {json.dumps(value)})")


def click(browser: Browser, label: str) -> None:
    """Click the button of a label."""
    fits = f"(one) => one.textContent === {json.dumps(label)} && !one.disabled"
    button = f"[...document.querySelectorAll('button')].find({fits})"
    browser.wait(button)
    browser.run(f"{button}.click()")


def text(browser: Browser, selector: str) -> str:
    return str(browser.run(f"(document.querySelector({json.dumps(selector)}) || {{}}).innerText || ''"))


VIEWS = {
    "runs": ("runs", "document.querySelectorAll('table.runs tbody tr').length >= 5"),
    "run": ("run?run=runs%2Ffirst", "document.querySelectorAll('.report section').length > 3"),
    "failed": (
        "run?run=runs%2Ffailed",
        "document.querySelector('.message').textContent.includes('<b>left')",
    ),
    "compare": (
        "compare?run=runs%2Ffirst&run=runs%2Fstopped",
        "document.querySelectorAll('path.curve').length > 4",
    ),
    "plan": ("plan", "document.querySelector('form.asked')"),
    "data": ("data", "document.querySelector('form.across')"),
    "chat": ("chat", "document.querySelector('form.ask')"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", VIEWS)
def test_every_view_fits_a_window_and_a_phone(browser: Browser, name: str) -> None:
    place, until = VIEWS[name]
    for width in (1280, 390):
        browser.resize(width, 844)
        browser.run("location.hash = '#/x'")
        go(browser, place, until)
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run("document.querySelectorAll('h1').length") == 1
    browser.resize(1280, 900)


def axe() -> Path | None:
    """axe-core's script, where its npm package is installed: TONNAGE_AXE names it."""
    path = Path(os.environ.get("TONNAGE_AXE", "/usr/share/nodejs/axe-core/axe.min.js"))
    return path if path.is_file() else None


@pytest.mark.skipif(axe() is None, reason="no axe-core (npm pack axe-core; TONNAGE_AXE=.../axe.min.js)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", VIEWS)
def test_axe_finds_nothing_serious(browser: Browser, name: str, scheme: str) -> None:
    place, until = VIEWS[name]
    browser.prefer(scheme)
    go(browser, place, until)
    script = axe()
    assert script is not None
    browser.run(script.read_text())
    browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    problems: list[dict[str, Any]] = browser.run(
        "axe.run(document).then((result) => result.violations.map((one) => "
        "({ id: one.id, impact: one.impact, nodes: one.nodes.slice(0, 3).map((node) => node.html) })))"
    )
    assert [one for one in problems if one["impact"] in ("serious", "critical")] == []


@pytest.mark.matrix
def test_the_list_sorts_filters_and_compares(browser: Browser) -> None:
    go(browser, "runs", "document.querySelector('table.runs')")
    names = "[...document.querySelectorAll('table.runs th[scope=row] a')].map((one) => one.textContent)"
    browser.run("document.querySelector('[data-column=run]').click()")
    assert browser.run(names) == sorted(browser.run(names))
    browser.run("document.querySelector('[data-column=run]').click()")
    assert browser.run(names) == sorted(browser.run(names), reverse=True)
    search = "document.querySelector('input[type=search]')"
    browser.run(f"{search}.value = 'failed'; {search}.dispatchEvent(new Event('input'))")
    assert set(browser.run(names)) == {"runs/failed", "runs/killed"}
    browser.run(f"{search}.value = 'nothing like it'; {search}.dispatchEvent(new Event('input'))")
    assert "No run fits" in text(browser, ".empty")
    browser.run(f"{search}.value = ''; {search}.dispatchEvent(new Event('input'))")
    for name in ("runs/first", "runs/stopped"):
        browser.run(f"document.querySelector('[aria-label=\"Compare {name}\"]').click()")
    browser.run("document.querySelector('.tools a.button').click()")
    browser.wait("document.querySelectorAll('table.compared thead th').length >= 2")
    for name in ("runs/first", "runs/stopped"):
        assert name in text(browser, "table.compared")


@pytest.mark.matrix
def test_markup_stays_text(browser: Browser, served: Served) -> None:
    name = "x<img src=x onerror=alert(1)>"
    run = served.folder / name
    shutil.copytree(served.folder / "runs" / "failed", run)
    (run / "tags.json").write_text(json.dumps({"tags": ["<b>t</b>"], "note": "<script>alert(2)</script>"}))
    (run / "log.txt").write_text("<img src=x onerror=alert(3)>")
    go(browser, "runs", "document.querySelector('table.runs').innerText.includes('<img')")
    browser.run(f"location.hash = '#/run?' + new URLSearchParams({{ run: {json.dumps(name)} }})")
    browser.wait("document.querySelectorAll('.report section').length > 3")
    browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    browser.wait("document.querySelector('pre.log').textContent.includes('onerror')")
    check_that_nothing_is_markup(browser)
    assert text(browser, "h1") == name
    browser.run(
        f"location.hash = '#/compare?' + new URLSearchParams([['run', 'runs/first'], ['run', {json.dumps(name)}]])"
    )
    browser.wait("document.querySelector('table.compared').innerText.includes('<img')")
    check_that_nothing_is_markup(browser)
    shutil.rmtree(run)


def check_that_nothing_is_markup(browser: Browser) -> None:
    assert browser.run("document.querySelectorAll('main img, main script').length") == 0


def test_markup_in_rows_stays_text(browser: Browser, served: Served) -> None:
    row = {"instruction": "<script>alert(1)</script>", "output": "<img src=x onerror=alert(2)> <b>bold</b>"}
    (served.folder / "<b>rows.jsonl").write_text(json.dumps(row) + "\n")
    data = {"train": "<b>rows.jsonl", "template": "plain", "max_length": 128}
    config = {"model": "model", "data": data, "output": "never"}
    (served.folder / "<b>.yaml").write_text(yaml.safe_dump(config))
    go(browser, "runs", "document.querySelector('table.runs')")
    go(browser, "data", "[...document.querySelectorAll('option')].some((option) => option.value === '<b>.yaml')")
    fill(browser, "Data of", "<b>.yaml")
    click(browser, "Show")
    browser.wait("document.querySelector('.row .text .counts')", SECONDS)
    assert "<script>alert(1)</script>" in text(browser, ".row .text")
    assert row["output"] in text(browser, ".row .counts")
    assert "<b>rows.jsonl" in text(browser, ".row .where")
    check_that_nothing_is_markup(browser)


@pytest.mark.matrix
def test_tags_and_a_note_are_kept_in_the_run(browser: Browser, served: Served) -> None:
    go(browser, "run?run=runs%2Fstopped", "document.querySelector('.tags-input')")
    browser.wait("document.querySelector('h1').textContent === 'runs/stopped'")
    browser.run("document.querySelector('.tags-input').value = 'good, tried'")
    browser.run("document.querySelector('.tags-input').dispatchEvent(new Event('change'))")
    browser.wait("document.querySelector('.tagged .remark').textContent.includes('tags.json')")
    kept = json.loads((served.folder / "runs" / "stopped" / "tags.json").read_text())
    assert kept == {"tags": ["good", "tried"], "note": ""}
    go(browser, "runs", "[...document.querySelectorAll('.tag')].some((one) => one.textContent === 'tried')")


@pytest.mark.slow
def test_a_path_of_rows_is_not_read_as_yaml(browser: Browser, served: Served) -> None:
    go(browser, "plan", "document.querySelector('form.asked')")
    fill(browser, "Model", "model")
    fill(browser, "Rows", "exp #1/rows.jsonl")
    click(browser, "Plan")
    browser.wait("document.querySelector('.command code')", SECONDS)
    assert 'data.train="exp #1/rows.jsonl"' in shlex.split(text(browser, ".command code"))


def test_from_a_plan_to_a_conversation(browser: Browser, served: Served) -> None:
    go(browser, "plan", "document.querySelector('form.asked')")
    fill(browser, "Model", "model")
    fill(browser, "Rows", "rows.jsonl")
    fill(browser, "Tokens in a pack", "128")
    more = [
        "data.template=plain",
        f"steps={STEPS}",
        "batch.sequences=8",
        "memory.micro_batch=1",
        "memory.recompute=full",
    ]
    fill(browser, "More keys of the config", "\n".join(more))
    click(browser, "Plan")
    browser.wait("document.querySelector('.planned .tiles')", SECONDS)
    line = text(browser, ".command code")
    assert line.startswith("tonnage plan model data.train=rows.jsonl")
    plan = planned(served, [*line.split()[2:]])
    assert text(browser, ".planned .tile .figure") == size(plan.choice.peak_bytes)
    browser.run("(name => { name.value = 'clicked'; })(document.querySelector('.begin input'))")
    click(browser, "Start it here")
    run = RunDirectory(served.folder / "clicked")
    deadline = time.monotonic() + SECONDS
    while not run.is_run():
        assert time.monotonic() < deadline, text(browser, ".output")
        time.sleep(0.2)
    go(browser, "run?run=clicked", "document.querySelector('h1').textContent === 'clicked'")
    browser.wait("document.querySelector('path.curve') && document.querySelector('.state.training')", SECONDS)
    browser.wait(
        "Number(document.querySelector('.tiles .steps').textContent.split(' / ')[0].replace(',', '')) > 5", SECONDS
    )
    click(browser, "Stop")
    browser.wait("document.querySelector('.state.stopped')", SECONDS)
    assert text(browser, ".command code") == "tonnage stop clicked"
    steps = last_step(run)
    assert 5 < steps < STEPS
    click(browser, "Resume")
    browser.wait("document.querySelector('.state.training')", SECONDS)
    assert text(browser, ".command code") == "tonnage train --resume clicked"
    browser.wait("document.querySelector('.head .state.done')", SECONDS)
    assert last_step(run) == STEPS
    browser.wait(
        "[...document.querySelectorAll('main h2')].some((one) => one.textContent === 'Checkpoints and exports')"
    )
    click(browser, "Verify")
    browser.wait("document.querySelector('.going') && document.querySelector('.going').innerText === 'done'", SECONDS)
    go(browser, "chat?run=clicked", "document.querySelector('.who .remark').textContent === 'ready'")
    fill(browser, "Tokens at most", "64")  # the answer and the next question fit 256 positions
    browser.run("document.querySelector('form.ask textarea').value = 'Say a'")
    click(browser, "Send")
    browser.wait(
        "[...document.querySelectorAll('.turn.assistant .words')].some((one) => one.textContent.length > 1)", SECONDS
    )
    browser.run("document.querySelector('.check input').click()")
    browser.wait("document.querySelectorAll('.token .pop code').length >= 5")
    assert text(browser, ".message.failed") == ""
    check_that_what_was_said_is_kept(browser, served)


def check_that_what_was_said_is_kept(browser: Browser, served: Served) -> None:
    """When another view is shown, and when the page is loaded again; the model that was loaded goes on."""
    fill(browser, "System prompt", "Be brief.")
    browser.wait("!document.querySelector('button.main').disabled")
    said = text(browser, ".talk")
    assert said.startswith("you\nSay a\nclicked")
    is_ready = "document.querySelector('.who .remark').textContent === 'ready'"
    go(browser, "runs", "document.querySelector('table.runs')")
    go(browser, "chat", is_ready)
    assert text(browser, ".talk") == said
    browser.open(served.address.partition("#")[0] + "?again#/chat")
    browser.wait(is_ready)
    assert text(browser, ".talk") == said
    browser.run("document.querySelector('.check input').click()")
    fill(browser, "Tokens at most", "")
    browser.run("document.querySelector('form.ask textarea').value = 'And <img src=x>'")
    click(browser, "Send")
    browser.wait("document.querySelectorAll('.turn').length === 4 && !document.querySelector('button.main').disabled")
    assert "And <img src=x>" in text(browser, ".talk")
    check_that_nothing_is_markup(browser)
    assert text(browser, ".message.failed") == ""
    click(browser, "New conversation")
    go(browser, "runs", "document.querySelector('table.runs')")
    go(browser, "chat", is_ready)
    assert browser.run("document.querySelectorAll('.turn').length") == 0
    assert browser.run("document.querySelector('.across textarea').value") == "Be brief."
    fill(browser, "Tokens at most", "-1")
    browser.run("document.querySelector('form.ask textarea').value = 'And c'")
    click(browser, "Send")
    browser.wait("document.querySelector('.turn .message.failed')")
    assert "[object" not in text(browser, ".turn .message.failed")
    browser.failed.clear()  # the refusal, which it tells of, too
    browser.console.clear()


AS_SERVED = """
(() => {
  const answers = %s, fetched = window.fetch;
  window.asked = [];
  window.fetch = async (path, how) => {
    const json = (value, status = 200) => new Response(JSON.stringify(value), { status });
    if (path === "/api/chat/load") return json({ command: "1", line: "tonnage serve m" });
    if (path.startsWith("/api/chat/served")) return json({ model: "m", status: null, line: "tonnage serve m" });
    if (path !== "/api/chat") return fetched(path, how);
    window.asked.push(JSON.parse(how.body).question.messages.map((one) => one.content));
    const answer = answers[window.asked.length - 1];
    if (answer === null) return json({ error: "too long" }, 400);
    const [words, end] = answer;
    return new Response(`data: ${JSON.stringify({ choices: [{ delta: { content: words } }] })}\n\n${end}`);
  };
})()
"""
"""A model that answers with words and what ends the stream; or refuses, where there are none."""


def test_what_failed_is_not_said_again(browser: Browser, served: Served) -> None:
    done = "data: [DONE]\n\n"
    answers = [["one", done], None, ["hal", ""], ["three", done], ["four", done]]
    go(browser, "runs", "document.querySelector('table.runs')")
    browser.run("sessionStorage.clear()")
    go(browser, "chat", "document.querySelector('form.ask')")
    browser.run(AS_SERVED % json.dumps(answers))
    browser.run("document.querySelector('.who input').value = 'm'")
    click(browser, "Load")
    browser.wait("document.querySelector('.who .remark').textContent === 'ready'")
    for number, words in enumerate(["1", "refused", "broken", "3", "4"], start=1):
        browser.run(f"document.querySelector('form.ask textarea').value = {json.dumps(words)}")
        click(browser, "Send")
        browser.wait(f"window.asked.length === {number} && !document.querySelector('button.main').disabled")
    assert browser.run("window.asked") == [
        ["1"],
        ["1", "one", "refused"],
        ["1", "one", "broken"],
        ["1", "one", "3"],
        ["1", "one", "3", "three", "4"],
    ]
    shown = "[...document.querySelectorAll('.turn.assistant')].map((one) => one.innerText.split('\\n').slice(1))"
    refused, broken = browser.run(shown)[1:3]
    assert "too long" in refused
    assert broken[0] == "hal"
    assert "broke off" in broken[-1]
    click(browser, "New conversation")
    browser.open(served.address.partition("#")[0] + "?once-more#/runs")


def planned(served: Served, words: list[str]) -> Plan:
    """What the command line plans."""
    command = [sys.executable, "-m", "tonnage", "plan", *words, "--json"]
    result = subprocess.run(command, cwd=served.folder, capture_output=True, text=True, check=True)
    return parse_record(result.stdout, Plan, "plan")


def last_step(run: RunDirectory) -> int:
    return max(int(record["step"]) for record in run.read_metrics() if "loss" in record)


@pytest.mark.matrix
def test_data_are_shown_token_by_token(browser: Browser) -> None:
    go(browser, "data", "document.querySelector('form.across')")
    fill(browser, "Data of", "runs/first")
    fill(browser, "Rows to show", "8")
    click(browser, "Show")
    browser.wait("document.querySelectorAll('.row .text .counts').length >= 8", SECONDS)
    assert "supervised" in text(browser, ".row .where")
    search = "document.querySelector('input[type=search]')"
    browser.run(f"{search}.value = 'never in a row'; {search}.dispatchEvent(new Event('input'))")
    assert browser.run("document.querySelectorAll('main .row').length") == 0


@pytest.mark.matrix
def test_the_page_says_that_its_server_has_ended(tmp_path: Path) -> None:
    with Browser() as other:
        with page_over(tmp_path) as served:
            other.open(served.address)
            other.wait("document.querySelector('.empty')")
            assert "No run lies below this folder yet" in text(other, ".empty")
        other.wait("!document.getElementById('lost').hidden")
        assert "The server" in text(other, "#lost")
