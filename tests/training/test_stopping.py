"""A run around its evaluations: a stop breaks them off, and what is trained is saved before the last."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny import alpaca_rows, write_config, write_rows
from tonnage.checkpoint.save import complete_checkpoints
from tonnage.config import read_config
from tonnage.decide.decision import decide_on
from tonnage.decide.written import write_run
from tonnage.parallel.world import join_world
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.training import loop
from tonnage.training.assemble import assemble, between_steps_of
from tonnage.training.judging import judged
from tonnage.training.memory import Phases
from tonnage.training.metrics import Recorder
from tonnage.training.setting import WorkerSetting

ROWS = 30
"""Of validation: an evaluation has more than two steps."""


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., tuple[bool, RunDirectory]]:
    """Trains in this process; whether the run went to its end, and its directory."""
    rows = write_rows(tmp_path / "validation.jsonl", alpaca_rows(ROWS))
    path = write_config(tmp_path, 60, launch={"workers": 1, "threads": 1}, output=str(tmp_path / "run"))

    def run(stops: Callable[[], bool], **keys: Any) -> tuple[bool, RunDirectory]:
        words = [f"data.validation={rows}", "data.pack=false", *(f"{key}={value}" for key, value in keys.items())]
        decision = decide_on(read_config(str(path), words), fresh_output=True)
        directory = RunDirectory(decision.config.output)
        write_run(directory, decision)
        directory.clear_traces()
        recorder, phases = Recorder(directory, rank=0), Phases(PositionFile(directory.worker_position(0)))
        with join_world(device_type="cpu") as world:
            phases.device = world.device
            job = assemble(WorkerSetting(decision.config, decision.plan, world, recorder.log, phases))
            between = between_steps_of(directory, decision.config, decision.plan)
            try:
                return loop.train(job, between, recorder, phases, stops), directory
            finally:
                recorder.close()

    return run


def after(calls: int) -> Callable[[], bool]:
    """A stop that comes with a call, and stays."""
    made = 0

    def stops() -> bool:
        nonlocal made
        made += 1
        return made > calls

    return stops


def steps_of(run: RunDirectory, figure: str) -> list[int]:
    """The steps of which a figure is written down."""
    return [record["step"] for record in run.read_metrics() if figure in record]


def test_a_stop_breaks_an_evaluation_off_and_saves(
    train: Callable[..., tuple[bool, RunDirectory]], tmp_path: Path
) -> None:
    keys = {"steps": 6, "evaluate.every": 2}
    calls = itertools.count()
    finished, run = train(lambda: next(calls) < 0, **keys, output=f"{tmp_path}/whole")
    in_evaluation = (next(calls) - 6) // 4  # of the four evaluations, before the first step among them
    assert (finished, steps_of(run, "eval_loss")) == (True, [0, 2, 4, 6])
    assert in_evaluation > 2

    finished, run = train(after(in_evaluation + 2 + 1), **keys)  # two steps, and in the second batch of the evaluation
    assert (finished, steps_of(run, "loss"), steps_of(run, "eval_loss")) == (False, [1, 2], [0])
    assert [path.name for path in complete_checkpoints(run.checkpoints)] == ["step-00000002"]
    assert "stopping in the evaluation of step 2" in run.log.read_text()


def test_a_stop_in_the_first_evaluation_trains_nothing(train: Callable[..., tuple[bool, RunDirectory]]) -> None:
    finished, run = train(after(1), steps=6)
    assert (finished, steps_of(run, "loss"), steps_of(run, "eval_loss")) == (False, [], [])
    assert not complete_checkpoints(run.checkpoints)


def test_the_last_evaluation_cannot_lose_what_is_trained(
    train: Callable[..., tuple[bool, RunDirectory]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluations = list[int]()

    def breaks(*arguments: Any) -> dict[str, Any]:
        evaluations.append(len(evaluations))
        if len(evaluations) == 2:
            raise ValueError("a scorer of one's own, on an answer that only a trained model gives")
        return judged(*arguments)

    monkeypatch.setattr(loop, "judged", breaks)
    with pytest.raises(ValueError, match="a scorer of one's own"):
        train(lambda: False, steps=3)
    assert [path.name for path in complete_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000003"]
