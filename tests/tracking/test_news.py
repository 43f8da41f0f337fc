"""What is new in the files of a run, and from where on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.errors import UserError
from tonnage.tracking import news
from tonnage.tracking.news import Note, new_answers, new_numbers
from tracking.fake_runs import fake_run, go_on_from, take_steps


def test_numbers_by_step_and_answers_by_evaluation(tmp_path: Path) -> None:
    run = fake_run(tmp_path)
    assert new_numbers(run, 0) == ([], 0)
    take_steps(run, 1, 2)
    found, after = new_numbers(run, 0)
    assert [one.step for one in found] == [1, 2, 2]
    assert found[0].values == {"loss": 8.0, "skipped": 0.0, "memory/host_peak": 2.0**30}
    assert found[2].values == {"eval_loss": 0.5}
    assert after == run.metrics.stat().st_size
    take_steps(run, 3, 3)
    assert [one.step for one in new_numbers(run, after)[0]] == [3, 3]
    answered, _ = new_answers(run, 0)
    assert [(one.step, [sample.number for sample in one.samples]) for one in answered] == [(2, [1, 2]), (3, [1, 2])]


def test_half_a_line_waits_and_a_long_one_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fake_run(tmp_path)
    run.metrics.write_bytes(b'{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    found, after = new_numbers(run, 0)
    assert ([one.step for one in found], after) == ([1], 25)
    assert new_numbers(run, after) == ([], after)
    monkeypatch.setattr(news, "TOGETHER_BYTES", 10)
    found, after = new_numbers(run, 0)
    assert ([one.step for one in found], after) == ([1], 25)


def test_a_run_that_goes_on_sends_what_was_not_sent_and_nothing_twice(tmp_path: Path) -> None:
    run = fake_run(tmp_path)
    take_steps(run, 1, 4)
    run.tracker_note("wandb").parent.mkdir()
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    everything, two = sum(map(len, lines)), sum(map(len, lines[:2]))
    for sent, unsent, first in ((everything, 0, 3), (two, 3, 3), (0, 5, 1)):
        run.metrics.write_bytes(b"".join(lines))
        Note("theirs", metrics=sent).write(run, "wandb")
        assert Note.of(run, "wandb").unsent(run, samples=False) == unsent
        go_on_from(run, 2)
        note = Note.of(run, "wandb").within(run)
        take_steps(run, 3, 3)
        assert new_numbers(run, note.metrics)[0][0].step == first
        assert note.id == "theirs"


def test_a_note_that_is_none_is_refused(tmp_path: Path) -> None:
    run = fake_run(tmp_path)
    assert Note.of(run, "wandb") == Note()
    run.tracker_note("wandb").parent.mkdir()
    run.tracker_note("wandb").write_text('{"id": "a", "metrics": -1}')
    with pytest.raises(UserError, match="metrics"):
        Note.of(run, "wandb")
