"""What a run that goes on does not decide again."""

from __future__ import annotations

from pathlib import Path

import pytest

from forked import train
from tiny import write_config
from tonnage.config import read_config
from tonnage.decide.decision import decide
from tonnage.decide.resumption import decide_resumption
from tonnage.decide.written import write_run
from tonnage.rundir.directory import RunDirectory


@pytest.mark.slow
def test_what_is_trained_is_not_chosen_again(tmp_path: Path) -> None:
    alone = {"launch": {"workers": 1, "threads": 1}, "adapter": {"rank": 4}, "steps": 2}
    path = str(write_config(tmp_path, 40, **alone))
    run = RunDirectory(tmp_path / "run")
    write_run(run, decide(path, [f"output={run.path}"]))
    train((1, [run]))
    kept = read_config(run.config)
    resumption = decide_resumption(run, ["adapter=auto"])
    assert resumption.decision.config.adapter == kept.adapter != "none"
    assert resumption.decision.config.optimizer == kept.optimizer
    assert not [change for change in resumption.changes if change.key == "adapter"]
    assert "adapter" not in resumption.decision.plan.reasons
