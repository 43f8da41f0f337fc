"""What is trained is saved before the last evaluation."""

from __future__ import annotations

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


def test_the_last_evaluation_cannot_lose_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(tmp_path / "validation.jsonl", alpaca_rows(30))
    path = write_config(tmp_path, 60, launch={"workers": 1, "threads": 1}, output=str(tmp_path / "run"), steps=3)
    decision = decide_on(read_config(str(path), [f"data.validation={rows}"]), fresh_output=True)
    run = RunDirectory(decision.config.output)
    write_run(run, decision)
    run.clear_traces()
    evaluations = list[int]()

    def breaks(*arguments: Any) -> dict[str, Any]:
        evaluations.append(len(evaluations))
        if len(evaluations) == 2:
            raise ValueError("a scorer of one's own, on an answer that only a trained model gives")
        return judged(*arguments)

    monkeypatch.setattr(loop, "judged", breaks)
    recorder, phases = Recorder(run, rank=0), Phases(PositionFile(run.worker_position(0)))
    with join_world(device_type="cpu") as world:
        phases.device = world.device
        job = assemble(WorkerSetting(decision.config, decision.plan, world, recorder.log, phases))
        between_steps = between_steps_of(run, decision.config, decision.plan)
        with pytest.raises(ValueError, match="a scorer of one's own"):
            loop.train(job, between_steps, recorder, phases, lambda: False)
    recorder.close()
    assert [path.name for path in complete_checkpoints(run.checkpoints)] == ["step-00000003"]
