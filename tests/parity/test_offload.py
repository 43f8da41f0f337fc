"""Where the optimizer's state rests changes no bit: losses, norms, weights and state, with clipping active."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from plain import metrics
from rich.console import Console
from safetensors.torch import load_file

from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.cli.decide import decide
from tonnage.cli.train import write_run
from tonnage.launch.local import run_workers
from tonnage.rundir import RunDirectory

STEPS, CLIP = 20, 0.5
TIERS, MOMENTS = ("device", "disk"), ("fp32", "int8")


def written(folder: Path, workers: int, tier: str, moments: str) -> RunDirectory:
    memory: dict[str, Any] = {"micro_batch": 2 // workers, "moments": moments, "optimizer_tier": tier}
    if tier == "disk" and moments == "int8":
        memory["offload_dirs"] = [str(folder / "disk-a"), str(folder / "disk-b")]
    text = {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": 64,
            "template": "plain",
            "over_length": "drop",
            "max_loss": 1.0,
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 4},
        "steps": STEPS,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": CLIP, "warmup": 2},
        "precision": {1: "bf16", 2: "fp32"}[workers],
        "memory": memory,
        "launch": {"workers": workers, "threads": 1},
        "track": [],
        "output": str(folder / f"{workers}-{tier}-{moments}"),
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(text))
    decision = decide(str(path), [], Console(quiet=True))
    run = RunDirectory(decision.config.output)
    write_run(run, decision)
    return run


@pytest.mark.parametrize("workers", [1, 2])
def test_state_on_disk_equals_state_in_memory_bit_for_bit(workers: int, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(150))
    write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    runs = {setting: written(tmp_path, workers, *setting) for setting in product(TIERS, MOMENTS)}
    command = [sys.executable, str(Path(__file__).with_name("small_tiles.py")), *(str(r.path) for r in runs.values())]
    run_workers(runs["device", "fp32"], workers, 1, command=command)
    for moments in MOMENTS:
        memory, disk = runs["device", moments], runs["disk", moments]
        want, got = metrics(memory), metrics(disk)
        assert len(got) == STEPS
        assert any(step["grad_norm"] > CLIP for step in want)
        assert want[-1]["loss"] < want[0]["loss"] - 0.5
        for ours, theirs in zip(got, want, strict=True):
            assert (ours["loss"], ours["grad_norm"]) == (theirs["loss"], theirs["grad_norm"]), f"step {ours['step']}"
        assert "optimizer state on disk" in disk.log.read_text()
        (saved,) = memory.checkpoints.iterdir()
        (saved_from_disk,) = disk.checkpoints.iterdir()
        files = sorted(path.name for path in saved.glob("*.safetensors"))
        assert len(files) == workers
        for name in files:
            tensors, others = load_file(saved / name), load_file(saved_from_disk / name)
            assert tensors.keys() == others.keys()
            assert any(key.startswith("optimizer.") for key in tensors)
            for key, tensor in tensors.items():
                assert tensor.equal(others[key]), key
