"""A loss of one's own in workers: the function that a module has, tried before, and the same when a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forked import tonnage, work
from tiny import alpaca_rows, llama_config, write_model, write_rows

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    write_model(folder / "model", llama_config(initializer_range=0.3))
    write_rows(folder / "rows.jsonl", alpaca_rows(80))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(work("api.losing", (1, [str(folder)])).splitlines()[-1])
    return said


@pytest.mark.parametrize("layout", ["1", "2", "tensor", "pipeline"])
def test_cross_entropy_of_ones_own_is_ours(layout: str, found: dict[str, Any]) -> None:
    ours, plain = found[f"ours-{layout}"], found[f"plain-{layout}"]
    assert len(plain[0]) == 4
    assert len(plain[2]) == 3  # before the first step, and twice on the way
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_columns_of_the_rows_count_and_workers_do_not(found: dict[str, Any]) -> None:
    assert abs(found["scored-1"][0][0] - found["plain-1"][0][0]) > 0.1
    for one, other in zip(found["scored-1"], found["scored-2"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_run_keeps_which_function_its_loss_is(found: dict[str, Any], folder: Path) -> None:
    kept = found["kept"]
    assert (kept["module"], kept["name"], kept["folder"]) == ("losses_of_one", "ours", str(folder / "code"))
    assert len(kept["source"]) == 32
    assert not found["none"]
    assert "the loss is losses_of_one.ours" in (folder / "ours-1" / "log.txt").read_text()


def test_what_cannot_be_trained_is_refused_before_anything_is_written(found: dict[str, Any]) -> None:
    said = found["said"]
    assert "for 2 rows together, up to this one" in said["mean"]
    assert "rows-in-memory.jsonl:" in said["mean"]
    assert not found["left"]
    assert "which workers cannot import" in said["lambda"]
    assert "takes score, and the rows carry nothing" in said["column"]
    assert "no 'score', which data.carry names" in said["rows"]


def test_a_run_goes_on_with_its_own_loss_alone(found: dict[str, Any], folder: Path) -> None:
    said = found["said"]
    assert "the loss of the run is losses_of_one.ours, and none is given" in said["nothing"]
    assert "losses_of_one.mean, and the run began with losses_of_one.ours" in said["other"]
    assert "the loss of the run is cross-entropy, and losses_of_one.ours" in said["plain"]
    assert found["resumed"] == 2
    assert "another source of losses_of_one.ours than when the run began" in said["source"]
    from_a_command_line = tonnage("train", "--resume", "stopped", cwd=folder)
    assert from_a_command_line.returncode == 2
    assert "none is given" in from_a_command_line.stderr
