"""What the pages say of imports is so: each thing that is not there is refused by name, each word has its key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tonnage.config.keys import all_keys
from tonnage.migration import Import, import_files
from tonnage.migration.keys import ACCELERATE, ARGUMENTS, AXOLOTL, DEEPSPEED, LLAMA_FACTORY, TORCHTUNE, Table
from tonnage.migration.programs import PROGRAMS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "coming-from.md").read_text()
A: dict[str, Any] = {"base_model": "a/b", "datasets": [{"path": "rows.jsonl", "type": "chat_template"}]}
F: dict[str, Any] = {"model_name_or_path": "a/b", "finetuning_type": "full", "learning_rate": 1e-5, "output_dir": "out"}
T: dict[str, Any] = {"model_name_or_path": "a/b", "dataset_name": "c/d", "learning_rate": 1e-5, "output_dir": "out"}
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
NOT_THERE: dict[str, tuple[dict[str, Any], ...]] = {
    "rewards": (T | {"reward_funcs": "f"},),
    "grpo": (A | {"rl": "grpo"}, T | {"trl": "grpo"}),
    "ppo": (F | {"stage": "ppo"}, T | {"trl": "ppo"}),
    "reward models of steps": (A | {"process_reward_model": True}, T | {"trl": "prm"}),
    "sounds": (F | {"dataset": "rows", "template": "llama3"}, A | LORA | {"processor_type": "VoxtralProcessor"}),
    "videos": (A | LORA | {"processor_type": "AutoProcessor", "datasets": [{"path": "a/videos"}]},),
    "distillation": (A | {"kd_trainer": True}, T | {"trl": "distillation"}),
    "diffusion": (A | {"diffusion": {"noise_schedule": "linear"}},),
    "optimizers besides adamw or muon": (A | {"optimizer": "dion"}, F | {"optim": "adafactor"}, T | {"optim": "muon"}),
    "relora": (A | LORA | {"relora": True},),
    "galore": (F | {"use_galore": True}, A | {"optimizer": "galore_adamw"}, T | {"optim": "galore_adamw"}),
    "lisa": (A | {"lisa_n_layers": 4},),
    "badam": (F | {"use_badam": True},),
    "neftune": (A | {"neftune_noise_alpha": 5}, F | {"neftune_noise_alpha": 5}, T | {"neftune_noise_alpha": 5}),
    "aqlm": (F | {"model_name_or_path": "a/b-AQLM-2Bit-1x16"},),
    "bitsandbytes": (A | {"base_model": "a/b-bnb-4bit"}, T | {"model_name_or_path": "a/b-bnb-4bit"}),
    "streams that are read while training": (F | {"streaming": True}, T | {"dataset_streaming": True}),
}
"""Each item of the section as it stands there, in small letters, and configurations that ask for it."""


def imported(folder: Path, keys: dict[str, Any]) -> Import:
    (folder / "given.yaml").write_text(yaml.safe_dump(keys))
    return import_files([folder / "given.yaml"])


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def items_not_there() -> set[str]:
    """The items of the section's first sentence, without links and without what stands around them."""
    sentence = " ".join(section("What is not there").split()).partition(". Each is refused")[0]
    sentence = sentence.replace("; GRPO as a loop of your own is in [python.md](python.md)", "")
    sentence = re.sub(r"models whose weights are quantised already", "", sentence)
    return {item.strip().lower() for item in re.split(r"[,;()]| and ", sentence) if item.strip()}


def test_each_thing_that_the_page_says_is_not_there_is_tried_here() -> None:
    assert items_not_there() == set(NOT_THERE)


@pytest.mark.parametrize("item", NOT_THERE)
def test_what_is_not_there_is_refused_by_name(item: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    info = '{"rows": {"file_name": "a.json", "formatting": "sharegpt", "columns": {"audios": "audios"}}}'
    (tmp_path / "data" / "dataset_info.json").write_text(info)
    usual = {*A, *F, *T, *LORA} - {"model_name_or_path", "base_model", "finetuning_type"}
    for keys in NOT_THERE[item]:
        asked = {name for name in keys if name not in usual} | ({"dataset"} & set(keys))
        lost = {entry.setting.name.partition(".")[0] for entry in imported(tmp_path, keys).lost}
        assert lost & asked, (keys, lost)
        assert lost <= asked


TABLES: dict[str, tuple[Table, ...]] = {
    "Axolotl": (AXOLOTL,),
    "LLaMA-Factory": (LLAMA_FACTORY,),
    "TRL, Trainer": (ARGUMENTS, ACCELERATE),
    "DeepSpeed": (DEEPSPEED,),
}
IN_CODE = re.compile(r"`([a-z0-9_*.]+)")
"""A key at the beginning of what is written as code."""
ELSEWHERE = {
    "split",
    "field_*",
    "roles",
    "formatting",
    "tags",
    "columns",
    "type",
    "message_property_mappings",
    "roles_to_train",
}
"""Keys of one data set of several, which have no table."""
NO_KEYS = {"dataset_info.json", "accelerate", "torchrun"}


def is_mapped(name: str, tables: tuple[Table, ...]) -> bool:
    """Whether a key, a section, or all that begins with what stands before a ``*``, becomes a key of ours."""
    begins = name.removesuffix("*")
    keys = [key for table in tables for key in table.keys if f".{name}." in f".{key.name}."]
    keys += [key for table in tables for key in table.keys if begins != name and key.name.startswith(begins)]
    return any(key.verdict == "mapped" for key in keys)


def test_each_word_of_the_table_of_words_has_the_keys_beside_it() -> None:
    rows = [line.strip("| \n").split("|") for line in section("Words").splitlines() if line.startswith("| `")]
    assert len(rows) > 25
    for cells in rows:
        for program, cell in zip(TABLES, cells[1:], strict=False):
            for name in set(IN_CODE.findall(cell)) - ELSEWHERE - NO_KEYS:
                assert is_mapped(name, TABLES[program]) or name == "deepspeed", (program, name)


def test_what_the_page_says_comes_over_does(tmp_path: Path) -> None:
    """Early stopping, with validation rows and evaluations between steps."""
    stopping = {"val_set_size": 0.1, "eval_steps": 10, "early_stopping_patience": 3, "micro_batch_size": 1}
    found = imported(tmp_path, A | stopping | {"learning_rate": 1e-5})
    assert (found.tree["evaluate"]["patience"], found.tree["checkpoint"]["best"]) == (3, "eval_loss")
    assert not found.lost
    assert "`evaluate.patience`" in PAGE
    assert "not carried" not in PAGE


def test_imports_of_deepspeed_write_the_tier_that_the_page_on_zero_says(tmp_path: Path) -> None:
    page = (DOCS / "zero.md").read_text()
    assert "An import writes the first key alone" in page
    keys = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "train_batch_size": 8}
    memory = imported(tmp_path, keys).tree["memory"]
    assert memory["optimizer_tier"] == "host"
    assert "gradient_tier" not in memory


@pytest.mark.parametrize("keys", [A, F, T], ids=["Axolotl", "LLaMA-Factory", "TRL"])
def test_a_config_says_which_version_s_defaults_it_has(keys: dict[str, Any], tmp_path: Path) -> None:
    found = imported(tmp_path, keys)
    page = (DOCS / "importing.md").read_text().partition("## Versions and defaults\n\n")[2].partition("\n")[0]
    (program,) = [one for one in PROGRAMS if one.name == found.program]
    assert found.version == program.with_version
    assert found.text.splitlines()[0] == f"# Imported from given.yaml, with the defaults of {found.version}."
    assert found.version in page
    assert found.version in found.to_json().values()


def test_keys_of_ours_that_the_pages_name_are_there() -> None:
    names = {key.name for key in all_keys()}
    sections = "|".join({name.partition(".")[0] for name in names if "." in name})
    tables = (ARGUMENTS, AXOLOTL, LLAMA_FACTORY, ACCELERATE, DEEPSPEED, TORCHTUNE)
    theirs = {key.name for table in tables for key in table.keys}
    for page in ("importing.md", "coming-from.md"):
        said = set(re.findall(rf"`((?:{sections})\.[a-z_.0-9]+)`", (DOCS / page).read_text()))
        assert said
        assert {name for name in said - names - theirs if not name.startswith("data.train.")} == set(), page
