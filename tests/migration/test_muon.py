"""Muon of Axolotl and LLaMA-Factory: where it is the rule that is here, and where it is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tonnage.config import read_config
from tonnage.migration import Import, import_files

A: dict[str, Any] = {
    "base_model": "Qwen/Qwen2.5-0.5B",
    "datasets": [{"path": "rows.jsonl", "type": "alpaca"}],
    "optimizer": "muon",
    "learning_rate": 0.02,
    "weight_decay": 0.01,
    "micro_batch_size": 4,
    "output_dir": "out",
}
F: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "finetuning_type": "full",
    "dataset": "a/b",
    "dataset_dir": "ONLINE",
    "template": "qwen3_nothink",
    "use_muon": True,
    "optim": "adamw_torch",
    "learning_rate": 1e-5,
    "output_dir": "out",
}
V: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "train_dataset": "a/b",
    "optim_config": {"name": "muon"},
    "micro_batch_size": 1,
    "max_steps": 10,
    "learning_rate": 1e-5,
    "output_dir": "out",
}


def imported(folder: Path, keys: dict[str, Any], workers: int | None = None) -> Import:
    (folder / "given.yaml").write_text(yaml.safe_dump(keys))
    return import_files([folder / "given.yaml"], workers=workers)


def lost(account: Import) -> set[str]:
    return {entry.setting.name for entry in account.lost}


def optimizer(account: Import, folder: Path) -> dict[str, Any]:
    """The optimizer of an import that lost nothing."""
    assert account.is_whole
    assert not account.needs
    (folder / "config.yaml").write_text(account.text)
    read_config(folder / "config.yaml", (), check_files=False)
    found: dict[str, Any] = account.tree["optimizer"]
    return found


def test_axolotl_on_one_worker(tmp_path: Path) -> None:
    account = imported(tmp_path, A)
    made = optimizer(account, tmp_path)
    assert (made["kind"], made["lr"], made["weight_decay"], made["betas"]) == ("muon", 0.02, 0.01, [0.95, 0.95])
    assert "adjust_lr" not in made  # that of AdamW's size is ours too
    assert any("leaves norms and biases" in note for note in account.notes)


@pytest.mark.parametrize(
    ("keys", "betas"),
    [
        ({"adam_beta1": 0.8, "adam_beta2": 0.9}, [0.8, 0.9]),
        ({"adam_beta2": 0.9}, [0.95, 0.95]),
        ({"optimizer": "Muon"}, [0.95, 0.95]),
        ({"optimizer": "adamw_torch", "adam_beta2": 0.95}, [0.9, 0.95]),
    ],
)
def test_betas_beside_axolotls_muon(keys: dict[str, Any], betas: list[float], tmp_path: Path) -> None:
    assert optimizer(imported(tmp_path, A | keys), tmp_path)["betas"] == betas


def test_axolotls_muon_on_several_workers_is_another(tmp_path: Path) -> None:
    account = imported(tmp_path, A, workers=4)
    assert lost(account) == {"optimizer"}
    assert "kind" not in account.tree["optimizer"]
    assert "no Nesterov" in next(entry.note for entry in account.lost)


def test_llama_factory(tmp_path: Path) -> None:
    made = optimizer(imported(tmp_path, F | {"weight_decay": 0.1, "adam_beta2": 0.95}), tmp_path)
    assert made["kind"] == "muon"
    assert (made["lr"], made["weight_decay"], made["betas"]) == (1e-5, 0.1, [0.9, 0.95])
    assert "kind" not in optimizer(imported(tmp_path, F | {"use_muon": False}), tmp_path)
    assert lost(imported(tmp_path, F | {"use_galore": True})) == {"use_galore"}


def test_adapters_have_no_muon(tmp_path: Path) -> None:
    assert lost(imported(tmp_path, F | {"finetuning_type": "lora"})) == {"use_muon"}
    assert lost(imported(tmp_path, A | {"adapter": "lora", "lora_r": 8, "lora_alpha": 16})) == {"optimizer"}


def test_version_1_has_a_rate_for_muon_beside_its_own(tmp_path: Path) -> None:
    made = optimizer(imported(tmp_path, V), tmp_path)
    usual = {"kind": "muon", "lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "momentum": 0.95}
    assert made.items() >= usual.items()
    settings = {"lr": 0.01, "wd": 0, "adamw_betas": [0.8, 0.9], "adamw_eps": 1e-6, "momentum": 0.9, "nesterov": True}
    made = optimizer(imported(tmp_path, V | {"optim_config": {"name": "muon", "ns_steps": 5, **settings}}), tmp_path)
    told = {"lr": 0.01, "weight_decay": 0, "betas": [0.8, 0.9], "eps": 1e-6, "momentum": 0.9}
    assert made.items() >= told.items()
    made = optimizer(imported(tmp_path, V | {"optim_config": {"name": "adamw", "lr": 0.01}}), tmp_path)
    assert (made["lr"], "kind" in made) == (1e-5, False)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"optim_config": {"name": "muon", "nesterov": False}}, "optim_config.nesterov"),
        ({"optim_config": {"name": "muon", "ns_steps": 6}}, "optim_config.ns_steps"),
        ({"optim_config": {"name": "lion"}}, "optim_config.name"),
        ({"peft_config": {"name": "lora", "r": 8, "lora_alpha": 16}}, "optim_config.name"),
    ],
)
def test_what_version_1_asks_of_muon_and_is_not_there(keys: dict[str, Any], key: str, tmp_path: Path) -> None:
    assert lost(imported(tmp_path, V | keys)) == {key}
