"""TRL's arguments and alignment-handbook's: mixtures, templates, the router's loss, workers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tonnage.config import read_config
from tonnage.migration import Import, import_files

BASE: dict[str, Any] = {"model_name_or_path": "a/b", "learning_rate": 1e-5, "output_dir": "out"}
HUB = BASE | {"dataset_name": "c/d"}
CHAT = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
HANDBOOK = BASE | {
    "chat_template": CHAT,
    "dataset_mixture": {
        "datasets": [
            {"id": "c/d", "config": "default", "split": "train_sft", "columns": ["messages"], "weight": 1.0},
            {"id": "e/f", "split": "test_sft", "columns": ["messages"], "weight": 0.25},
        ],
        "test_split_size": 0.05,
        "seed": 0,
    },
    "eval_strategy": "epoch",
    "max_seq_length": 2048,
    "torch_dtype": "bfloat16",
    "eos_token": "<|im_end|>",
}


def imported(folder: Path, keys: dict[str, Any]) -> Import:
    (folder / "given.yaml").write_text(yaml.safe_dump(keys))
    return import_files([folder / "given.yaml"], workers=1)


def lost(found: Import) -> set[str]:
    return {entry.setting.name for entry in found.lost}


def test_a_recipe_of_alignment_handbook_comes_over(tmp_path: Path) -> None:
    found = imported(tmp_path, HANDBOOK)
    assert not found.lost
    assert not found.needs
    assert found.tree["data"]["train"] == [
        {"path": "c/d", "name": "default", "split": "train_sft", "weight": 1.0},
        {"path": "e/f", "split": "test_sft", "weight": 0.25},
    ]
    assert found.tree["data"]["template"] == CHAT.strip()
    assert found.tree["data"]["validation"] == 0.05
    assert found.tree["data"]["eos_token"] == "<|im_end|>"
    assert found.program == "TRL"
    (tmp_path / "config.yaml").write_text(found.text)
    config = read_config(tmp_path / "config.yaml", check_files=False)
    assert config.data.template == CHAT.strip()
    assert config.data.train[1].weight == 0.25


def test_rows_that_are_held_out_by_number_are_asked_for_as_a_fraction(tmp_path: Path) -> None:
    found = imported(tmp_path, HANDBOOK | {"dataset_mixture": HANDBOOK["dataset_mixture"] | {"test_split_size": 1000}})
    assert not found.lost
    assert [(need.key, need.sentence) for need in found.needs] == [
        ("data.validation", "1000 rows as a fraction of all: 1000 / their number")
    ]
    assert "# validation: 0.01" in found.text


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"beta": 0.01}, "beta"),
        ({"beta": 0.01, "loss_type": ["apo_zero"]}, "loss_type"),
        ({"max_prompt_length": 512}, "max_prompt_length"),
        ({"loss_type": "sigmoid"}, "loss_type"),
        ({"simpo_gamma": 0.5}, "simpo_gamma"),
        ({"dataset_mixer": {"c/d": 2.0}}, "dataset_mixer.c/d"),
        ({"ref_model_init_kwargs": {"revision": "x"}}, "ref_model_init_kwargs.revision"),
    ],
)
def test_its_recipes_for_preferences_are_refused_without_a_command(
    keys: dict[str, Any], name: str, tmp_path: Path
) -> None:
    assert name in lost(imported(tmp_path, HANDBOOK | keys))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "model"),
        ({"router_aux_loss_coef": 0.0}, 0),
        ({"router_aux_loss_coef": 0.02}, 0.02),
        ({"dataset_name": None, "train_file": "a.json", "max_length": 512}, "model"),
    ],
)
def test_the_router_s_loss_is_the_model_s_own_by_default(keys: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    """As in TRL 1.14 and later: what the model's config weights it with, asked for there or not."""
    found = imported(tmp_path, HUB | keys)
    assert found.tree["router_loss"] == expected
    assert "1.16" in found.text.splitlines()[0]
    if expected == "model":
        (implied,) = [one for one in found.implied if one.key == "router_loss"]
        assert "0.001 since 1.7" in implied.because


def test_the_trainer_by_itself_has_no_router_loss_of_its_own() -> None:
    found = import_files(["python run_clm.py --model_name_or_path a/b --dataset_name c/d --output_dir o"])
    assert found.program == "transformers' Trainer"
    assert "router_loss" not in found.tree
    assert found.tree["optimizer"]["lr"] == 5e-5


@pytest.mark.parametrize(("name", "zero", "workers"), [("zero3", 3, 8), ("fsdp2", 3, 8), ("multi_gpu", 0, 8)])
def test_trl_s_own_configurations_say_how_many_workers_there_are(name: str, zero: int, workers: int) -> None:
    words = "--model_name_or_path a/b --dataset_name c/d --per_device_train_batch_size 2 --output_dir o"
    found = import_files([f"trl sft {words} --accelerate_config {name}"])
    assert not found.needs
    assert found.tree["batch"]["sequences"] == 2 * workers
    assert (found.tree["memory"]["zero"], found.tree["launch"]["workers"]) == (zero, workers)
    fewer = import_files([f"trl sft {words} --accelerate_config {name} --num_processes 4"])
    assert (fewer.tree["batch"]["sequences"], fewer.tree["launch"]["workers"]) == (8, 4)
    alone = import_files([f"trl sft {words} --accelerate_config single_gpu"])
    assert (alone.tree["batch"]["sequences"], alone.tree["launch"]["workers"]) == (2, 1)


def test_an_accelerate_configuration_that_a_command_of_trl_names_is_read(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 3\nfsdp_config: {}\n")
    words = "--model_name_or_path a/b --dataset_name c/d --per_device_train_batch_size 2 --output_dir o"
    found = import_files([f"trl sft {words} --accelerate_config {path}"])
    assert not found.needs
    assert (found.tree["batch"]["sequences"], found.tree["memory"]["zero"]) == (6, 3)


@pytest.mark.parametrize(("fractions", "is_lost"), [((0.5,), False), ((0.5, 0.5), True), ((1, 3), True)])
def test_fractions_are_shares_of_the_mixture(fractions: tuple[float, ...], is_lost: bool, tmp_path: Path) -> None:
    """TRL makes them sum to one, so a data set by itself is taken whole, and of several none says how many rows."""
    sources = [{"path": f"a/{number}", "fraction": share} for number, share in enumerate(fractions)]
    found = imported(tmp_path, BASE | {"datasets": sources})
    assert bool(found.lost) == is_lost
    assert all("weight" not in source for source in found.tree["data"]["train"] if isinstance(source, dict))


@pytest.mark.parametrize(
    ("keys", "is_lost"),
    [
        ({"dataset_kwargs": {"add_special_tokens": False}, "chat_template": CHAT}, False),
        ({"dataset_kwargs": {"add_special_tokens": False}}, True),
        ({"dataset_kwargs": {"add_special_tokens": True}}, False),
        ({"dataset_kwargs": {"add_special_tokens": True}, "chat_template": CHAT}, True),
    ],
)
def test_special_tokens_are_those_of_a_template(keys: dict[str, Any], is_lost: bool, tmp_path: Path) -> None:
    assert bool(lost(imported(tmp_path, HUB | keys))) == is_lost


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("TechxGenus/Meta-Llama-3-8B-Instruct-AWQ", "AWQ"),
        ("x/Llama-2-7B-GPTQ", "GPTQ"),
        ("x/Meta-Llama-3-8B-Instruct-AQLM-2Bit-1x16", "AQLM"),
        ("x/Qwen2.5-7B-Instruct-GPTQ-Int4", "GPTQ"),
        ("x/Qwen-7B-Chat-Int4", "INT4"),
        ("unsloth/mistral-7b-bnb-4bit", "BNB"),
        ("mlx-community/Llama-3.2-1B-4bit", "4BIT"),
        ("x/Llama-3-8B-w4a16", "W4A16"),
    ],
)
def test_models_with_quantised_weights_are_refused(name: str, method: str, tmp_path: Path) -> None:
    for keys in (HUB | {"model_name_or_path": name}, {"base_model": name, "micro_batch_size": 1}):
        (entry,) = imported(tmp_path, keys).lost
        assert entry.setting.value == name
        assert method in entry.note
        assert "adapter.quantize" in entry.note


@pytest.mark.parametrize(
    "name", ["openai/gpt-oss-20b", "x/Qwen3-4B-FP8", "x/bitnet", "x/int-model", "awqua/b", "x/14bits"]
)
def test_other_names_are_not_taken_for_quantised(name: str, tmp_path: Path) -> None:
    assert not imported(tmp_path, HUB | {"model_name_or_path": name}).lost


@pytest.mark.parametrize(("method", "is_lost"), [("gptq", True), ("awq", True), ("mxfp4", False), ("fp8", False)])
def test_a_directory_says_itself_what_its_weights_are(method: str, is_lost: bool, tmp_path: Path) -> None:
    (tmp_path / "model-awq").mkdir()
    (tmp_path / "model-awq" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    assert bool(imported(tmp_path, HUB | {"model_name_or_path": "model-awq"}).lost) == is_lost
    (tmp_path / "model-awq" / "config.json").write_text("{}")
    assert not imported(tmp_path, HUB | {"model_name_or_path": "model-awq"}).lost


@pytest.mark.parametrize(
    ("model", "model_type"),
    [
        ("microsoft/phi-2", "phi"),
        ("nvidia/Nemotron-H-8B-Base-8K", "nemotron_h"),
        ("EleutherAI/pythia-160m", "gpt_neox"),
        ("tiiuae/falcon-7b", "falcon"),
        ("openai-community/gpt2", "gpt2"),
        ("mosaicml/mpt-7b", "mpt"),
        ("Qwen/Qwen3-4B", "qwen3"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral"),
    ],
)
def test_what_an_adapter_adapts_by_default_is_what_the_installed_peft_does(
    model: str, model_type: str, tmp_path: Path
) -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as BY_TYPE

    found = imported(tmp_path, HUB | {"model_name_or_path": model, "use_peft": True})
    assert found.tree["adapter"]["targets"] == BY_TYPE[model_type]
