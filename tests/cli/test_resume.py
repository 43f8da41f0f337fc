"""What ``tonnage train --resume`` decides: what may change, what may not, and what it does to the run directory."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint.save import Cursor, Saver, checkpoint_path
from tonnage.cli import train
from tonnage.config import Config, as_json, read_config
from tonnage.config.changes import compare
from tonnage.decide.decision import Decision, decide
from tonnage.decide.exports import export_run
from tonnage.decide.resumption import Resumption, begin_again, continued, decide_resumption
from tonnage.decide.written import write_run
from tonnage.errors import UserError
from tonnage.files.reading import read_json
from tonnage.parallel.world import World, join_world
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


@pytest.fixture
def decision(tmp_path: Path) -> Decision:
    write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(60))
    text = {
        "model": str(tmp_path / "model"),
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 128, "template": "plain"},
        "batch": {"sequences": 4},
        "steps": 40,
        "output": str(tmp_path / "run"),
    }
    text["data"]["cache"] = str(tmp_path / "cache")  # type: ignore[index]
    (tmp_path / "config.yaml").write_text(json.dumps(text))
    return decide(str(tmp_path / "config.yaml"), [])


@pytest.fixture
def run(decision: Decision, world: World) -> RunDirectory:
    """A run whose checkpoints of steps 10 and 20 are there (their tensors matter to nobody here)."""
    run = RunDirectory(decision.config.output)
    write_run(run, decision)
    saver = Saver(run.checkpoints, 9, world)
    facts = {**decision.plan.facts(), "config": as_json(decision.config)}
    for step in (10, 20):
        saver.save(Cursor(step, 4 * step, step), {"w": torch.zeros(3)}, {}, facts, wait=True)
    run.metrics.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 25)))
    return run


def decided(run: RunDirectory, *words: str, step: int | None = None, allow_changes: bool = False) -> Resumption:
    return decide_resumption(run, words, step=step, allow_changes=allow_changes)


def the_same(plan: Plan, other: Plan) -> bool:
    """But for the memory that is free at the moment, and for why it is so: the config of a run says all."""
    return replace(plan, budget=other.budget, reasons=other.reasons) == other


def test_the_newest_checkpoint_and_the_next_pack(run: RunDirectory, decision: Decision) -> None:
    resumption = decided(run)
    assert resumption.checkpoint == checkpoint_path(run.checkpoints, 20)
    assert resumption.cursor == Cursor(20, 80, 20)
    assert resumption.changes == ()
    assert the_same(resumption.decision.plan, decision.plan)
    assert not resumption.is_done


def test_layout_and_habits_may_change_and_are_listed(run: RunDirectory) -> None:
    words = ("launch.workers=2", "memory.zero=1", "memory.micro_batch=1", "evaluate.every=0", "checkpoint.every=7")
    resumption = decided(run, *words)
    assert [str(change) for change in resumption.changes] == [
        "memory.zero: auto -> 1",
        "memory.micro_batch: auto -> 1",
        "launch.workers: auto -> 2",
        "checkpoint.every: 0 -> 7",
    ]
    assert resumption.decision.plan.workers == 2


@pytest.mark.matrix
def test_kernels_may_change_and_are_told_as_they_are_written(run: RunDirectory) -> None:
    """They change how numbers are rounded, and no prefix is shared without that of attention."""
    resumption = decided(run, "kernels.norms=off", "kernels.attention=off")
    assert [str(change) for change in resumption.changes] == ["kernels: auto -> {attention: off, norms: off}"]
    plan = resumption.decision.plan
    assert plan.layout.kernels_off == ("attention", "norms")
    assert not plan.layout.share_prefixes
    assert [str(change) for change in decided(run, "kernels=plain").changes] == ["kernels: auto -> plain"]


@pytest.mark.parametrize(
    "word",
    ["steps=50", "seed=1", "optimizer.lr=1e-3", "batch.sequences=8", "precision=fp32", "data.max_length=64"],
)
def test_what_makes_it_another_run_must_be_said(run: RunDirectory, word: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(UserError, match=rf"{key}: (.|\n)*--allow-changes"):
        decided(run, word)
    if key != "data.max_length":  # rows would not fit
        resumption = decided(run, word, allow_changes=True)
        assert [change.key for change in resumption.changes] == [key]
        (change,) = resumption.changes
        assert decided(run, word, *shlex.split(change.undone)).changes == ()


def test_what_was_open_is_never_decided_again(run: RunDirectory, decision: Decision) -> None:
    written = read_config(run.config)
    assert written.checkpoint.every == 0  # a run of seconds
    assert written.batch == decision.config.batch
    resumption = decided(run)
    assert resumption.decision.config == written
    assert resumption.decision.plan.reasons == {}
    with pytest.raises(UserError, match=r"batch: nothing when the run was saved, now auto(.|\n)*batch.sequences=4, or"):
        decided(run, "batch=auto")
    in_epochs = (change.undone for change in decided(run, "epochs=1", allow_changes=True).changes)
    assert decided(run, "epochs=1", *(word for undone in in_epochs for word in shlex.split(undone))).changes == ()


def test_settings_that_bring_back_what_was_can_be_pasted() -> None:
    """Text with spaces, nothing at all, lists and what YAML takes for more than text."""
    data = {"data": {"train": "rows.jsonl"}, "model": "m"}
    before = as_json(
        Config.model_validate(data | {"batch": {"sequences": 4}, "precision": "bf16", "train": ["a b", "no"]})
    )
    now = Config.model_validate(data | {"steps": 5, "model": "another", "precision": "fp32"})
    undone = {change.key: change.undone for change in compare(before | {"model": "a model"}, now)}
    assert undone["model"] == """'model="a model"'"""
    assert undone["precision"] == "precision=bf16"
    assert undone["steps"] == "steps=null"
    assert undone["train"] == """'train=["a b", "no"]'"""
    assert undone["batch"] == undone["batch.sequences"] == "batch.sequences=4"


def test_another_schedule_says_its_next_rate(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert decided(run).rates is None
    resumption = decided(run, "steps=400", allow_changes=True)
    assert resumption.rates is not None
    last, following = resumption.rates
    assert last < 0.6 * 2e-5  # half way down the cosine
    assert following > 0.95 * 2e-5  # hardly begun
    train._show_resumption(resumption, Console(width=200))
    said = capsys.readouterr().out
    assert f"learning rate {last:.3g} at step 20, {following:.3g} at the next" in said
    assert "400 steps now" in said


def test_a_config_edited_by_hand_is_a_change_too(run: RunDirectory) -> None:
    run.config.write_text(run.config.read_text().replace("seed: 0", "seed: 5"))
    with pytest.raises(UserError, match="seed: 0 when the run was saved, now 5"):
        decided(run)


def test_another_batch_counts_from_where_the_run_is(run: RunDirectory, decision: Decision) -> None:
    plan = decided(run, "batch.sequences=8", allow_changes=True).decision.plan
    assert (plan.num_packs, plan.num_steps) == (80 + 20 * 8, 40)
    in_epochs = decision.config.model_copy(update={"steps": None})
    plan = continued(replace(decision.plan, packs_per_step=8, num_packs=160), in_epochs, Cursor(20, 80, 20), 4)
    assert (plan.num_packs, plan.num_steps) == (160, 30)


def test_other_rows_are_refused(run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(60, seed=1))
    with pytest.raises(UserError, match=r"other data than the run was trained on: key (.|\n)*--allow-changes"):
        decided(run)
    train._show_resumption(decided(run, allow_changes=True), Console(width=200))
    assert "changed  data: key " in capsys.readouterr().out


def test_a_lost_cache_is_made_again_and_is_the_same(run: RunDirectory, tmp_path: Path, decision: Decision) -> None:
    (tmp_path / "cache").rename(tmp_path / "gone")
    assert the_same(decided(run).decision.plan, decision.plan)


def test_a_moved_run_goes_on_where_it_is(run: RunDirectory, tmp_path: Path) -> None:
    moved = run.path.rename(tmp_path / "elsewhere")
    resumption = decided(RunDirectory(moved))
    assert resumption.decision.config.output == str(moved)
    assert resumption.changes == ()


def test_another_output_is_refused(run: RunDirectory) -> None:
    with pytest.raises(UserError, match="output: another output"):
        decided(run, "output=elsewhere")


def test_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run"):
        decided(RunDirectory(tmp_path / "nothing"))


def test_an_earlier_checkpoint_only_if_asked(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    resumption = decided(run, step=10)
    checkpoint_path(run.checkpoints, 30).mkdir()
    train._show_cleared(run, begin_again(run, resumption), Console(width=200))
    assert read_json(run.resume) == {"checkpoint": "step-00000010"}
    assert run.checkpoint_to_resume() == checkpoint_path(run.checkpoints, 10)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "aside-1-step-00000020",
        "step-00000010",
        "step-00000030",
    ]
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == list(range(1, 11))
    said = capsys.readouterr().out
    for expected in ("step-00000030 was interrupted", "aside-1-step-00000020", "14 records"):
        assert expected in said


@pytest.fixture
def finished(run: RunDirectory, decision: Decision, world: World) -> RunDirectory:
    """A run whose last step is saved, and whose launcher was killed before the export."""
    saver = Saver(run.checkpoints, 9, world)
    facts = {**decision.plan.facts(), "config": as_json(decision.config)}
    saver.save(Cursor(40, 160, 40), {"w": torch.zeros(3)}, {}, facts, wait=True)
    memory = {"host_peak": 1e6, "device_peak": 0}
    records = [{"step": step, "loss": 1.0, "step_seconds": 0.1, "memory": memory} for step in range(1, 41)]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def exported(run: RunDirectory, directory: Path, *_: object) -> list[str]:
    """As ``export_checkpoint``, of no tensors."""
    (name,) = {path.name for path in run.checkpoints.glob("step-*")} & {"step-00000040"}
    directory.mkdir()
    (directory / "checksums.json").write_text(json.dumps({"checkpoint": name, "files": {}}))
    return []


def resume(run: RunDirectory) -> None:
    train._resume(run, [], QUIET, step=None, allow_changes=False, force=False, until="end")


def test_a_finished_run_is_exported_again_unless_its_export_is_that_of_its_end(
    finished: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[Path] = []

    def export(run: RunDirectory, directory: Path, *rest: object) -> list[str]:
        times.append(directory)
        return exported(run, directory, *rest)

    monkeypatch.setattr("tonnage.decide.exports.export_checkpoint", export)
    finished.export.mkdir()  # of when it was stopped by Ctrl-C
    (finished.export / "checksums.json").write_text('{"checkpoint": "step-00000020", "files": {}}')
    resume(finished)
    assert read_json(finished.export / "checksums.json")["checkpoint"] == "step-00000040"
    assert (finished.path / "outcome.json").exists()
    assert len(times) == 1
    finished.report.unlink()  # by the launcher that exported it, and was killed before
    resume(finished)
    assert finished.report.exists()
    (finished.export / "checksums.json").write_text('{"files": {}}')  # of an older version: it does not say
    resume(finished)
    assert len(times) == 1


def test_nothing_stays_of_a_launch_that_was_killed_at_the_end(
    finished: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.decide.exports.export_checkpoint", exported)
    (finished.checkpoints / "step-00000010" / "COMPLETE").unlink()  # in the middle of being removed
    (finished.path / ".export.old").mkdir()
    finished.workers.mkdir(exist_ok=True)
    (finished.workers / "rank-1.error.json").touch()  # of a worker that lost its peer a moment before it was killed
    resume(finished)
    resume(finished)
    assert sorted(path.name for path in finished.checkpoints.iterdir()) == ["step-00000020", "step-00000040"]
    assert not list(finished.path.glob(".*"))
    assert not list(finished.workers.iterdir())
    assert finished.export.is_dir()


def test_an_export_takes_the_place_of_another_whenever_it_is_interrupted(
    finished: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.decide.exports.export_checkpoint", exported)
    left, renamed = 0, Path.rename

    def killed_later(path: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return renamed(path, target)

    for before in range(2):
        finished.export.mkdir(exist_ok=True)
        (finished.export / "checksums.json").write_text('{"checkpoint": "step-00000020", "files": {}}')
        left = before
        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", killed_later)
            with pytest.raises(KeyboardInterrupt):
                export_run(finished)
        assert not finished.export.exists() or (finished.export / "checksums.json").exists()
        resume(finished)
        assert read_json(finished.export / "checksums.json")["checkpoint"] == "step-00000040"
        assert not list(finished.path.glob(".*"))
