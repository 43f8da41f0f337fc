"""Ten configurations of Axolotl and ten of LLaMA-Factory, in the style of their examples, imported whole and run to an
export: each a tiny model of another family, on 20 rows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors import safe_open

from forked import tonnage
from tiny import write_model
from tonnage.rundir.directory import RunDirectory

SHAPE: dict[str, Any] = {
    "vocab_size": 264,  # with room for the tokens of ChatML
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 256,
    "bos_token_id": 256,
    "pad_token_id": 257,
}
ALPACA = [
    {"instruction": f"Count to {n}.", "input": "" if n % 2 else "slowly", "output": " ".join(map(str, range(n + 1)))}
    for n in range(20)
]
CHATS = [
    {"conversations": [{"from": "human", "value": f"What is {n}+1?"}, {"from": "gpt", "value": f"It is {n + 1}."}]}
    for n in range(20)
]
TEXTS = [{"text": "lorem ipsum " * (n + 3)} for n in range(20)]
STEPS = 3


@dataclass(frozen=True)
class Family:
    """A configuration for a family."""

    config: str
    """The family's class in transformers."""
    keys: dict[str, Any]
    rows: list[Any] = field(default_factory=lambda: ALPACA)
    shape: dict[str, Any] = field(default_factory=dict)


AXOLOTL_KEYS = {
    "base_model": "model",
    "sequence_len": 512,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "lr_scheduler": "cosine",
    "optimizer": "adamw_torch_fused",
    "bf16": "auto",
    "output_dir": "run",
}
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.05}
IN_ALPACA = {"datasets": [{"path": "rows.jsonl", "type": "alpaca"}]}
IN_TURNS = {
    "chat_template": "chatml",
    "datasets": [{"path": "rows.jsonl", "type": "chat_template", "field_messages": "conversations"}],
}
IN_TEXT = {"datasets": [{"path": "rows.jsonl", "type": "completion"}]}
AXOLOTL = {
    "llama": Family("LlamaConfig", {**IN_ALPACA, "sample_packing": True, "gradient_checkpointing": True}),
    "mistral": Family("MistralConfig", {**IN_ALPACA, **LORA, "lora_target_modules": ["q_proj", "v_proj"]}),
    "qwen2": Family(
        "Qwen2Config", {**IN_ALPACA, **LORA, "adapter": "qlora", "load_in_4bit": True, "lora_target_linear": True}
    ),
    "qwen3": Family("Qwen3Config", {**IN_TURNS, "sample_packing": True}, CHATS, {"head_dim": 16}),
    "gemma": Family("GemmaConfig", {**IN_TURNS, "val_set_size": 0.2, "evals_per_epoch": 1}, CHATS, {"head_dim": 16}),
    "pythia": Family("GPTNeoXConfig", {**IN_TEXT, **LORA, "lora_target_modules": ["query_key_value"]}, TEXTS),
    "phi": Family("PhiConfig", {**IN_ALPACA, "optimizer": "adamw_bnb_8bit", "warmup_ratio": 0.3}),
    "mixtral": Family("MixtralConfig", {**IN_ALPACA, "lr_scheduler": "constant"}, shape={"num_local_experts": 3}),
    "olmo2": Family(
        "Olmo2Config", {**IN_ALPACA, **LORA, "load_in_8bit": True, "lora_target_linear": True, "weight_decay": 0.1}
    ),
    "stablelm": Family("StableLmConfig", {**IN_TEXT, "unfrozen_parameters": ["^lm_head.weight$", "layers.1."]}, TEXTS),
}
FACTORY_KEYS = {
    "model_name_or_path": "model",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "rows",
    "dataset_dir": ".",
    "template": "chatml",
    "cutoff_len": 512,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "bf16": True,
    "report_to": "none",
    "output_dir": "run",
}
ADDED = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"}
FACTORY = {
    "llama": Family("LlamaConfig", {"warmup_ratio": 0.3}),
    "qwen3": Family("Qwen3Config", ADDED, CHATS, {"head_dim": 16}),
    "qwen2": Family("Qwen2Config", {**ADDED, "quantization_bit": 4, "quantization_method": "bnb"}),
    "mistral": Family("MistralConfig", {**ADDED, "lora_target": "q_proj,v_proj"}, CHATS),
    "gemma": Family("GemmaConfig", {"neat_packing": True, "packing": True}, CHATS, {"head_dim": 16}),
    "phi3": Family("Phi3Config", {"train_on_prompt": True}),
    "granite": Family("GraniteConfig", {"val_size": 0.2, "eval_strategy": "steps", "eval_steps": 2}),
    "glm4": Family("Glm4Config", ADDED, shape={"head_dim": 16}),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        {"max_samples": 16},
        shape={"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "smollm3": Family("SmolLM3Config", {"optim": "adamw_8bit", "mask_history": True}, CHATS),
}
SLICE = 2
"""Of each program, with the slow tests; the others are the matrix's."""


def sliced(families: dict[str, Family]) -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.slow, *([pytest.mark.matrix] if number >= SLICE else [])])
        for number, name in enumerate(families)
    ]


def assert_runs_to_an_export(folder: Path, family: Family, keys: dict[str, Any]) -> None:
    config = getattr(transformers, family.config)(**(SHAPE | family.shape))
    torch.manual_seed(0)
    write_model(folder / "model", config)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in family.rows))
    entry = {"file_name": "rows.jsonl"} | ({"formatting": "sharegpt"} if family.rows is CHATS else {})
    (folder / "dataset_info.json").write_text(json.dumps({"rows": entry}))
    (folder / "theirs.yaml").write_text(yaml.safe_dump(keys | family.keys))
    for words in (
        ["import", "theirs.yaml", "--strict", "--output", "config.yaml"],
        ["train", "config.yaml", "launch.threads=1", "data.cache=packs"],
    ):
        done = tonnage(*words, cwd=folder)
        assert done.returncode == 0, done.stderr + done.stdout
    run = RunDirectory(folder / "run")
    losses = [record["loss"] for record in run.read_metrics() if "loss" in record]
    assert len(losses) == STEPS
    is_adapter = bool({"lora", "qlora"} & {family.keys.get("adapter"), family.keys.get("finetuning_type")})
    path = run.export / ("adapter_model.safetensors" if is_adapter else "model.safetensors")
    with safe_open(path, "pt") as tensors:
        values = [tensors.get_tensor(name) for name in tensors.keys()]  # noqa: SIM118
    assert values
    assert all(value.isfinite().all() for value in values)
    account = json.loads((folder / "run" / "data.json").read_text())
    assert account["total"]["rows_read"] == len(family.rows)


@pytest.mark.parametrize("name", sliced(AXOLOTL))
def test_a_configuration_of_axolotl_runs_to_an_export(name: str, tmp_path: Path) -> None:
    assert_runs_to_an_export(tmp_path, AXOLOTL[name], AXOLOTL_KEYS)


@pytest.mark.parametrize("name", sliced(FACTORY))
def test_a_configuration_of_llama_factory_runs_to_an_export(name: str, tmp_path: Path) -> None:
    assert_runs_to_an_export(tmp_path, FACTORY[name], FACTORY_KEYS)


def test_there_are_ten_of_each() -> None:
    assert len(AXOLOTL) == len(FACTORY) == 10
