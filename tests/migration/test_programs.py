"""Axolotl and LLaMA-Factory: whose a file is, what becomes of its keys, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tonnage.config import read_config
from tonnage.errors import UserError
from tonnage.migration import Import, import_files
from tonnage.migration.families import end_of_text
from tonnage.migration.patterns import patterns_of
from tonnage.migration.prompts import NAMED, jinja
from tonnage.migration.templates import AXOLOTL_TEMPLATES, LLAMA_FACTORY_TEMPLATES, Named, ours_for

BASE: dict[str, Any] = {
    "base_model": "NousResearch/Llama-3.2-1B",
    "datasets": [{"path": "rows.jsonl", "type": "alpaca"}],
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 2e-4,
    "output_dir": "out",
}
CHAT = {"datasets": [{"path": "rows.jsonl", "type": "chat_template"}]}
SHORT = "{% for m in messages %}{{ m['role'] + ': $' + m['content'] + eos_token }}{% endfor %}"
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 8}
TWO = {"datasets": [{"path": "a.jsonl", "type": "alpaca"}, {"path": "b.jsonl", "type": "alpaca"}]}
EVALUATED = {"val_set_size": 0.1, "evals_per_epoch": 4, "saves_per_epoch": 1, "num_epochs": 2}
FACTORY: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507",
    "finetuning_type": "lora",
    "dataset": "rows",
    "template": "qwen3_nothink",
    "output_dir": "out",
}


def axolotl(folder: Path, **keys: Any) -> Import:
    (folder / "axolotl.yaml").write_text(yaml.safe_dump({**BASE, **keys}))
    return import_files([folder / "axolotl.yaml"])


def factory(folder: Path, info: dict[str, Any] | None = None, **keys: Any) -> Import:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info or {"rows": {"file_name": "rows.json"}}))
    (folder / "factory.yaml").write_text(yaml.safe_dump({**FACTORY, **keys}))
    return import_files([folder / "factory.yaml"])


def at(found: Import, key: str) -> Any:
    value: Any = found.tree
    for part in key.split("."):
        value = value[part]
    return value


def lost(found: Import) -> set[str]:
    return {entry.setting.name for entry in found.lost}


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        ({}, "data.template", "alpaca"),
        ({}, "data.max_length", 512),
        ({}, "data.over_length", "drop"),
        ({}, "data.pack", False),
        ({}, "epochs", 1.0),
        ({}, "optimizer.schedule", "cosine"),
        ({}, "optimizer.warmup", 0.03),
        ({"max_steps": 10000}, "optimizer.warmup", 100),
        ({"max_steps": 50, "warmup_ratio": 0.05}, "optimizer.warmup", 2),
        ({"warmup_steps": 1}, "optimizer.warmup", 2),
        ({}, "optimizer.betas", [0.9, 0.999]),
        ({}, "precision", "bf16"),
        ({}, "memory.recompute", "none"),
        ({}, "batch.sequences", 8),
        ({}, "launch.workers", 1),
        ({"bf16": False, "fp16": True}, "precision", "fp16"),
        ({"bf16": False}, "precision", "fp32"),
        ({"batch_size": 6, "gradient_accumulation_steps": None}, "batch.sequences", 6),
        ({"adapter": "qlora", "load_in_4bit": True, "lora_r": 8, "lora_alpha": 16}, "adapter.quantize", "nf4-double"),
        ({"adapter": "lora", "load_in_8bit": True, "lora_r": 8, "lora_alpha": 16}, "adapter.quantize", "int8"),
        (
            {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "peft_use_rslora": True},
            "adapter.scaling",
            "rank_stabilised",
        ),
        (
            {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True},
            "adapter.targets",
            "all-linear",
        ),
        (
            {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_modules_to_save": ["embed_tokens", "lm_head"]},
            "adapter.also",
            ["embeddings", "head"],
        ),
        (
            {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["q_proj", "embed_tokens"]},
            "adapter.targets",
            ["q_proj", "embed_tokens"],
        ),
        (
            {
                "adapter": "lora",
                "lora_r": 8,
                "lora_alpha": 16,
                "lora_target_modules": r"model.layers.[\d]+.self_attn.(q|v)_proj",
            },
            "adapter.targets",
            ["model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.v_proj"],
        ),
        (
            {"unfrozen_parameters": ["^lm_head.weight$", "model.layers.1[0-1]."]},
            "train",
            ["lm_head.weight", "model.layers.10.*", "model.layers.11.*"],
        ),
        ({"optimizer": "adamw_bnb_8bit"}, "memory.moments", "int8"),
        ({"gradient_checkpointing": "offload"}, "memory.activation_tier", "host"),
        ({"fsdp_config": {"reshard_after_forward": True, "offload_params": True}}, "memory.optimizer_tier", "host"),
        ({"fsdp_config": {"reshard_after_forward": True}}, "memory.zero", 3),
        ({"dp_shard_size": 4, "tensor_parallel_size": 2}, "launch.workers", 8),
        ({"dp_shard_size": 4, "tensor_parallel_size": 2}, "parallel.tensor", 2),
        ({"dp_shard_size": 4, "tensor_parallel_size": 2}, "batch.sequences", 32),
        ({"val_set_size": 0.1, "evals_per_epoch": 4, "num_epochs": 2}, "evaluate.every", 0.125),
        ({"max_steps": 100, "saves_per_epoch": 2, "num_epochs": 2}, "checkpoint.every", 25),
        ({"reinit_weights": True}, "init", "random"),
        ({"dataset_exact_deduplication": True}, "data.duplicates", "drop"),
        ({**CHAT}, "data.template", "auto"),
        ({**CHAT, "chat_template": "llama3"}, "data.template", "llama3"),
        (
            {**CHAT, "chat_template": "llama3", "base_model": "meta-llama/Llama-3.1-8B-Instruct"},
            "data.template",
            "llama3",  # the model's own tells the date
        ),
        (
            {"datasets": [{"path": "a.jsonl", "type": "completion"}], "chat_template": "of_nobody"},
            "data.over_length",
            "split",
        ),
        (
            {"base_model": "mistralai/Mixtral-8x7B-v0.1", "model_config": {"output_router_logits": True}},
            "router_loss",
            0.02,
        ),
        (
            {"base_model": "mistral-community/Mixtral-8x22B-v0.1", "model_config": {"output_router_logits": True}},
            "router_loss",
            0.001,
        ),
        ({**CHAT, "chat_template_jinja": "own.jinja"}, "data.template", "own.jinja"),
        (
            {**CHAT, "chat_template_kwargs": {"enable_thinking": False}},
            "data.template_arguments",
            {"enable_thinking": False},
        ),
        (
            {
                "datasets": [
                    {"path": "a/b", "name": "main", "type": "chat_template", "split": "train[:1%]", "shards": 4}
                ]
            },
            "data.train",
            [{"path": "a/b", "format": "messages", "first": 0.01, "weight": 0.25, "name": "main"}],
        ),
        (
            {
                "datasets": [
                    {
                        "path": "r.jsonl",
                        "type": "chat_template",
                        "field_messages": "talk",
                        "roles": {"user": ["human", "visitor"], "assistant": ["gpt"]},
                    }
                ]
            },
            "data.train",
            [{"path": "r.jsonl", "format": "messages", "roles": {"visitor": "user"}, "columns": {"messages": "talk"}}],
        ),
        (
            {"special_tokens": {"eos_token": "</s>"}, "base_model": "NousResearch/Llama-2-7b-hf"},
            "data.template",
            "alpaca",
        ),
        (
            {"datasets": [{"path": "a/b", "data_files": ["x/1.json", "x/2.json"], "type": "alpaca"}]},
            "data.train",
            [{"path": "a/b", "files": ["x/1.json", "x/2.json"], "format": "alpaca"}],
        ),
        (
            {"datasets": [{"path": "json", "data_files": ["1.json", "2.json"], "type": "alpaca"}]},
            "data.train",
            [{"path": "1.json", "format": "alpaca"}, {"path": "2.json", "format": "alpaca"}],
        ),
        (
            {"datasets": [{"path": "a/b", "type": "chat_template", "drop_system_message": True}]},
            "data.train",
            [{"path": "a/b", "format": "messages", "system": "drop"}],
        ),
        ({"special_tokens": {"eos_token": "<|im_end|>"}}, "data.eos_token", "<|im_end|>"),
        ({"curriculum_sampling": True}, "data.order", "given"),
        ({"tokenizer_config": "EleutherAI/gpt-neox-20b"}, "tokenizer", "EleutherAI/gpt-neox-20b"),
        ({"curriculum_sampling": True, **TWO, "shuffle_merged_datasets": False}, "data.order", "given"),
        ({"lr_quadratic_warmup": True}, "optimizer.warmup_shape", "quadratic"),
        ({"lr_quadratic_warmup": True, "lr_scheduler": "linear"}, "optimizer.schedule", "linear"),
        ({**LORA, "unfrozen_parameters": ["^model.language_model.*", "^lm_head.*"]}, "adapter.rank", 8),
        ({**LORA, "peft_use_dora": True}, "adapter.kind", "dora"),
        ({**LORA, "peft_use_dora": False}, "adapter.rank", 8),
        ({**LORA, "peft_init_lora_weights": "pissa"}, "adapter.init", "pissa"),
        ({**LORA, "peft_init_lora_weights": "pissa_niter_4"}, "adapter.rounds", 4),
        ({**LORA, "peft_init_lora_weights": True}, "adapter.rank", 8),
        ({**LORA, "peft": {"loftq_config": {"loftq_bits": 4}}}, "adapter.init", "loftq"),
        ({**LORA, "peft": {"loftq_config": {"loftq_bits": 4}}}, "adapter.quantize", "nf4"),
        (
            {**LORA, "lora_rank_pattern": {"q_proj": 4, "mlp.up_proj": 2}},
            "adapter.patterns",
            [{"match": "*.mlp.up_proj", "rank": 2}, {"match": "q_proj", "rank": 4}],
        ),
        (
            {**LORA, "lora_rank_pattern": {"[qk]_proj": 4}, "lora_alpha_pattern": {"[qk]_proj": 3}},
            "adapter.patterns",
            [{"match": "q_proj", "rank": 4, "alpha": 3.0}, {"match": "k_proj", "rank": 4, "alpha": 3.0}],
        ),
        ({"tokens": ["<extra>", "<|im_start|>"]}, "data.added_tokens", ["<extra>", "<|im_start|>"]),
        ({**CHAT, "chat_template": "chatml", "tokens": ["<|im_start|>"]}, "data.template", "chatml"),
        ({**CHAT, "chat_template_jinja": SHORT}, "data.template", SHORT),
        ({"datasets": [{"path": "a/b", "type": "gpteacher:chat"}]}, "data.template", jinja(NAMED["gpteacher:chat"])),
        (
            {"datasets": [{"path": "a/b", "type": "jeopardy"}]},
            "data.train",
            [
                {
                    "path": "a/b",
                    "format": "alpaca",
                    "columns": {"instruction": "question", "input": "category", "output": "answer"},
                }
            ],
        ),
        ({**EVALUATED, "early_stopping_patience": 3}, "evaluate.patience", 3),
        ({**EVALUATED, "early_stopping_patience": 3}, "evaluate.before", False),
        ({**EVALUATED, "early_stopping_patience": 3}, "checkpoint.best", "eval_loss"),
        (
            {**EVALUATED, "load_best_model_at_end": True, "metric_for_best_model": "loss"},
            "checkpoint.best",
            "eval_loss",
        ),
    ],
)
def test_keys_of_axolotl(keys: dict[str, Any], key: str, expected: Any, tmp_path: Path) -> None:
    found = axolotl(tmp_path, **keys)
    assert found.program == "Axolotl"
    assert at(found, key) == expected
    assert found.is_whole, [(e.setting.name, e.verdict, e.note) for e in found.entries if e.verdict != "mapped"]
    assert not found.needs
    (tmp_path / "config.yaml").write_text(found.text)
    read_config(tmp_path / "config.yaml", check_files=False)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"rl": "kto"}, "datasets.0.type"),
        ({"rl": "grpo"}, "rl"),
        ({"rl": "ebft"}, "rl"),
        ({"rl": "of_nobody"}, "rl"),
        ({"rl": "dpo"}, "datasets.0.type"),
        ({"reward_model": True}, "datasets.0.type"),
        ({"process_reward_model": True}, "process_reward_model"),
        ({"num_labels": 2}, "num_labels"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha"),
        ({"relora": True}, "relora"),
        ({"optimizer": "came_pytorch"}, "optimizer"),
        ({"lr_scheduler": "one_cycle"}, "lr_scheduler"),
        ({**LORA, "lora_dropout": 0.1, "peft_use_dora": True}, "peft_use_dora"),
        ({**LORA, "peft_init_lora_weights": "eva"}, "peft_init_lora_weights"),
        ({**LORA, "peft_layers_to_transform": [1]}, "peft_layers_to_transform"),
        ({**LORA, "lora_rank_pattern": {"(?=a)b": 4}}, "lora_rank_pattern.(?=a)b"),
        (
            {**LORA, "lora_rank_pattern": {"q_proj": 4}, "lora_alpha_pattern": {"k_proj": 4}},
            "lora_alpha_pattern.k_proj",
        ),
        ({"adapter": "oft"}, "adapter"),
        ({"adapter": "lora", "lora_r": 8, "lora_alpha": 8, "lora_target_modules": "(?=a)b"}, "lora_target_modules"),
        ({"unfrozen_parameters": ["model.embed_tokens.weight$[:32000]"]}, "unfrozen_parameters"),
        ({**LORA, "unfrozen_parameters": ["^lm_head.weight$"]}, "unfrozen_parameters"),
        ({**LORA, "unfrozen_parameters": ["model.layers.3.*"]}, "unfrozen_parameters"),
        ({"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "plugins"),
        ({"base_model_config": "EleutherAI/gpt-neox-20b"}, "base_model_config"),
        ({"special_tokens": {"mask_token": "<mask>"}}, "special_tokens.mask_token"),
        ({**CHAT, "chat_template": "llama4"}, "chat_template"),
        ({**CHAT, "chat_template": "of_nobody"}, "chat_template"),
        ({**CHAT, "chat_template": "alpaca"}, "chat_template"),
        ({**CHAT, "chat_template_kwargs": {"a": {"b": 1}}}, "chat_template_kwargs.a.b"),
        ({"early_stopping_patience": 3}, "early_stopping_patience"),
        ({"load_best_model_at_end": True, "val_set_size": 0.1}, "load_best_model_at_end"),
        ({**EVALUATED, "load_best_model_at_end": True, "metric_for_best_model": "bleu"}, "metric_for_best_model"),
        ({"learning_rat": 1e-4}, "learning_rat"),
        ({"pretraining_dataset": [{"type": "pretrain"}]}, "pretraining_dataset.0.type"),
        ({"datasets": [{"path": "a/b", "type": "reflection"}]}, "datasets.0.type"),
        (
            {"datasets": [{"path": "a/b", "type": {"field_instruction": "q", "format": "{instruction} {other}"}}]},
            "datasets.0.type.format",
        ),
        (
            {"datasets": [{"path": "a/b", "type": {"format": "{instruction}", "of_nobody": "x"}}]},
            "datasets.0.type.of_nobody",
        ),
        (
            {"datasets": [{"path": "a/b", "type": "alpaca:chat"}, {"path": "c/d", "type": "alpaca:phi"}]},
            "datasets.1.type",
        ),
        ({"datasets": [{"path": "a/b", "type": "alpaca", "split": "train[10%:20%]"}]}, "datasets.0.split"),
        ({"datasets": [{"path": "s3://a/b", "type": "alpaca"}]}, "datasets.0.path"),
        (
            {"datasets": [{"path": "a/b", "type": "chat_template", "roles_to_train": ["user"]}]},
            "datasets.0.roles_to_train",
        ),
        ({"datasets": [{"path": "a/b", "type": "chat_template", "train_on_eos": "none"}]}, "datasets.0.train_on_eos"),
        (
            {"datasets": [{"path": "a/b", "type": "chat_template", "message_field_training": "is_good"}]},
            "datasets.0.message_field_training",
        ),
        (
            {"datasets": [{"path": "a/b", "type": "alpaca"}, {"path": "c/d", "type": "chat_template"}]},
            "datasets.1.type",
        ),
        ({"datasets": [{"path": "a/b", "type": "alpaca", "shards": 0}]}, "datasets.0.path"),
        ({"datasets": [{"path": "a/b", "type": "alpaca", "of_nobody": 1}]}, "datasets.0.of_nobody"),
    ],
)
def test_what_axolotl_does_and_is_not_there_is_refused_by_name(keys: dict[str, Any], name: str, tmp_path: Path) -> None:
    found = axolotl(tmp_path, **keys)
    assert name in lost(found), [(e.setting.name, e.verdict, e.note) for e in found.entries]


@pytest.mark.parametrize(
    "keys",
    [{"use_wandb": True, "wandb_project": "p"}, {"use_mlflow": True}, {"gradient_checkpointing_kwargs": {"a": 1}}],
)
def test_what_is_shown_and_how_does_not_stop_an_import(keys: dict[str, Any], tmp_path: Path) -> None:
    found = axolotl(tmp_path, **keys)
    assert not found.lost
    assert found.tree.get("track", []) == [name for name in ("wandb", "mlflow") if f"use_{name}" in keys]


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        ({}, "adapter.rank", 8),
        ({}, "adapter.alpha", 16.0),
        ({}, "adapter.targets", "all-linear"),
        ({}, "data.max_length", 2048),
        ({}, "data.over_length", "truncate"),
        ({}, "data.template", "chatml"),
        ({}, "optimizer.schedule", "linear"),
        ({}, "memory.recompute", "full"),
        ({"lora_rank": 4, "use_rslora": True}, "adapter.scaling", "rank_stabilised"),
        ({"lora_rank": 4}, "adapter.alpha", 8.0),
        ({"use_dora": True}, "adapter.kind", "dora"),
        ({"pissa_init": True, "pissa_convert": True}, "adapter.init", "pissa"),
        ({"pissa_init": True}, "adapter.rounds", 16),
        ({"pissa_init": True, "pissa_iter": -1}, "adapter.init", "pissa"),
        ({"pissa_iter": 4}, "adapter.rank", 8),
        ({"lora_target": "q_proj,v_proj"}, "adapter.targets", ["q_proj", "v_proj"]),
        ({"quantization_bit": 4}, "adapter.quantize", "nf4-double"),
        ({"quantization_bit": 4, "double_quantization": False}, "adapter.quantize", "nf4"),
        ({"quantization_bit": 8}, "adapter.quantize", "int8"),
        ({"finetuning_type": "oft"}, "adapter", {"kind": "oft", "oft_block_size": 32, "targets": "all-linear"}),
        (
            {"finetuning_type": "oft", "oft_block_size": 64, "lora_target": "q_proj", "lora_rank": 8},
            "adapter",
            {"kind": "oft", "oft_block_size": 64, "targets": ["q_proj"]},
        ),
        ({"finetuning_type": "oft", "quantization_bit": 4}, "adapter.quantize", "nf4-double"),
        ({"finetuning_type": "oft", "model_name_or_path": "a/b-GPTQ"}, "model", "a/b-GPTQ"),
        ({"oft_block_size": 64}, "adapter.rank", 8),
        ({"disable_gradient_checkpointing": True}, "memory.recompute", "none"),
        ({"mask_history": True}, "data.train_on", "last"),
        ({"train_on_prompt": True}, "data.train_on", "all"),
        ({"neat_packing": True}, "data.pack", True),
        ({"template": "qwen3", "model_name_or_path": "Qwen/Qwen3-4B"}, "data.template", "auto"),
        ({"stage": "pt", "template": None}, "data.pack", True),
        ({"stage": "pt", "template": "of_nobody"}, "data.over_length", "split"),
        ({"stage": "pt", "packing": False}, "data.over_length", "truncate"),
        ({"stage": "pt", "packing": False}, "data.pack", False),
        ({"disable_shuffling": True}, "data.order", "given"),
        ({"split_special_tokens": True}, "data.control_tokens", "text"),
        ({"split_special_tokens": False}, "data.control_tokens", "keep"),
        ({"finetuning_type": "freeze"}, "train", ["blocks[-2:].*"]),
        (
            {
                "finetuning_type": "freeze",
                "freeze_trainable_layers": -3,
                "freeze_trainable_modules": "mlp,self_attn",
                "freeze_extra_modules": "embed_tokens",
            },
            "train",
            ["blocks[:3].mlp*", "blocks[:3].self_attn*", "*embed_tokens*"],
        ),
        ({"add_special_tokens": "<a>, <b>", "resize_vocab": True}, "data.added_tokens", ["<a>", "<b>"]),
        (
            {"val_size": 0.1, "eval_steps": 5, "early_stopping_steps": 2, "load_best_model_at_end": True},
            "evaluate.patience",
            2,
        ),
    ],
)
def test_keys_of_llama_factory(keys: dict[str, Any], key: str, expected: Any, tmp_path: Path) -> None:
    found = factory(tmp_path, **keys)
    assert found.program == "LLaMA-Factory"
    assert at(found, key) == expected
    assert found.is_whole, [(e.setting.name, e.verdict, e.note) for e in found.entries if e.verdict != "mapped"]
    assert not found.needs
    (tmp_path / "config.yaml").write_text(found.text)
    read_config(tmp_path / "config.yaml", check_files=False)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"stage": "dpo"}, "dataset"),
        ({"stage": "kto"}, "dataset"),
        ({"stage": "rm"}, "dataset"),
        ({"stage": "ppo"}, "stage"),
        ({"finetuning_type": "oft", "oft_rank": 4}, "oft_rank"),
        ({"finetuning_type": "oft", "module_dropout": 0.1}, "module_dropout"),
        ({"finetuning_type": "freeze", "use_llama_pro": True}, "use_llama_pro"),
        ({"use_galore": True}, "use_galore"),
        ({"use_badam": True}, "use_badam"),
        ({"use_llama_pro": True}, "use_llama_pro"),
        ({"use_dora": True, "lora_dropout": 0.1}, "use_dora"),
        ({"adapter_name_or_path": "saves/x"}, "adapter_name_or_path"),
        ({"add_tokens": "a,b"}, "add_tokens"),
        ({"template": "of_nobody"}, "template"),
        ({"dataset": "others"}, "dataset"),
        ({"mix_strategy": "interleave_under"}, "mix_strategy"),
        ({"quantization_bit": 3}, "quantization_bit"),
        ({"quantization_method": "hqq", "quantization_bit": 4}, "quantization_method"),
    ],
)
def test_what_llama_factory_does_and_is_not_there_is_refused_by_name(
    keys: dict[str, Any], name: str, tmp_path: Path
) -> None:
    assert name in lost(factory(tmp_path, **keys))


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ({"file_name": "a.json"}, {"format": "alpaca", "between": "\n"}),
        (
            {"hf_hub_url": "a/b", "subset": "s", "split": "test"},
            {"path": "a/b", "format": "alpaca", "between": "\n", "name": "s", "split": "test"},
        ),
        (
            {"file_name": "a.json", "columns": {"prompt": "q", "response": "a"}},
            {"format": "alpaca", "between": "\n", "columns": {"instruction": "q", "output": "a"}},
        ),
        (
            {"file_name": "a.json", "formatting": "sharegpt"},
            {"format": "messages", "columns": {"messages": "conversations"}},
        ),
        (
            {
                "file_name": "a.json",
                "formatting": "sharegpt",
                "columns": {"messages": "messages"},
                "tags": {
                    "role_tag": "role",
                    "content_tag": "content",
                    "user_tag": "visitor",
                    "assistant_tag": "assistant",
                },
            },
            {"format": "messages", "roles": {"visitor": "user"}},
        ),
        ({"file_name": "a.json", "ranking": True}, None),
        ({"file_name": "a.json", "columns": {"videos": "videos"}}, None),
        ({"file_name": "a.json", "columns": {"kto_tag": "label"}}, None),
        ({"script_url": "somewhere"}, None),
        ({"file_name": "a.json", "columns": ["x"]}, None),
        ({"file_name": "a.json", "num_samples": "many"}, None),
        ("a.json", None),
    ],
)
def test_entries_of_dataset_info(entry: Any, source: dict[str, Any] | None, tmp_path: Path) -> None:
    found = factory(tmp_path, {"rows": entry})
    if source is None:
        assert lost(found) == {"dataset"}
    else:
        assert at(found, "data.train") == [{"path": f"{tmp_path}/data/a.json", **source}]


@pytest.mark.parametrize("strategy", ["dynamic_padding_free", "dynamic_batching"])
def test_batches_of_version_1_that_are_filled_are_packs(strategy: str, tmp_path: Path) -> None:
    keys = {
        "model": "a/b",
        "train_dataset": "c/d",
        "batching_strategy": strategy,
        "micro_batch_size": 2,
        "max_steps": 9,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys))
    found = import_files([tmp_path / "run.yaml"])
    assert found.is_whole
    assert at(found, "data.pack") is True
    assert any("filled up" in entry.note for entry in found.entries)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys | {"batching_strategy": "of_nobody"}))
    assert lost(import_files([tmp_path / "run.yaml"])) == {"batching_strategy"}


def test_of_a_stream_that_is_known_the_first_files_are_read(tmp_path: Path) -> None:
    stream = [{"path": "allenai/c4", "name": "en", "type": "pretrain"}]
    keys: dict[str, Any] = {"datasets": None, "num_epochs": None, "pretraining_dataset": stream, "sequence_len": 2048}
    found = axolotl(tmp_path, **keys, max_steps=300)
    assert found.is_whole
    assert not [need for need in found.needs if need.key == "data.train"]
    (source,) = at(found, "data.train")
    assert source == {"path": "allenai/c4", "files": ["en/c4-train.00000-of-01024.json.gz"], "format": "text"}
    assert any("the first files are read (1 of them)" in note for note in found.notes)
    sequences = at(found, "batch.sequences")
    longer = axolotl(tmp_path, **keys, max_steps=250_000_000 // (2048 * sequences))
    assert [file[12:17] for file in at(longer, "data.train")[0]["files"]] == ["00000", "00001", "00002"]
    than_there_are = axolotl(tmp_path, **keys, max_steps=103_000_000_000 // (2048 * sequences))
    assert [need for need in than_there_are.needs if need.key == "data.train"]
    in_epochs = axolotl(tmp_path, **(keys | {"num_epochs": 1}))
    assert [need for need in in_epochs.needs if need.key == "data.train"]


def test_a_stream_of_text_is_left_to_the_user(tmp_path: Path) -> None:
    stream = {"path": "a/text", "name": "en", "split": "train", "type": "pretrain", "text_column": "body"}
    found = axolotl(tmp_path, datasets=None, pretraining_dataset=[stream])
    assert found.is_whole
    (need,) = [need for need in found.needs if need.key == "data.train"]
    assert "read here before the first step" in need.sentence
    assert need.example == "{path: a/text, name: en, format: text, columns: {text: body}}"
    assert yaml.safe_load(need.example)["columns"] == {"text": "body"}
    assert at(found, "data.over_length") == "split"
    assert axolotl(tmp_path, datasets=None, pretraining_dataset="a/text").is_whole
    assert lost(axolotl(tmp_path, datasets=None, pretraining_dataset=[stream | {"skip": 9}]))
    assert lost(axolotl(tmp_path, datasets=None, pretraining_dataset=[stream | {"type": "chat_template"}]))


@pytest.mark.parametrize(
    ("model", "origin"),
    [
        ("unsloth/Llama-3.2-1B-bnb-4bit", "unsloth/Llama-3.2-1B"),
        ("unsloth/Qwen3-4B-unsloth-bnb-4bit", "unsloth/Qwen3-4B"),
    ],
)
def test_the_origin_of_weights_of_few_bits_is_named(model: str, origin: str, tmp_path: Path) -> None:
    found = axolotl(tmp_path, base_model=model, **LORA, gptq=True, tokenizer_config=model)
    assert found.is_whole
    assert (at(found, "model"), at(found, "adapter.quantize")) == (origin, "nf4-double")
    assert any(model in note and origin in note for note in found.notes)
    assert "tokenizer" not in found.tree or at(found, "tokenizer") == origin
    assert "base_model" in lost(axolotl(tmp_path, base_model=model))  # all weights are trained
    assert "base_model" in lost(axolotl(tmp_path, base_model=f"of-nobody/{model.partition('/')[2]}", **LORA))
    assert at(axolotl(tmp_path, base_model=model, **LORA, load_in_8bit=True), "adapter.quantize") == "int8"


@pytest.mark.parametrize(
    "model", ["of-nobody/Llama-2-7B-GPTQ", "of-nobody/Llama-3-8B-AWQ", "of-nobody/Llama-3-8B-NVFP4"]
)
def test_weights_of_few_bits_stay_under_an_adapter(model: str, tmp_path: Path) -> None:
    found = axolotl(tmp_path, base_model=model, **LORA, **({"gptq": True} if "GPTQ" in model else {}))
    assert found.is_whole
    assert at(found, "model") == model
    assert "quantize" not in found.tree["adapter"]
    assert "base_model" in lost(axolotl(tmp_path, base_model=model))  # all weights are trained


def test_one_data_set_of_several_that_is_refused_is_not_lost_among_the_others(tmp_path: Path) -> None:
    info = {"rows": {"file_name": "a.json"}, "films": {"file_name": "b.json", "columns": {"videos": "videos"}}}
    found = factory(tmp_path, info, dataset="rows,films")
    assert lost(found) == {"dataset"}
    assert [source["path"] for source in at(found, "data.train")] == [f"{tmp_path}/data/a.json"]  # for --partial


def test_version_1_of_llama_factory(tmp_path: Path) -> None:
    (tmp_path / "sets.yaml").write_text(
        "a: {path: a.json, source: local, converter: alpaca}\nb: {path: o/b, converter: sharegpt, size: 50}\n"
    )
    keys = {
        "model": "Qwen/Qwen3-4B",
        "train_dataset": "sets.yaml",
        "peft_config": {"name": "lora", "r": 16, "lora_alpha": 32},
        "dist_config": {"name": "fsdp2", "dcp_path": None},
        "micro_batch_size": 2,
        "max_steps": 10,
        "learning_rate": 1e-5,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys))
    found = import_files([tmp_path / "run.yaml"])
    assert found.program == "LLaMA-Factory 1"
    assert found.is_whole
    assert not found.needs
    assert at(found, "data.train") == [
        {"path": "a.json", "format": "alpaca", "between": ""},
        {"path": "o/b", "format": "messages", "columns": {"messages": "conversations"}, "first": 50},
    ]
    assert (at(found, "adapter.rank"), at(found, "adapter.dropout"), at(found, "memory.zero")) == (16, 0.05, 3)
    assert (at(found, "optimizer.weight_decay"), at(found, "optimizer.schedule")) == (0.01, "constant")

    said = " ".join(found.notes)
    assert "make a sample of each answer" in said
    assert "decays norms" not in said  # there are none among the parameters of an adapter
    del keys["peft_config"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys))
    assert any("decays norms and biases too" in note for note in import_files([tmp_path / "run.yaml"]).notes)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys | {"custom_chat_template": SHORT}))
    assert at(import_files([tmp_path / "run.yaml"]), "data.template") == SHORT


def test_how_llama_factory_cuts_and_when_axolotl_s_warm_up_ends_is_told(tmp_path: Path) -> None:
    assert any("in proportion" in note for note in factory(tmp_path).notes)
    notes = axolotl(tmp_path).notes
    assert any("more than 3,333" in note and "optimizer.warmup: 100" in note for note in notes)
    for keys in ({"max_steps": 50}, {"warmup_steps": 10}, {"warmup_ratio": 0.1}):
        assert not any("warm-up by default" in note for note in axolotl(tmp_path, **keys).notes)


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ("--include w1:0,1,2,3@w2:0,1,2,3", 8),
        ("--include w1:0,1@w2:0", 3),
        ("--include localhost:0,1", 2),
        ("--include w1@w2", None),
    ],
)
def test_hosts_of_the_launcher_of_deepspeed_are_counted(options: str, workers: int | None, tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(f"deepspeed {options} train.py --model_name_or_path owner/model --per_device_train_batch_size 2\n")
    assert import_files([file]).tree.get("launch", {}).get("workers") == workers


def test_how_many_workers_there_are_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "axolotl.yaml").write_text(yaml.safe_dump(BASE))
    found = import_files([tmp_path / "axolotl.yaml"], workers=8)
    assert (at(found, "launch.workers"), at(found, "batch.sequences")) == (8, 64)
    assert not any("--workers" in note for note in found.notes)
    assert any("--workers" in note for note in axolotl(tmp_path).notes)


def test_commands_of_these_programs_and_files_that_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    axolotl(tmp_path, deepspeed="deepspeed/zero2.json")
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero2.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    found = import_files(["axolotl train axolotl.yaml --learning-rate 1e-5"])
    assert (at(found, "optimizer.lr"), at(found, "memory.zero")) == (1e-5, 2)
    assert found.program == "Axolotl and DeepSpeed"
    factory(tmp_path)
    for command in (
        "FORCE_TORCHRUN=1 llamafactory-cli train factory.yaml learning_rate=1e-5",
        "torchrun --nproc_per_node 2 src/train.py factory.yaml --learning_rate 1e-5",
    ):
        found = import_files([command])
        assert found.program.startswith("LLaMA-Factory")
        assert (at(found, "optimizer.lr"), at(found, "adapter.rank")) == (1e-5, 8)
    assert at(found, "launch.workers") == 2


def test_several_machines_are_a_job_of_slurm(tmp_path: Path) -> None:
    words = "accelerate launch --num_processes 16 --num_machines 2 train.py --model_name m --dataset_name a/b --bf16"
    found = import_files([f"{words} --max_seq_len 2048 --packing --per_device_train_batch_size 1 --max_steps 500"])
    assert not found.lost
    assert found.tree["launch"] == {"with": "slurm", "workers": 16, "nodes": 2, "gpus_per_node": 8}
    assert (at(found, "model"), at(found, "data.max_length"), at(found, "batch.sequences")) == ("m", 2048, 16)
    assert at(found, "data.over_length") == "split"
    (tmp_path / "config.yaml").write_text(found.text)
    assert read_config(tmp_path / "config.yaml", check_files=False).launch.launcher == "slurm"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"a.yaml": {"base_model": "m", "finetuning_type": "lora", "model_name_or_path": "m"}},
            "keys of several programs",
        ),
        (
            {"a.yaml": BASE, "b.yaml": {"model_name_or_path": "m", "max_length": 5, "packing": True}},
            "configurations of",
        ),
        (
            {"a.yaml": {"tokenizer": {"_component_": "torchtune.x"}, "epochs": 1, "optimizer": {"lr": 1e-5}}},
            "torchtune",
        ),
        ({"a.yaml": {"seed": 1, "x": 1, "y": 2, "z": 3}}, r"4 keys .*and no program more"),
        ({"a.yaml": {"x": 1}}, "no key that is known"),
    ],
)
def test_whose_a_file_is_that_cannot_be_told_is_refused(files: dict[str, Any], said: str, tmp_path: Path) -> None:
    for name, keys in files.items():
        (tmp_path / name).write_text(yaml.safe_dump(keys))
    with pytest.raises(UserError, match=said):
        import_files([tmp_path / name for name in files])


def test_no_key_is_lost_without_a_word(tmp_path: Path) -> None:
    found = import_files(["python train.py --model_nam x --data_path rows.jsonl --bf16"])
    assert lost(found) == {"model_nam"}


@pytest.mark.parametrize(
    ("expression", "whole", "expected"),
    [
        ("lm_head", False, ["lm_head*"]),
        ("^lm_head.weight$", False, ["lm_head.weight"]),
        (r"model\.layers\.\d+\.mlp", True, ["model.layers.*.mlp"]),
        ("a.(b|c)?.d", True, ["a..d", "a.b.d", "a.c.d"]),
        ("x[0-2]", True, ["x0", "x1", "x2"]),
        (".*", True, ["*"]),
    ],
)
def test_expressions_as_patterns(expression: str, whole: bool, expected: list[str]) -> None:
    assert patterns_of(expression, whole=whole) == expected


@pytest.mark.parametrize("expression", ["(?!a)b", r"(a)\1", "a{2,3}", "(", "(ab)+", "x" * 1000, "[a-j][a-j]"])
def test_expressions_that_patterns_cannot_say_are_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expression|pattern|names"):
        patterns_of(expression, whole=True)


@pytest.mark.parametrize(
    ("templates", "name", "model", "expected"),
    [
        (AXOLOTL_TEMPLATES, "gemma", "google/gemma-4-E2B-it", "gemma"),
        (AXOLOTL_TEMPLATES, "gemma3", "google/gemma-3-4b-it", "gemma"),
        (AXOLOTL_TEMPLATES, "deepseek_v2", "deepseek-ai/DeepSeek-V2.5", "auto"),
        (AXOLOTL_TEMPLATES, "deepseek_v2", "deepseek-ai/DeepSeek-R1", ""),
        (AXOLOTL_TEMPLATES, "mistral_v1", "mistralai/Mistral-7B-Instruct-v0.3", ""),
        (AXOLOTL_TEMPLATES, "mistral_v2v3", "mistralai/Mistral-7B-Instruct-v0.3", "auto"),
        (AXOLOTL_TEMPLATES, "nemotron_h", "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF", "chatml"),
        (AXOLOTL_TEMPLATES, "phi_4", "microsoft/phi-4", ""),
        (AXOLOTL_TEMPLATES, "qwen3", "Qwen/Qwen3-8B", "auto"),
        (AXOLOTL_TEMPLATES, "qwen3", "Qwen/Qwen3.5-9B", ""),
        (AXOLOTL_TEMPLATES, "qwen3_5", "Qwen/Qwen3.5-9B", "auto"),
        (LLAMA_FACTORY_TEMPLATES, "qwen3", "Qwen/Qwen3-4B-Instruct-2507", ""),
        (LLAMA_FACTORY_TEMPLATES, "qwen3_5_nothink", "Qwen/Qwen3.5-9B", "chatml"),
        (LLAMA_FACTORY_TEMPLATES, "llama3", "meta-llama/Llama-3.3-70B-Instruct", "llama3"),
        (LLAMA_FACTORY_TEMPLATES, "phi4", "microsoft/Phi-4-mini-instruct", ""),
        (LLAMA_FACTORY_TEMPLATES, "mistral", "mistralai/Mistral-7B-Instruct-v0.1", ""),
    ],
)
def test_a_template_by_name_is_the_model_s_own_only_where_its_text_is(
    templates: dict[str, Named], name: str, model: str, expected: str
) -> None:
    assert ours_for(templates[name], model) == expected


@pytest.mark.parametrize("name", ["gemma4", "gpt_oss", "lfm2", "granite4"])
def test_templates_with_a_system_message_of_llama_factory_are_refused(name: str, tmp_path: Path) -> None:
    found = factory(tmp_path, template=name)
    assert lost(found) == {"template"}
    assert "data.template: auto" in next(entry.note for entry in found.lost)


@pytest.mark.parametrize("name", [name for name, named in LLAMA_FACTORY_TEMPLATES.items() if named.turns])
def test_a_template_of_another_family_is_written_out(name: str, tmp_path: Path) -> None:
    found = factory(tmp_path, template=name, model_name_or_path="somebody/model")
    assert at(found, "data.template") == LLAMA_FACTORY_TEMPLATES[name].text
    assert found.is_whole
    is_chatml = name in ("qwen", "qwen3", "smollm2")
    assert found.tree["data"].get("added_tokens") == (["<|im_start|>", "<|im_end|>"] if is_chatml else None)
    thinks = name in ("qwen3", "deepseekr1")
    assert lost(factory(tmp_path, template=name, model_name_or_path="a/b", mask_history=True)) == (
        {"template"} if thinks else set()
    )


def test_data_sets_that_are_shuffled_when_they_are_merged_have_no_order(tmp_path: Path) -> None:
    for keys in ({}, {"shuffle_merged_datasets": True}, {"shuffle_before_merging_datasets": True}):
        found = axolotl(tmp_path, curriculum_sampling=True, **TWO, **keys)
        assert "order" not in found.tree["data"]
        assert found.is_whole


def test_in_what_a_template_differs_is_in_the_account(tmp_path: Path) -> None:
    found = factory(tmp_path, template="qwen3", model_name_or_path="Qwen/Qwen3-8B")
    (entry,) = [entry for entry in found.entries if entry.setting.name == "template"]
    assert "empty thought" in entry.note
    assert "copy" not in entry.note


@pytest.mark.parametrize(
    ("model", "token"),
    [
        ("NousResearch/Llama-2-7b-hf", "</s>"),
        ("codellama/CodeLlama-7b-hf", "</s>"),
        ("openlm-research/open_llama_3b_v2", "</s>"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "</s>"),
        ("/models/Mistral-7B-v0.1", "</s>"),
        ("meta-llama/Llama-3.1-8B", "<|end_of_text|>"),
        ("NousResearch/Meta-Llama-3-8B", "<|end_of_text|>"),
        ("tiiuae/falcon-7b", "<|endoftext|>"),
        ("mosaicml/mpt-7b", "<|endoftext|>"),
        ("togethercomputer/RedPajama-INCITE-Chat-3B-v1", "<|endoftext|>"),
        ("teknium/OpenHermes-2.5-Mistral-7B", ""),
        ("meta-llama/Llama-3.1-8B-Instruct", ""),
        ("cognitivecomputations/dolphin-2.9-llama3-8b", ""),
        ("tiiuae/Falcon-H1-7B-Base", ""),
        ("Qwen/Qwen3-4B", ""),
        ("", ""),
    ],
)
def test_what_ends_a_text_is_known_of_models_and_not_of_what_others_made_of_them(model: str, token: str) -> None:
    assert end_of_text(model) == token


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"max_samples": 100},
        {"stage": "sft", "lora_rank": 8},
        {"gradient_checkpointing": True, "adam_beta1": 0.9, "max_steps": 5},
    ],
)
def test_arguments_of_the_trainer_are_nobody_else_s(keys: dict[str, Any], tmp_path: Path) -> None:
    given = {"model_name_or_path": "m", "learning_rate": 1e-5, "per_device_train_batch_size": 4, "output_dir": "out"}
    (tmp_path / "args.yaml").write_text(yaml.safe_dump({**given, **keys}))
    words = " ".join(f"--{name} {value}" for name, value in {**given, **keys}.items())
    for found in (import_files([tmp_path / "args.yaml"]), import_files([f"torchrun train.py {words}"])):
        assert found.program.startswith("transformers' Trainer")
        assert "adapter" not in found.tree
        assert at(found, "optimizer.schedule") == "linear"
        assert lost(found) == set(keys) & {"max_samples", "stage", "lora_rank"}


def test_rows_whose_description_is_not_there_leave_their_number_open(tmp_path: Path) -> None:
    (tmp_path / "factory.yaml").write_text(yaml.safe_dump({**FACTORY, "dataset_dir": "nowhere", "max_samples": 5}))
    found = import_files([tmp_path / "factory.yaml"])
    assert [need.key for need in found.needs] == ["data.train"]
    (entry,) = [entry for entry in found.entries if entry.setting.name == "max_samples"]
    assert entry.note.startswith("Left open")


@pytest.mark.parametrize(("folder", "path"), [("ONLINE", "a/b"), (".", "")])
def test_names_are_data_sets_of_the_hub_only_where_that_is_said(folder: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "factory.yaml").write_text(yaml.safe_dump({**FACTORY, "dataset": "a/b", "dataset_dir": folder}))
    found = import_files([tmp_path / "factory.yaml"])
    assert [source["path"] for source in found.tree["data"].get("train", [])] == ([path] if path else [])
    assert lost(found) == (set() if path else {"dataset"})


def test_templates_are_of_families_or_built_in() -> None:
    from tonnage.data.text.choice import BUILT_IN

    for named in (*AXOLOTL_TEMPLATES.values(), *LLAMA_FACTORY_TEMPLATES.values()):
        assert named.family or named.ours or named.text
        assert named.ours in ("", *BUILT_IN)


def test_what_is_usual_is_what_our_reader_knows() -> None:
    from tonnage.forms import turns, values
    from tonnage.migration.axolotl import FLAGS, THOUGHTS
    from tonnage.migration.sources import USUAL_ROLES

    assert set(FLAGS) == set(values.FLAGS)
    assert set(THOUGHTS) == set(turns.REASONING)
    for role, names in USUAL_ROLES.items():
        assert {turns.ROLE_NAMES[name] for name in names} == {role}


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.text(max_size=6),
    st.just("alpaca"),
    st.just("train[:5]"),
    st.lists(st.one_of(st.integers(0, 3), st.text(max_size=4), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=4), st.one_of(st.integers(), st.text(max_size=4)), max_size=3),
)
LEAVES = st.sampled_from(
    [
        *("path", "type", "split", "shards", "shards_idx", "name", "revision", "data_files", "ds_type", "field"),
        *("field_messages", "roles", "roles_to_train", "train_on_eos", "message_property_mappings", "conversation"),
        *("message_field_training", "chat_template", "x"),
    ]
)
ENTRIES = st.sampled_from(
    [
        *("file_name", "hf_hub_url", "formatting", "ranking", "columns", "tags", "subset", "split", "folder"),
        *("num_samples", "path", "converter", "size"),
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(sets=st.lists(st.dictionaries(LEAVES, VALUES, max_size=6), max_size=3), entry=st.dictionaries(ENTRIES, VALUES))
def test_whatever_data_sets_say_is_accounted_for(
    sets: list[dict[str, Any]], entry: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    for found in (axolotl(folder, datasets=sets), factory(folder, {"rows": entry})):
        assert all(entry.note.endswith((".", "?")) for entry in found.entries)
