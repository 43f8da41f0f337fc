"""What trackers are told of a config and the log of an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tonnage.config import Config
from tonnage.config.keys import PRIVATE_KEYS
from tonnage.tracking.told import told_config, told_error


def told(**keys: Any) -> dict[str, Any]:
    return told_config(Config.model_validate({"model": "owner/small", "data": {"train": "owner/rows"}, **keys}))


def test_paths_are_cut_to_their_last_part_and_hub_ids_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/tiny").mkdir(parents=True)
    whole = told()
    assert (whole["model"], whole["data.train.0.path"]) == ("owner/small", "owner/rows")
    cut = told(
        model="models/tiny",
        revision="feature/longer",
        data={
            "train": [{"path": "/home/me/rows/"}, {"path": "mine/*.jsonl"}, {"path": "data/rows.jsonl.gz"}],
            "template": "../secret project/chat.jinja",
            "cache": "~/cache/of/mine",
        },
        memory={"offload_dirs": ["/scratch/me/a", "/scratch/me/b"]},
        evaluate={"prompts": "./asked/of/it.jsonl"},
        output="runs/customer/first",
    )
    assert cut["model"] == "tiny"
    assert cut["revision"] == "feature/longer"
    assert [cut[f"data.train.{number}.path"] for number in range(3)] == ["rows", "*.jsonl", "rows.jsonl.gz"]
    assert (cut["data.template"], cut["data.cache"]) == ("chat.jinja", "mine")
    assert cut["memory.offload_dirs"] == ["a", "b"]
    assert (cut["evaluate.prompts"], cut["output"]) == ("it.jsonl", "first")


def test_what_may_hold_secrets_of_a_cluster_is_left_out() -> None:
    ray = told(launch={"with": "ray", "runtime_env": {"env_vars": {"A": "hidden"}}})
    slurm = told(launch={"with": "slurm", "setup": ["export A=hidden"], "options": ["--comment=hidden"]})
    assert ray["launch.with"] == "ray"
    assert slurm["launch.with"] == "slurm"
    assert "hidden" not in f"{ray}{slurm}"
    assert not [key for key in [*ray, *slurm] if key.startswith(PRIVATE_KEYS)]


def test_an_error_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdef012345")
    text = "no abcdef012345 at http://me:pass@host:5000/x?write_token=fedcba&page=2 \x1b[31m\nand more"
    assert told_error(ValueError(text)) == (
        "ValueError: no *** at http://***@host:5000/x?write_token=***&page=2 \\x1b[31m"
    )
    assert told_error(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_a_template_that_is_written_out_stays_at_home() -> None:
    template = "{% for m in messages %}{{ 'Acme/secret ' + m['content'] + eos_token }}{% endfor %}"
    told = told_config(
        Config.model_validate({"model": "owner/small", "data": {"train": "owner/rows", "template": template}})
    )
    assert told["data.template"] == "written out"
    assert "Acme" not in str(told)
