"""A fixed set of short runs through the command line, of which every number and every exported byte is written down.

Two checkouts that are to compute the same are compared on one machine: bits depend on the processor.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

SECONDS = 300.0
"""For a command."""
DISK = {"optimizer_tier": "disk", "gradient_tier": "disk"}
LORA: dict[str, Any] = {"rank": 4, "alpha": 8}
PACKED_BASE: dict[str, Any] = {"precision": "bf16", "adapter": {**LORA, "quantize": "nf4"}}

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "micro-batches": {"memory": {"micro_batch": 1}},
    "selective recompute": {"memory": {"recompute": "selective"}},
    "full recompute": {"memory": {"recompute": "full"}},
    "recomputed block": {"memory": {"recompute": "full", "recompute_blocks": 1}},
    "moments in 8 bits": {"memory": {"moments": "int8"}},
    "moments in bf16": {"precision": "bf16", "memory": {"moments": "bf16"}},
    "zero 0": {"memory": {"zero": 0}, "launch": {"workers": 2}},
    "zero 1": {"memory": {"zero": 1, "micro_batch": 1}, "launch": {"workers": 2}},
    "zero 2": {"memory": {"zero": 2, "micro_batch": 1}, "launch": {"workers": 2}},
    "zero 3": {"memory": {"zero": 3}, "precision": "bf16", "launch": {"workers": 2}},
    "tensor": {"parallel": {"tensor": 2}, "launch": {"workers": 2}},
    "pipeline": {"parallel": {"pipeline": 2}, "launch": {"workers": 2}},
    "zero bubble": {"parallel": {"pipeline": 2, "schedule": "zero_bubble"}, "launch": {"workers": 2}},
    "tensor and disk": {"parallel": {"tensor": 2}, "memory": DISK, "launch": {"workers": 2}},
    "pipeline and disk": {
        "parallel": {"pipeline": 2},
        "memory": {**DISK, "parameter_tier": "disk"},
        "launch": {"workers": 2},
    },
    "optimizer on disk": {"memory": {"optimizer_tier": "disk"}},
    "gradients on disk": {"memory": {"gradient_tier": "disk", "micro_batch": 1}},
    "all on disk": {"memory": {**DISK, "parameter_tier": "disk"}, "precision": "bf16"},
    "all on disk, sharded": {"memory": {**DISK, "parameter_tier": "disk", "zero": 3}, "launch": {"workers": 2}},
    "tiles": {"memory": {**DISK, "parameter_tier": "disk", "tiles": 2}},
    "lora": {"adapter": LORA},
    "lora with dropout": {"adapter": {**LORA, "dropout": 0.1}},
    "lora over 4 bits": PACKED_BASE,
    "lora over 4 bits on disk": {**PACKED_BASE, "memory": {"parameter_tier": "disk"}},
    "lora, sharded": {"adapter": LORA, "memory": {"zero": 3}, "launch": {"workers": 2}},
    "a part of the weights": {"train": ["blocks[-1:].*"]},
    "gpt_neox": {"model": "gpt_neox"},
    "qwen3_moe": {"model": "qwen3_moe"},
    "gemma3_text": {"model": "gemma3_text"},
    "mamba2": {"model": "mamba2"},
    "falcon_h1": {"model": "falcon_h1"},
    "rows of messages": {"data": {"train": "messages.jsonl"}},
    "rows of ShareGPT": {"data": {"train": "sharegpt.jsonl"}},
    "rows of prompts": {"data": {"train": "prompts.jsonl"}},
    "rows of text": {"data": {"train": "text.jsonl", "over_length": "split"}},
    "rows of tokens": {"data": {"train": "tokens.jsonl"}},
    "validation and answers": {
        "data": {"validation": 0.1},
        "evaluate": {"every": 2, "prompts": ["what is it?", "sort 3 1 2"]},
    },
}
"""What each run has besides ``BASE``; a model is a family, and rows a file of ``write_material``."""
BASE: dict[str, Any] = {
    "model": "llama",
    "data": {"train": "alpaca.jsonl", "max_length": 96, "template": "plain", "over_length": "drop", "max_loss": 1.0},
    "batch": {"sequences": 4},
    "steps": 3,
    "optimizer": {"lr": 0.003, "clip": 0.5},
    "precision": "fp32",
    "launch": {"workers": 1, "threads": 1},
}


def record(folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Losses, norms and digests of exports of all ``RUNS``, by name; of one that is refused, what it prints."""
    models = {"llama", *(str(keys["model"]) for keys in RUNS.values() if "model" in keys)}
    write_material(folder, sorted(models))
    results = {}
    for number, (name, keys) in enumerate(RUNS.items()):
        results[name] = _record(folder, f"run-{number}", keys)
        tell(f"{name}: {results[name]}")
    return results


def write_material(folder: Path, models: list[str]) -> None:
    """Tiny models, with weights large enough that a difference shows, and the same rows in several forms."""
    from sweep.families import write_tiny
    from tiny import alpaca_rows

    for model in models:
        write_tiny(model, folder / model)
    for form, rows in _forms(alpaca_rows(80)):
        (folder / f"{form}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _forms(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    pairs = [(f"{row['instruction']} {row.get('input', '')}".strip(), row["output"]) for row in rows]
    yield "alpaca", rows
    roles = [("messages", "messages", "role", "content", "user", "assistant")]
    roles += [("sharegpt", "conversations", "from", "value", "human", "gpt")]
    for form, column, role, content, asks, answers in roles:
        turns = ([{role: asks, content: prompt}, {role: answers, content: answer}] for prompt, answer in pairs)
        yield form, [{column: both} for both in turns]
    yield "prompts", [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]
    yield "text", [{"text": f"{prompt}\n{answer}"} for prompt, answer in pairs]
    yield "tokens", [{"input_ids": list(f"{prompt}\n{answer}".encode())} for prompt, answer in pairs]


def _record(folder: Path, name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"output": str(folder / name)}
    for key, value in BASE.items():
        config[key] = {**value, **keys.get(key, {})} if isinstance(value, dict) else keys.get(key, value)
    config |= {key: value for key, value in keys.items() if key not in BASE}
    config["model"] = str(folder / config["model"])
    config["data"] |= {"train": str(folder / config["data"]["train"]), "cache": str(folder / "cache")}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    trained = _tonnage("train", str(path))
    if trained.returncode:
        return {"status": trained.returncode, "said": (trained.stdout + trained.stderr).replace(str(folder), "")}
    run = Path(config["output"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    exported = folder / f"{name}-export"
    answer = _tonnage("export", str(run), str(exported))
    result: dict[str, Any] = {
        "steps": [[line["loss"], line["grad_norm"]] for line in lines if "loss" in line],
        "evaluations": [line["eval_loss"] for line in lines if "eval_loss" in line],
        "export": answer.returncode or _digests(exported),
    }
    samples = run / "samples.jsonl"
    if samples.exists():
        result["samples"] = hashlib.sha256(samples.read_bytes()).hexdigest()
    shutil.rmtree(exported, ignore_errors=True)
    return result


def _digests(directory: Path) -> dict[str, str]:
    files = sorted(directory.glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _tonnage(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tonnage", *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
