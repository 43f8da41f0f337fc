"""A run as an iterator: its steps are those of the run's files, and however it is left it is saved."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

import entry
import tonnage
from forked import work
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.api.curve import MOST_POINTS, curve
from tonnage.api.run import Running
from tonnage.api.starting import Started
from tonnage.api.steps import Step
from tonnage.launch.watch import DONE, AtWork
from tonnage.rundir.directory import RunDirectory, complete_checkpoints

if TYPE_CHECKING:
    from tonnage.planning.plan import Plan

ENDLESS = """
import os, tonnage
print(os.getpid(), flush=True)
data = {"train": "rows.jsonl", "max_length": 128, "template": "plain"}
keys = {"batch": {"sequences": 4}, "launch": {"workers": 2, "threads": 1}, "checkpoint": {"every": 5}}
with tonnage.start("model", data, steps=100000, output="endless", **keys) as running:
    for step in running:
        if step.step % 5 == 0:
            print("step", step.step, flush=True)
print("over", running.is_over, flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("running")
    write_model(folder / "model", llama_config(num_hidden_layers=1, initializer_range=0.3))
    write_rows(folder / "rows.jsonl", alpaca_rows(80))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(work("api.stepping", (1, [str(folder)])).splitlines()[-1])
    return said


@pytest.mark.slow
def test_a_loop_sees_every_step_to_the_end(found: dict[str, Any], folder: Path) -> None:
    run = tonnage.open_run(folder / "plain")
    assert found["plain"] == [step.loss for step in run.steps]
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert found["over"] == [True, [], True]
    assert found["evaluations"] == [0, 3, 6]
    assert list(run.metrics["eval_loss"].dropna().index) == [3, 6]
    assert list(run.metrics["loss"]) == found["plain"]
    assert run.metrics["memory.host_peak"].min() > 0
    assert run.account.total.rows_read == 80
    assert "6 of 6" in (folder / "plain" / "report.html").read_text()
    assert "backward of the last block" in run.plan._repr_html_()
    assert found["name"] == "rows in memory"
    assert (folder / "plain" / "outcome.json").exists()
    last = run.steps[-1]
    assert (last.record["grad_norm"], last.lr, last.tokens) == (
        last.grad_norm,
        last.record["lr"],
        last.record["tokens"],
    )
    assert last.memory["host_peak"] > 0


@pytest.mark.slow
def test_a_run_that_an_exception_ended_goes_on_as_if_nothing_had_happened(found: dict[str, Any]) -> None:
    # Over, saved and not exported unless its last step had come before it heard, nobody at work.
    assert found["left"] == [True, found["before"] == 6, False]
    assert 2 <= found["before"] <= 6
    assert found["resumed"] == found["plain"] == found["again"]  # and rows of a file train as those in memory do
    assert found["samples"] == found["samples again"]
    assert [step for step, _ in found["samples"]] == [0, 0, 3, 3, 6, 6]
    assert found["export"]


@pytest.mark.slow
def test_what_cannot_be_is_refused(found: dict[str, Any]) -> None:
    assert "output left already holds a run" in found["refused"]
    assert "output two already holds a run" in found["second"]
    assert "another run works in this directory" in found["resumed meanwhile"]
    assert "nobody works on this run" in found["idle"]


@pytest.mark.slow
def test_a_run_stops_itself_by_its_directory(found: dict[str, Any]) -> None:
    assert found["stopped"]
    assert found["asked"] == "tonnage stop"
    assert found["mask"] == 0o002  # the program's own


@pytest.mark.slow
@pytest.mark.usefixtures("found")
def test_a_run_answers(folder: Path) -> None:
    run = tonnage.open_run(folder / "plain")
    state = torch.random.get_rng_state()
    prompts: list[str | list[dict[str, str]]] = [
        "Say in capitals.",
        [{"role": "user", "content": "Say in capitals. abc"}],
        "Say in capitals.",
    ]
    answers = run.generate(prompts, max_new_tokens=6)
    assert len(answers) == 3
    assert answers[0] == answers[2]  # the likeliest token every time
    drawn = [run.generate(prompts, max_new_tokens=6, temperature=5.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(tonnage.UserError, match="one text"):
        run.generate("Say in capitals.")


@pytest.mark.slow
@pytest.mark.usefixtures("found")
def test_a_run_is_talked_to(folder: Path) -> None:
    run = tonnage.open_run(folder / "plain")
    state = torch.random.get_rng_state()
    chat = run.chat(system="Be brief.", max_new_tokens=6)
    first = chat.say("Say in capitals. abc")
    assert [one["role"] for one in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[-1]["content"] == first
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say in capitals. abc"}]
    again = [*opening, {"role": "assistant", "content": first}, {"role": "user", "content": "Again."}]
    assert [first, chat.say("Again.")] == run.generate([opening, again], max_new_tokens=6, batch_size=1)
    kept = list(chat.messages)
    with pytest.raises(tonnage.UserError, match=r"5,\d+ tokens"):
        chat.say("x" * 5000)
    assert chat.messages == kept
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    drawn = [run.chat(temperature=5.0, seed=seed).say("Say") for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.slow
@pytest.mark.usefixtures("found")
def test_a_run_is_evaluated(folder: Path) -> None:
    run = tonnage.open_run(folder / "plain")
    rows = [{"instruction": f"Say in capitals. {word}", "output": word.upper()} for word in ("ab", "cd", "ef")]
    (folder / "evaluated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run.evaluate(rows, answers=2, max_new_tokens=4)
    assert (found.answers, found.exact) in ((2, 0), (2, 1), (2, 2))
    told = entry.tonnage("eval", str(run.path), "--data", str(folder / "evaluated.jsonl"), "--json", "--exact-match=0")
    assert json.loads(told.out)["loss"] == pytest.approx(found.loss, rel=1e-6)
    assert run.evaluate([str(folder / "evaluated.jsonl")] * 2).supervised_tokens == 2 * found.supervised_tokens
    with pytest.raises(tonnage.UserError, match="a dictionary"):
        run.evaluate(rows[0])
    outcome = run.outcome
    assert outcome is not None
    assert outcome.measured.keys() == outcome.planned.keys() == {"memory_bytes", "step_seconds"}


@pytest.mark.slow
def test_a_run_shows_itself(found: dict[str, Any]) -> None:
    assert found["summary"].startswith("6 of 6 steps, loss ")
    assert found["summary"].replace(">", "&gt;") in found["html"]
    assert re.findall("<small>([^<]*)", found["html"]) == [
        "loss",
        "loss of evaluations",
        "learning rate",
        "gradient norm",
        "tokens a second",
    ]
    assert "measured, by phase" in found["html"]
    points = re.findall(r'points="([^"]*)"', found["html"])[0]
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert len(heights) == 6
    order = sorted(range(6), key=lambda index: -found["plain"][index])
    assert sorted(range(6), key=lambda index: heights[index]) == order  # higher losses are higher up


def test_a_curve_is_drawn_with_gaps_and_in_bounded_space() -> None:
    assert curve([]) == curve([None, math.nan]) == ""
    assert curve([1.0, None, 2.0]).count("<polyline") == 2
    drawn = curve([math.sin(step) for step in range(100_000)])
    assert [len(points.split()) for points in re.findall(r'points="([^"]*)"', drawn)] == [MOST_POINTS]


def test_records_of_other_things_are_no_steps() -> None:
    assert Step.of({"step": 3, "eval_loss": 1.0}) is None
    assert Step.of({"step": 3, "memory_phases": []}) is None
    skipped = Step.of({"step": 3, "loss": None, "skipped": True})
    assert skipped is not None
    assert skipped.skipped
    assert math.isnan(skipped.loss)


class Ended:
    """Workers that have done everything."""

    def look(self) -> int:
        return DONE


def ended(folder: Path, closing: ExitStack) -> Running:
    """A run whose workers have ended, and whose model is still to be exported."""
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001" / "COMPLETE").touch()
    for name in ("config.yaml", "plan.json"):
        (folder / name).touch()
    at_work, plan = cast(AtWork, Ended()), cast("Plan", None)
    return Running(Started(RunDirectory(folder), plan, at_work, closing))


@pytest.fixture
def nothing_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("learn", "measure"):
        monkeypatch.setattr(f"tonnage.decide.outcome.{name}", lambda *_: None)


@pytest.mark.usefixtures("nothing_learnt")
@pytest.mark.parametrize("leave", [Running.wait, Running.stop])
def test_ctrl_c_while_the_model_is_exported_is_raised(
    leave: Callable[[Running], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.decide.exports.export_run", lambda *_: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(Ended, "ask_to_stop", lambda *_: None, raising=False)
    running = ended(tmp_path, ExitStack())
    with pytest.raises(KeyboardInterrupt):
        leave(running)
    assert running.is_over


@pytest.mark.usefixtures("nothing_learnt")
def test_what_a_program_handles_meanwhile_is_no_failure_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.decide.exports.export_run", lambda *_: None)
    monkeypatch.setattr("tonnage.decide.exports.step_of_export", lambda *_: 1)
    monkeypatch.setattr("tonnage.report.comparison.leave_comparison", lambda *_: None)
    monkeypatch.setattr("tonnage.decide.pushing.push_rest", lambda *_: None)
    heard: list[object] = []
    closing = ExitStack()
    closing.push(lambda kind, *_: heard.append(kind))
    try:
        raise FileNotFoundError
    except FileNotFoundError:
        ended(tmp_path, closing).wait()
    assert heard == [None]


def endless(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
    )


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step") and int(line.split()[1]) >= step:
            return
    raise AssertionError("".join(said))


@pytest.mark.slow
def test_a_run_is_stopped_interrupted_and_killed_from_elsewhere(folder: Path) -> None:
    """``tonnage stop`` ends the loop of another process, which never hears of it but by its end; Ctrl-C is raised once
    all is saved; and SIGKILL leaves no worker."""
    run = RunDirectory(folder / "endless")
    process = endless(folder)
    wait_for_step(process, 5)
    ended = entry.tonnage("stop", str(run.path))
    out, _ = process.communicate(timeout=60)
    assert ended.status in (None, 0), ended
    last = complete_checkpoints(run.checkpoints)[-1]
    assert f"Ended; {last.name} is saved." in " ".join(ended.out.split())
    assert (process.returncode, out.splitlines()[-1]) == (0, "over True")
    assert int(last.name[5:]) == tonnage.open_run(run.path).steps[-1].step
    assert (run.path / "export").exists()

    run.path.rename(folder / "stopped")
    process = endless(folder)
    wait_for_step(process, 5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert out.splitlines()[-1] == "KeyboardInterrupt"
    assert not run.is_locked()
    steps = tonnage.open_run(run.path).steps
    assert complete_checkpoints(run.checkpoints)[-1].name == f"step-{steps[-1].step:08d}"

    run.path.rename(folder / "interrupted")
    process = endless(folder)
    wait_for_step(process, 10)
    deadline = time.monotonic() + 60
    while not complete_checkpoints(run.checkpoints):  # published behind the steps, which do not wait for it
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while run.is_locked():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert complete_checkpoints(run.checkpoints)
    assert os.path.lexists(run.lock)
