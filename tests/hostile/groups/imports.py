"""Configurations of other programs, of each kind that is read, and saved command lines."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hostile import mutations
from hostile.case import Case
from hostile.forking import Ended
from hostile.stock import Stock
from hostile.strings import CANARY, SHELL

DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                          "offload_param": {"device": "nvme", "nvme_path": "/tmp"}, "overlap_comm": True},
    "bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}  # fmt: skip
ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1,
    "num_processes": 4, "main_training_function": "main", "use_cpu": False,
    "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": True,
                    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "model_name_or_path": "a/b", "dataset_name": "c/d", "learning_rate": 2e-5, "num_train_epochs": 3, "packing": True,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "lr_scheduler_type": "cosine",
    "max_length": 512,
    "warmup_ratio": 0.1, "output_dir": "out", "save_steps": 100, "report_to": ["tensorboard"], "seed": 3,
}  # fmt: skip
AXOLOTL: dict[str, Any] = {
    "base_model": "a/b", "adapter": "qlora", "load_in_4bit": True, "lora_r": 8, "lora_alpha": 16,
    "lora_target_modules": ["q_proj", "v_proj"], "chat_template": "chatml", "sequence_len": 512, "sample_packing": True,
    "datasets": [{"path": "rows.jsonl", "type": "chat_template", "field_messages": "talk", "split": "train[:5%]",
                  "message_property_mappings": {"role": "from", "content": "value"}, "roles": {"user": ["human"]}}],
    "val_set_size": 0.1, "evals_per_epoch": 2, "saves_per_epoch": 1, "micro_batch_size": 2, "num_epochs": 3,
    "gradient_accumulation_steps": 4, "learning_rate": 2e-4, "lr_scheduler": "cosine", "warmup_ratio": 0.1,
    "optimizer": "adamw_bnb_8bit", "bf16": "auto", "gradient_checkpointing": True, "output_dir": "out",
    "special_tokens": {"pad_token": "<pad>"}, "fsdp_config": {"reshard_after_forward": True, "offload_params": True},
}  # fmt: skip
LLAMA_FACTORY: dict[str, Any] = {
    "model_name_or_path": "a/b", "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 8,
    "lora_target": "all", "dataset": "rows,more", "dataset_dir": "data", "template": "llama3", "cutoff_len": 512,
    "max_samples": 100, "quantization_bit": 4, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True,
    "output_dir": "saves/x", "ddp_timeout": 1800, "val_size": 0.1, "eval_strategy": "steps", "eval_steps": 50,
}  # fmt: skip
DATASET_INFO: dict[str, Any] = {
    "rows": {"file_name": "rows.json", "columns": {"prompt": "q", "response": "a"}, "num_samples": 5},
    "more": {"hf_hub_url": "a/b", "formatting": "sharegpt", "tags": {"role_tag": "role", "content_tag": "content",
                                                                      "user_tag": "me"}, "subset": "x"},
}  # fmt: skip
SCRIPT = """#!/bin/bash
MODEL=a/b
export CUDA_VISIBLE_DEVICES=0,1
ARGS=(--learning_rate 2e-5 --bf16)
torchrun --nproc_per_node 2 train.py \\
    --model_name_or_path $MODEL "${ARGS[@]}" --output_dir out/${NAME:-x} --num_train_epochs 3
"""


def make(chance: random.Random, folder: Path, stock: Stock) -> Case:
    """One file, or two that belong together."""
    work = folder / "work"
    given: list[tuple[Path, Any]] = []
    for number in range(chance.choice((1, 1, 1, 2))):
        way = chance.randrange(6)
        if way == 0:
            given.append((work / f"ds{number}.json", DEEPSPEED))
        elif way == 1:
            given.append((work / f"a{number}.yaml", ACCELERATE))
        elif way == 2:
            given.append((work / f"trl{number}.{chance.choice(('yaml', 'json'))}", ARGUMENTS))
        elif way == 3:
            given.append((work / f"axolotl{number}.yaml", AXOLOTL))
        elif way == 4:
            (work / "data").mkdir(exist_ok=True)
            info = mutations.changed(chance, DATASET_INFO, chance.choice((0, 1, 2, 5)))
            (work / "data" / "dataset_info.json").write_text(_json(info), errors="surrogatepass")
            given.append((work / f"factory{number}.yaml", LLAMA_FACTORY))
        else:
            given.append((work / f"run{number}.sh", None))
    unknown = ""
    for path, found in given:
        unknown = _write(chance, path, found, unknown)
    words = ["import", *(path.name for path, _ in given)]
    words += chance.choice(([], [], ["--json"], ["-o", "config.yaml"], ["--strict"], ["--partial"], ["--workers", "4"]))
    shown = unknown

    def names_it(ended: Sequence[Ended]) -> str:
        said = ended[-1].out + ended[-1].err
        return f"the key {shown} is not accounted for" if shown and ended[-1].status == 0 and shown not in said else ""

    return Case([words], check=names_it)


def _write(chance: random.Random, path: Path, found: Any, unknown: str) -> str:
    """Write a file with something odd in it; returns the name of a key that nobody knows, if it has one."""
    way = chance.randrange(8)
    if way == 0:
        if chance.randrange(2):
            os.mkfifo(path)
        else:
            path.symlink_to(chance.choice(("/dev/zero", path.name, "/etc", "nothing")))
        return unknown
    if found is None:
        path.write_bytes(_script(chance).encode("utf-8", "surrogatepass"))
        return unknown
    if way == 1:
        path.write_text(mutations.deep(chance))
        return unknown
    if way == 2:
        name = f"key_{chance.randrange(10**6)}"
        changed = {**found, name: chance.choice((1, "x", True))}
        path.write_text(json.dumps(changed))
        return name
    if way == 3:
        path.write_bytes(mutations.content(chance, json.dumps(found).encode()))
        return unknown
    if way == 4:
        number = chance.choice((1000, 100_000))
        path.write_text(json.dumps({**found, **{f"k{n}": n for n in range(number)}}))
        return unknown
    changed = mutations.changed(chance, found, chance.choice((1, 2, 5)))
    if path.suffix == ".yaml" and chance.randrange(2):
        try:
            text = yaml.safe_dump(changed)
        except (ValueError, yaml.YAMLError):
            text = "a: 1"
        if chance.randrange(3) == 0:
            text += chance.choice(
                ("s: !!set {a, b}\n", "d: 2001-01-01\n", "b: !!binary aGk=\n", "x: &a [*a]\n", "k: *k\n")
            )
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        path.write_text(_json(changed), errors="surrogatepass")
    return unknown


def _json(found: Any) -> str:
    try:
        return json.dumps(found)
    except ValueError:  # a number of more digits than Python prints
        return '{"train_batch_size": ' + "9" * 5000 + "}"


def _script(chance: random.Random) -> str:
    lines = SCRIPT.splitlines()
    way = chance.randrange(8)
    if way == 0:
        doubling = "\n".join(f"A{n}=$A{n - 1}$A{n - 1}" for n in range(1, 60))
        return f"A0=xxxxxxxx\n{doubling}\n{SCRIPT.replace('out/', '$A59/')}"
    if way == 1:
        lines.insert(chance.randrange(len(lines)), f"X=$(touch {CANARY}); touch {CANARY}; `touch {CANARY}`")
    elif way == 2:
        lines.insert(1, f"MODEL={chance.choice(SHELL)}")
    elif way == 3:
        return SCRIPT.replace(
            "${NAME:-x}",
            chance.choice(
                ("${" * 5000, "${A:-" * 3000 + "}" * 3000, "$" * 99999, "${!A}", "$((9**99999999))", "${A//x/y}")
            ),
        )
    elif way == 4:
        return SCRIPT + f" --{mutations.text(chance)} {mutations.text(chance)}"
    elif way == 5:
        return "A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + 'python t.py --a "${A[@]}"'
    elif way == 6:
        return mutations.content(chance, SCRIPT.encode()).decode("utf-8", "replace")
    else:
        return SCRIPT + " " + " ".join(f"--k{n} {n}" for n in range(chance.choice((10, 30_000))))
    return "\n".join(lines)
