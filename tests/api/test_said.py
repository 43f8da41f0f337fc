"""Keyword arguments mean what the same keys mean in a file, and are refused in the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tonnage
from tiny import write_config
from tonnage.api.said import words_of
from tonnage.config import Adapter, Batch, as_overrides, read_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("said"), 20, optimizer={"lr": 1e-3, "clip": 0.5}, steps=10)


def test_a_dictionary_changes_what_it_names(config: Path) -> None:
    said = read_config(*words_of(config, None, {"optimizer": {"lr": np.float64(5e-4)}, "epochs": 2, "track": ()}))
    assert (said.optimizer.lr, said.optimizer.clip) == (5e-4, 0.5)
    assert (said.steps, said.epochs, said.track) == (None, 2, ())
    assert said == read_config(config, ["optimizer.lr=5e-4", "epochs=2", "track=[]"])
    assert read_config(*words_of(config, None, {"batch": {"tokens": 512}})).batch == Batch(tokens=512)
    assert read_config(*words_of(config, None, {"optimizer.lr": 2e-4})).optimizer.lr == 2e-4


def test_an_empty_dictionary_changes_nothing(config: Path) -> None:
    empty: dict[str, Any] = {"optimizer": {}, "memory": {"budget": {}}, "evaluate": {}, "launch": {}}
    changed = ["memory.budget.device=2GB", "launch.with=slurm"]
    assert read_config(config, [*changed, *words_of(config, None, empty)[1]]) == read_config(config, changed)
    assert read_config(*words_of(config, {}, {})) == read_config(config)
    assert read_config(*words_of(config, None, {"adapter": {}})).adapter == Adapter()


def test_an_adapter_takes_the_place_of_none(config: Path) -> None:
    said = read_config(*words_of(config, None, {"adapter": {"rank": 4, "targets": "all-linear"}}))
    assert not isinstance(said.adapter, str)
    assert said.adapter.rank == 4
    assert read_config(config, ["adapter=none", "adapter.rank=4"]).adapter == said.adapter


def test_mappings_of_ones_own_are_taken_whole(config: Path) -> None:
    columns = {"instruction": "what.is", "output": 'the "answer"\n'}
    data = {"train": {"path": str(config.parent / "rows.jsonl"), "columns": columns}}
    said = read_config(*words_of(config, data, {}))
    assert said.data.train[0].columns == columns
    assert said.data.max_length == 128
    several = config.with_name("several.yaml")
    several.write_text(config.read_text().replace('"train":', '"train": ["a.jsonl", "b.jsonl"], "validation":'))
    (source,) = read_config(*words_of(several, data, {})).data.train
    assert source.columns == columns


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"optimzer": {"lr": "secret"}}, "unknown key optimzer"),
        ({"steps": "many"}, "steps is 'many'"),
        ({"steps": 3, "epochs": 1}, "steps"),
        ({"optimizer": {"betas": {1, 2}}}, "optimizer.betas holds a set"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr holds nan"),
        ({"launch": {"runtime_env": {1: 2}}}, "launch.runtime_env holds a dictionary with the key 1"),
    ],
)
def test_what_is_wrong_is_refused(config: Path, keys: dict[str, Any], found: str) -> None:
    with pytest.raises(tonnage.UserError) as caught:
        tonnage.train(config, **keys)
    assert found in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_cannot_be_begun_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tonnage.UserError, match="a dict as the first argument"):
        tonnage.plan({"model": "x"})  # type: ignore[arg-type]
    with pytest.raises(tonnage.UserError, match="two models"):
        tonnage.plan("x", model="y")
    monkeypatch.setenv("PATH", str(config.parent))
    with pytest.raises(tonnage.UserError, match="no sbatch, no scontrol, no scancel on this machine"):
        tonnage.start(config, launch={"with": "slurm"})
    with pytest.raises(tonnage.UserError, match="a loss of one's own, and"):
        tonnage.start(config, loss=lambda logprobs, weights: -logprobs.sum(), launch={"with": "ray"})
    with pytest.raises(tonnage.UserError, match="no run"):
        tonnage.open_run(config.parent / "nothing")


def test_problems_are_shown_in_a_notebook(config: Path) -> None:
    with pytest.raises(tonnage.UserError) as caught:
        tonnage.plan(config, steps="<b>")
    assert "&lt;b&gt;" in caught.value._repr_html_()
    assert caught.value._repr_markdown_().startswith("* ")


def test_values_are_written_as_yaml_reads_them(tmp_path: Path) -> None:
    assert as_overrides({"output": tmp_path, "seed": np.int64(3), "compile": None}) == [
        f'output="{tmp_path}"',
        "seed=3",
        "compile=null",
    ]
