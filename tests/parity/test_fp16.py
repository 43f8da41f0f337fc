"""fp16 on one worker: its weights are fp16, the rest of their masters is the optimizer's, wherever that rests; a run
goes on from such a checkpoint on several workers, whose shards are the masters, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain import metrics
from ready import Start, ready, run_of

from forked import train
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint.save import checkpoint_path
from tonnage.checkpoint.shards import Shards
from tonnage.kernels.adamw import join
from tonnage.rundir.directory import RunDirectory

STEPS, SAVED = 8, 4


def written(
    folder: Path,
    name: str,
    workers: int,
    start: Start | None = None,
    precision: str = "fp16",
    optimizer: dict[str, Any] | None = None,
    **memory: Any,
) -> RunDirectory:
    scale = optimizer or {"loss_scale_growth": 3}
    text = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 128, "template": "plain", "cache": str(folder)},
        "batch": {"sequences": 4},
        "steps": STEPS,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 2, **scale},
        "precision": precision,
        "memory": {"zero": 3, "micro_batch": 2, **memory},
        "launch": {"workers": workers, "threads": 1},
        "checkpoint": {"every": SAVED, "keep": 99},
        "output": str(folder / name),
    }
    return run_of(ready(folder, text, start))


@pytest.mark.slow
def test_a_scale_of_one_goes_on_as_it_was(tmp_path: Path) -> None:
    """With the good steps that it had: it grows when it would have grown."""
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(60))
    write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    scale = {"loss_scale": 1, "loss_scale_growth": 5}
    whole = written(tmp_path, "whole", 1, optimizer=scale)
    train((1, [whole]))
    later = written(tmp_path, "later", 1, (whole, SAVED), optimizer=scale)
    train((1, [later]))
    scales = [record["loss_scale"] for record in metrics(whole) if "loss_scale" in record]
    assert scales == [1] * 5 + [2] * 3
    assert [record["loss_scale"] for record in metrics(later) if "loss_scale" in record] == scales[SAVED:]


def losses(run: RunDirectory) -> list[float]:
    return [record["loss"] for record in metrics(run) if "loss" in record]


@pytest.mark.matrix
def test_one_worker_keeps_no_weights_in_fp32(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(200))
    write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    alone, exact, two = (
        written(tmp_path, "alone", 1),
        written(tmp_path, "exact", 1, precision="fp32"),
        written(tmp_path, "two", 2),
    )
    elsewhere = [
        written(tmp_path, f"on-{tier}", 1, optimizer_tier=tier, gradient_tier=tier) for tier in ("host", "disk")
    ]
    train((1, [alone, exact, *elsewhere]), (2, [two]))
    assert losses(alone)[-1] < losses(alone)[0] - 0.3
    assert losses(alone) == pytest.approx(losses(exact), rel=1e-2)
    assert losses(alone) == pytest.approx(losses(two), rel=1e-3)
    for run in elsewhere:
        assert losses(run) == losses(alone), run.path.name
    shards = Shards(checkpoint_path(alone.checkpoints, SAVED))
    names = [name.removeprefix("model.") for name in shards.names("model.")]
    assert {shards.dtype(f"model.{name}") for name in names} == {torch.float16}
    onward, back = written(tmp_path, "onward", 2, (alone, SAVED)), written(tmp_path, "back", 1, (two, SAVED))
    same = written(tmp_path, "same", 1, (alone, SAVED))
    train((2, [onward]), (1, [back, same]))
    assert losses(same) == losses(alone)[SAVED:]
    assert losses(onward) == pytest.approx(losses(alone)[SAVED:], rel=1e-3)
    assert losses(back) == pytest.approx(losses(two)[SAVED:], rel=1e-3)
    assert "masters: float16 weight and low half joined to fp32, bit for bit" in onward.log.read_text()
    assert "masters: fp32 split into float16 weight and low half, bit for bit" in back.log.read_text()
    name = next(name for name in names if name.endswith("q_proj.weight"))
    region = tuple(slice(0, size) for size in shards.shape(f"model.{name}"))
    weight, low = (shards.read(key, region) for key in (f"model.{name}", f"optimizer.{name}.low"))
    assert low.dtype == torch.int32
    master = join(weight, low)
    assert torch.equal(master.half(), weight)
    assert not torch.equal(master, weight.float())
