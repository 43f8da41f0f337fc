"""Where the optimizer's state rests changes no bit: losses, norms, weights and state, with clipping active."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
from plain import metrics
from safetensors.torch import load_file

from forked import train
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint.save import checkpoint_path
from tonnage.decide.decision import decide
from tonnage.decide.written import write_run
from tonnage.files.writing import write_json
from tonnage.rundir.directory import RunDirectory

SAVED, CLIP = 5, 0.5
Place = Literal["device", "host", "disk"]
Tiers = tuple[Place, Place, Place]
"""Of the optimizer's state, gradients and parameters."""
IN_MEMORY: Tiers = ("device", "device", "device")
ALL_ON_DISK: Tiers = ("disk", "disk", "disk")
ON_HOST: list[Tiers] = [("host", "host", "device"), ("host", "device", "disk")]
MOMENTS = "int8"
"""Of the quick tests: the long one and those of ``optim`` try the others."""


def written(
    folder: Path,
    workers: int,
    tiers: Tiers,
    moments: str,
    num_steps: int,
    start: tuple[RunDirectory, int] | None = None,
) -> RunDirectory:
    """A run that is ready for its workers; ``start`` is the run and the step that it goes on from."""
    memory: dict[str, Any] = {"micro_batch": 2 // workers, "moments": moments, "zero": 3}
    memory |= dict(zip(("optimizer_tier", "gradient_tier", "parameter_tier"), tiers, strict=True))
    if tiers[0] == "host":
        memory |= {"recompute": "full", "activation_tier": "host"}
    if tiers[0] != "device" and moments == "int8":
        memory["offload_dirs"] = [str(folder / "disk-a"), str(folder / "disk-b")]
        memory["optimizer_resident"] = 5 << 15  # of the tiles of ``small_tiles``
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
        "steps": num_steps,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": CLIP, "warmup": 2},
        "precision": "bf16" if workers == 1 and start is None else "fp32",
        "memory": memory,
        "launch": {"workers": workers, "threads": 1},
        "checkpoint": {"every": SAVED, "keep": 99},
        "track": [],
        "output": str(folder / f"{workers}-{'-'.join(tiers)}-{moments}{'-again' if start else ''}"),
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(text))
    decision = decide(str(path), [])
    run = RunDirectory(decision.config.output)
    write_run(run, decision)
    if start is not None:
        earlier, step = start
        checkpoint = checkpoint_path(run.checkpoints, step)
        shutil.copytree(checkpoint_path(earlier.checkpoints, step), checkpoint)
        write_json(run.resume, {"checkpoint": checkpoint.name})
    return run


def steps(run: RunDirectory) -> list[dict[str, float]]:
    return [record for record in metrics(run) if "loss" in record]


def assert_same_bits(run: RunDirectory, reference: RunDirectory, after: int = 0) -> None:
    """Losses and norms of the steps ``after`` one, and every checkpoint since: weights, moments, low halves."""
    got, want = steps(run), steps(reference)[after:]
    assert [step["step"] for step in got] == [step["step"] for step in want]
    for ours, theirs in zip(got, want, strict=True):
        assert (ours["loss"], ours["grad_norm"]) == (theirs["loss"], theirs["grad_norm"]), f"step {ours['step']}"
    for step in range(after + SAVED, int(want[-1]["step"]) + 1, SAVED):
        for file in checkpoint_path(reference.checkpoints, step).glob("*.safetensors"):
            tensors = load_file(file)
            others = load_file(checkpoint_path(run.checkpoints, step) / file.name)
            assert tensors.keys() == others.keys()
            assert any(key.startswith("optimizer.") for key in tensors)
            for key, tensor in tensors.items():
                assert tensor.equal(others[key]), key


def compare(
    folder: Path, workers: int, tiers: list[Tiers], num_steps: int, codecs: Sequence[str]
) -> dict[tuple[Tiers, str], RunDirectory]:
    """Train in every combination of tiers and hold all against memory alone."""
    write_rows(folder / "rows.jsonl", alpaca_rows(50 + 5 * num_steps))
    write_model(folder / "model", llama_config(num_hidden_layers=3))
    settings = product([IN_MEMORY, *tiers], codecs)
    runs = {setting: written(folder, workers, *setting, num_steps) for setting in settings}
    train((workers, runs.values()), small_tiles=True)
    for (tier, moments), run in runs.items():
        memory = runs[IN_MEMORY, moments]
        reference = steps(memory)
        assert any(step["grad_norm"] > CLIP for step in reference)
        assert reference[-1]["loss"] < reference[0]["loss"] - 0.5
        said = run.log.read_text()
        assert ("optimizer state on disk" in said) == (tier[0] == "disk")
        assert ("optimizer state in host memory" in said) == (tier[0] == "host")
        assert ("gradients in host memory" in said) == (tier[1] == "host")
        assert ("inputs of 3 blocks in host memory" in said) == (tier[0] == "host")
        assert ("parameters of the blocks on disk" in said) == (tier[2] == "disk")
        assert_same_bits(run, memory)
    return runs


@pytest.mark.parametrize("workers", [pytest.param(number, marks=pytest.mark.matrix) for number in (1, 2)])
def test_every_combination_of_tiers_equals_memory_bit_for_bit(workers: int, tmp_path: Path) -> None:
    places: tuple[Place, ...] = ("device", "host", "disk")
    gradients = places if workers == 1 else places[:2]
    parameters: tuple[Place, ...] = ("device", "disk")
    compare(tmp_path, workers, list(product(places, gradients, parameters))[1:], 2 * SAVED, ["fp32"])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_other_tiers_equal_memory_bit_for_bit(workers: int, tmp_path: Path) -> None:
    runs = compare(tmp_path, workers, [ALL_ON_DISK, *ON_HOST], 2 * SAVED, [MOMENTS])
    if workers == 1:
        return

    # Saved in one tier, gone on with in the other, and on one worker: blocks and scales are where they were.
    memory, disk = runs[IN_MEMORY, "int8"], runs[ALL_ON_DISK, "int8"]
    to_disk = written(tmp_path, 2, ALL_ON_DISK, "int8", 2 * SAVED, (memory, SAVED))
    to_memory = written(tmp_path, 2, IN_MEMORY, "int8", 2 * SAVED, (disk, SAVED))
    to_host = written(tmp_path, 2, ON_HOST[0], "int8", 2 * SAVED, (disk, SAVED))
    alone = written(tmp_path, 1, ALL_ON_DISK, "int8", 2 * SAVED, (disk, SAVED))
    train((2, [to_disk, to_memory, to_host]), (1, [alone]), small_tiles=True)
    for run in (to_disk, to_memory, to_host):
        assert_same_bits(run, memory, SAVED)
    for ours, theirs in zip(steps(alone), steps(memory)[SAVED:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4), ours["step"]
