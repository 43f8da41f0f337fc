"""Files of a run that hold other JSON than a run writes: each is read as it was meant, or refused in a sentence.

Every key of every file is taken out or replaced by values of other types and sizes, and whole files by others. What
reads them raises ``UserError`` and nothing else, and says which file it was.
"""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from entry import tonnage
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint.resume import choose, set_aside
from tonnage.checkpoint.save import (
    COMPLETE,
    STATE,
    Cursor,
    RunForm,
    Saver,
    complete_checkpoints,
    interrupted_saves,
    prune,
    publish,
    read_state,
)
from tonnage.checkpoint.verify import CHECKSUMS, verify
from tonnage.cli.plan import show_outcome
from tonnage.config import as_json, compare, read_config
from tonnage.decide.card import model_card
from tonnage.decide.decision import decide
from tonnage.decide.exports import StopTokens
from tonnage.decide.written import write_run
from tonnage.display.progress import RunDisplay, show_memory
from tonnage.errors import UserError
from tonnage.files.reading import read_record
from tonnage.files.writing import write_json
from tonnage.launch import slurm
from tonnage.parallel.world import join_world
from tonnage.planning.plan import Plan
from tonnage.report.gathered import gather
from tonnage.report.page import render
from tonnage.rundir.directory import RunDirectory

QUIET = Console(quiet=True)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0.5, 10**30, -(10**30), 1e300, "", "x", "../../x", "\x1b[31m", "9" * 5000),
    *([], {}, [[]], {"a": 1}, [0]),
)
WHOLE = (
    *(b"", b"{", b"[]", b"1", b'"x"', b"null", b"{}", b"NaN", b"\xff\xfe", b"\0", b"[" * 100_000, b"9" * 5000),
    *(b'{"a":' * 2000 + b"1" + b"}" * 2000, b'{"files": {}}', b'{"step": NaN}', b'{"step": 1e999}'),
)
TRIED = 200
"""Of the ways in which a file may be changed."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with two checkpoints, metrics and everything else that a run writes."""
    folder = tmp_path_factory.mktemp("damage")
    write_model(folder / "model", llama_config(num_hidden_layers=1))
    text = {
        "model": str(folder / "model"),
        "data": {
            "train": str(write_rows(folder / "rows.jsonl", alpaca_rows(60))),
            "max_length": 128,
            "template": "plain",
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 4},
        "steps": 40,
        "track": [],
        "output": str(folder / "run"),
    }
    (folder / "config.yaml").write_text(json.dumps(text))
    decision = decide(str(folder / "config.yaml"), [])
    run = RunDirectory(folder / "run")
    write_run(run, decision)
    facts = {**decision.plan.facts(), "config": as_json(decision.config)}
    with join_world() as world:
        saver = Saver(run.checkpoints, 9, world)
        for step in (10, 20):
            saver.save(Cursor(step, 4 * step, step), {"w": torch.zeros(3)}, {}, facts, wait=True)
    steps = [
        {"step": step, "loss": 1.0, "tokens": 9, "step_seconds": 0.1, "lr": 0.1, "tokens_per_second": 9.0,
         "skipped": False, "memory": {"device_peak": 0, "host_peak": 9},
         "disk": {"waited_seconds": 0.0, "read_bytes": 1, "written_bytes": 1},
         "host": {"waited_seconds": 0.0, "copied_bytes": 1}}
        for step in range(1, 21)
    ]  # fmt: skip
    last = [
        {"step": 20, "eval_loss": 1.0},
        {"step": 20, "checkpoint_bytes": 1, "blocked_seconds": 0.1, "save_seconds": 0.1},
        {"step": 20, "memory_phases": [{"phase": "load", "host": [1], "device": [0]}]},
    ]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in [*steps, *last]))
    write_json(run.resume, {"checkpoint": "step-00000010"})
    write_json(run.job, {"job": "12"})
    run.write_error(0, UserError(), 2)
    return run.path


@pytest.fixture
def run(original: Path, tmp_path: Path) -> RunDirectory:
    return RunDirectory(shutil.copytree(original, tmp_path / "run"))


def changed(value: Any) -> Iterator[Any]:
    """A JSON value with one thing inside of it taken out or replaced."""
    if not isinstance(value, dict | list):
        return
    for key in list(value) if isinstance(value, dict) else range(min(2, len(value))):
        copy: Any = value.copy()
        inner = copy.pop(key)
        yield copy
        for other in (*VALUES, *changed(inner)):
            copy = value.copy()
            copy[key] = other
            yield copy


def contents(path: Path) -> list[bytes]:
    """What may stand in a JSON file instead of what it holds."""
    values = list(changed(json.loads(path.read_bytes())))
    values = random.Random(0).sample(values, min(TRIED, len(values)))
    return [*WHOLE, *(json.dumps(value).encode() for value in values)]


def survives(read: Callable[[], object], name: str) -> bool:
    """Whether it was read; what is refused is refused with the name of the file."""
    try:
        read()
    except UserError as error:
        refused = error
    else:
        return True
    assert refused.problems
    assert all(problem.found and problem.needed for problem in refused.problems)
    assert any(name in problem.where or name in problem.found for problem in refused.problems), str(refused)
    assert len(str(refused)) < 5000
    return False


def check_all(path: Path, read: Callable[[], object], *, few_pass: bool = True, name: str = "") -> None:
    before = path.read_bytes()
    assert survives(read, path.name)
    tried = passed = 0
    for content in contents(path):
        path.write_bytes(content)
        passed += survives(read, name or path.name)
        tried += 1
    path.write_bytes(before)
    assert survives(read, path.name)
    assert tried > 30
    assert not few_pass or passed < tried / 2, f"{passed} of {tried} pass"


def test_complete(run: RunDirectory) -> None:
    newest = complete_checkpoints(run.checkpoints)[-1]

    def read() -> None:
        if problems := verify(newest):
            raise UserError(*problems)
        assert choose(run.checkpoints) == newest

    check_all(newest / COMPLETE, read, name=newest.name)


def test_state(run: RunDirectory) -> None:
    newest = complete_checkpoints(run.checkpoints)[-1]
    config = read_config(run.config, check_files=False)

    def read() -> None:
        (newest / COMPLETE).unlink()
        publish(newest)  # whoever changes a file may change the list as well
        if problems := verify(newest):
            raise UserError(*problems)
        assert choose(run.checkpoints) == newest
        state = read_state(newest, RunForm)
        Cursor.of(state)
        [str(change) for change in compare(state["config"], config)]
        assert model_card(run, newest, dtype="bf16")

    check_all(newest / STATE, read, few_pass=False)


def test_data_and_environment(run: RunDirectory) -> None:
    newest = complete_checkpoints(run.checkpoints)[-1]
    for path in (run.data, run.environment):
        check_all(
            path, lambda: (read_record(run.data, StopTokens), model_card(run, newest, dtype="bf16")), few_pass=False
        )


def test_plan(run: RunDirectory) -> None:
    def read() -> None:
        plan = Plan.read(run.plan)
        with RunDisplay(run, plan.num_steps, num_workers=min(plan.workers, 9), console=QUIET) as display:
            display.poll()
        plan.facts()

    check_all(run.plan, read, few_pass=False)


def test_notes(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(slurm, "look", lambda job: slurm.JobState("GONE"))
    check_all(run.resume, run.checkpoint_to_resume)
    for name in ("", "../../x", "step-00000010/..", "/etc", "step-1", "\x1b[31m", "step-٣٠٣٠٣٠٣٠"):
        write_json(run.resume, {"checkpoint": name})
        with pytest.raises(UserError, match="a name such as step-00000500"):
            run.checkpoint_to_resume()
    check_all(run.job, lambda: slurm.job_of(run))
    check_all(run.worker_error(0), run.read_errors)


def test_metrics(run: RunDirectory) -> None:
    lines, plan = run.metrics.read_text().splitlines(), Plan.read(run.plan)
    newest = complete_checkpoints(run.checkpoints)[-1]

    def read() -> None:
        run.read_metrics()
        model_card(run, newest, dtype="bf16")
        show_outcome(run, plan, QUIET)

    for line in (lines[3], *lines[-3:]):
        for value in changed(json.loads(line)):
            text = json.dumps(value)
            run.metrics.write_text("\n".join([*lines[:5], text, *lines[5:]]) + "\n")
            if not survives(read, run.metrics.name):
                with pytest.raises(UserError, match=r"metrics.jsonl:6"):
                    run.read_metrics()
            with RunDisplay(run, 40, console=Console(file=io.StringIO())) as display:  # a run does not end of it
                display.poll()
            show_memory(run, QUIET)
    run.metrics.write_text("\n".join([*lines[:5], '{"step": "x", "loss": 1.0}', "{", *lines[5:]]) + "\n")
    assert run.rewind_metrics(20) == 2
    assert len(run.read_metrics()) == len(lines)
    assert run.cut_metrics.read_text() == '{"step": "x", "loss": 1.0}\n{\n'


@pytest.mark.matrix
def test_report(run: RunDirectory) -> None:
    sample = {"step": 3, "number": 1, "prompt": "a", "answer": "b", "expected": None}
    run.samples.write_text(json.dumps(sample) + "\n")
    write_json(run.outcome, {"planned": {"memory_bytes": 5, "step_seconds": 1.0}, "measured": {"memory_bytes": 6}})

    def read() -> None:
        page = render([gather(run.path)])
        page.encode()
        assert "</html>" in page

    for path in (run.data, run.rows, run.environment, run.outcome, run.plan):
        check_all(path, read, few_pass=False)
    for path, line in ((run.samples, 0), (run.metrics, 3), (run.metrics, -1)):
        lines = path.read_text().splitlines()
        for value in changed(json.loads(lines[line])):
            path.write_text("\n".join([*lines, json.dumps(value)]) + "\n")
            survives(read, path.name)
        path.write_text("\n".join(lines) + "\n")
    assert survives(read, run.metrics.name)


def test_positions(run: RunDirectory) -> None:
    path = run.worker_position(0)
    for content in (
        *WHOLE,
        *(json.dumps({"phase": value}).encode() for value in VALUES),
        b'{"phase": "a", "step": []}',
    ):
        path.write_bytes(content)
        position = run.read_position(0)
        assert isinstance(position.phase, str)
        str(position)
    run.lock.write_text('{"pid": "x", "host": 3}')
    with run.locked():
        pass


def test_names_of_checkpoints(run: RunDirectory) -> None:
    """What is called otherwise than a checkpoint is none: not chosen, not removed, and ``verify`` says so."""
    newest = complete_checkpoints(run.checkpoints)[-1]
    for name in (
        "step-",
        "step-x",
        "step-30",
        "step-00000030-copy",
        "step-٣٠٣٠٣٠٣٠",
        "step-" + "9" * 40,
        "notes",
        "step-[red]",
    ):
        shutil.copytree(newest, run.checkpoints / name)
        (run.checkpoints / f"step-half{name}").mkdir()
    assert choose(run.checkpoints) == newest
    assert interrupted_saves(run.checkpoints) == []
    assert set_aside(run.checkpoints, 20) == []
    prune(run.checkpoints, 1)
    assert complete_checkpoints(run.checkpoints) == [newest]
    ended = tonnage("verify", str(run.path))
    assert ended.status == 0
    assert "step-x is not called as a checkpoint is" in ended.out


def test_a_link_to_a_checkpoint_is_removed_and_its_target_kept(run: RunDirectory, tmp_path: Path) -> None:
    oldest = complete_checkpoints(run.checkpoints)[0]
    oldest.rename(tmp_path / "kept")
    oldest.symlink_to(tmp_path / "kept")
    prune(run.checkpoints, 1)
    assert not oldest.exists()
    assert (tmp_path / "kept" / COMPLETE).exists()


def test_a_list_that_was_made_to_match_is_found_out(run: RunDirectory) -> None:
    newest = complete_checkpoints(run.checkpoints)[-1]
    shard = next(newest.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (newest / COMPLETE).unlink()
    publish(newest)
    (problem,) = verify(newest)
    assert problem.where == str(shard)
    assert "one was changed after it was written" in problem.found
    with pytest.raises(UserError, match="a damaged checkpoint"):
        choose(run.checkpoints)


def test_names_in_a_list_lead_nowhere_else(run: RunDirectory, tmp_path: Path) -> None:
    newest = complete_checkpoints(run.checkpoints)[-1]
    (tmp_path / "secret").write_text("x")
    listed = json.loads((newest / COMPLETE).read_text())
    for name in ("../../../secret", str(tmp_path / "secret"), "", ".", "a\0b"):
        listed["files"] |= {name: {"bytes": 1, "xxh3_128": "0" * 32}}
        write_json(newest / COMPLETE, listed)
        with pytest.raises(UserError, match="in the list of files"):
            verify(newest)
        del listed["files"][name]
    (tmp_path / "export").mkdir()
    write_json(tmp_path / "export" / CHECKSUMS, {"files": {"../secret": {"bytes": 1, "sha256": "0" * 64}}})
    with pytest.raises(UserError, match="in the list of files"):
        verify(tmp_path / "export")


@pytest.mark.parametrize(
    "name", ["plan.json", "config.yaml", "data.json", "metrics.jsonl", "checkpoints/step-00000020/state.json"]
)
@pytest.mark.parametrize("content", ["[]", "{", '{"step": "x"}\n'])
def test_commands_end_in_a_sentence(run: RunDirectory, name: str, content: str) -> None:
    config = yaml.safe_load(run.config.read_text()) | {"output": str(run.path)}
    run.config.write_text(json.dumps(config))
    run.job.unlink()
    (run.path / name).write_text(content)
    commands = [("verify", str(run.path)), ("follow", str(run.path)), ("export", str(run.path), str(run.path / "out"))]
    if name in ("plan.json", "checkpoints/step-00000020/state.json"):
        commands.append(("train", "--resume", str(run.path), "--dry-run"))
    for words in commands:
        ended = tonnage(*words)
        assert ended.status in (0, 2), ended
        assert "Traceback" not in ended.err
        if ended.status:
            assert ended.err.startswith("error: ")
    assert not (run.path / "out").exists()
