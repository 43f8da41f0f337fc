"""Configurations of other programs for preferences, and what became of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tonnage.config import read_config
from tonnage.config.schema import Config
from tonnage.migration import Import, import_files

WORDS = "--model_name_or_path a/b --dataset_name c/d --output_dir out --num_processes 1"
AXOLOTL: dict[str, Any] = {
    "base_model": "a/b",
    "datasets": [{"path": "c/d", "type": "chatml.intel"}],
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "sequence_len": 1000,
    "learning_rate": 1e-5,
    "output_dir": "out",
}
FACTORY: dict[str, Any] = {
    "stage": "dpo",
    "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507",
    "finetuning_type": "full",
    "dataset": "rows",
    "template": "qwen3_nothink",
    "cutoff_len": 1000,
    "output_dir": "out",
}
RANKING = {"rows": {"hf_hub_url": "c/d", "ranking": True}}


def trl(words: str, command: str = "dpo") -> Import:
    return import_files([f"trl {command} {WORDS} {words}"])


def axolotl(folder: Path, **keys: Any) -> Import:
    (folder / "axolotl.yaml").write_text(yaml.safe_dump({**AXOLOTL, **keys}))
    return import_files([folder / "axolotl.yaml"])


def factory(folder: Path, info: dict[str, Any] | None = None, **keys: Any) -> Import:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info or RANKING))
    (folder / "factory.yaml").write_text(yaml.safe_dump({**FACTORY, **keys}))
    return import_files([folder / "factory.yaml"])


def lost(account: Import) -> dict[str, str]:
    return {entry.setting.name: entry.note for entry in account.lost}


def whole(account: Import, folder: Path) -> Config:
    """The config of an import of which nothing is lost or missing."""
    assert account.is_whole, lost(account)
    assert not account.needs
    (folder / "config.yaml").write_text(account.text)
    return read_config(folder / "config.yaml", check_files=False)
