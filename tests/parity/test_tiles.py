"""Embedding and head in tiles: the numbers of whole ones, with a tile of them in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import metrics
from ready import Start, ready, run_of
from safetensors import safe_open
from safetensors.torch import load_file

from forked import train, work
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint.save import checkpoint_path
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.samples import read_samples

STEPS, SAVED = 4, 2
ON_DISK: dict[str, Any] = {"parameter_tier": "disk", "gradient_tier": "disk", "optimizer_tier": "disk"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiles")
    write_rows(folder / "rows.jsonl", alpaca_rows(120))
    write_model(folder / "tied", llama_config())
    write_model(folder / "untied", llama_config(tie_word_embeddings=False, vocab_size=263))
    return folder


def written(
    folder: Path,
    name: str,
    workers: int = 1,
    start: Start | None = None,
    model: str = "untied",
    precision: str = "fp32",
    replicate: int = 1,
    **memory: Any,
) -> RunDirectory:
    text = {
        "model": str(folder / model),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "validation": 0.1,
            "max_length": 64,
            "template": "plain",
            "over_length": "drop",
            "max_loss": 1.0,
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 4},
        "steps": STEPS,
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 2},
        "precision": precision,
        "memory": {"zero": 3, "micro_batch": 2 if workers == 1 else 1, "moments": "fp32", **memory},
        "parallel": {"replicate": replicate},
        "launch": {"workers": workers, "threads": 1},
        "checkpoint": {"every": SAVED, "keep": 99},
        "evaluate": {"every": SAVED, "prompts": 1, "max_new_tokens": 8},
        "track": [],
        "output": str(folder / name),
    }
    return run_of(ready(folder, text, start))


def assert_equal(run: RunDirectory, reference: RunDirectory, after: int = 0, rel: float = 1e-6) -> None:
    """Losses, norms, evaluations; what checkpoints hold has the same names and shapes."""
    for figure in ("loss", "grad_norm", "eval_loss"):
        got, want = (
            [record[figure] for record in one.read_metrics() if figure in record and record["step"] > after]
            for one in (run, reference)
        )
        assert got == pytest.approx(want, rel=rel), figure
        assert len(got) == (STEPS - after) // (SAVED if figure == "eval_loss" else 1)
    assert read_samples(run)[-1] == read_samples(reference)[-1]
    assert forms(run) == forms(reference)


def forms(run: RunDirectory) -> dict[str, tuple[int, ...]]:
    """Names of what the last checkpoint holds, and the shapes of whole tensors."""
    found: dict[str, tuple[int, ...]] = {}
    for file in checkpoint_path(run.checkpoints, STEPS).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            offsets = json.loads(tensors.metadata()["DCP_SHARDING_INFO"])
            for name in tensors.keys():  # noqa: SIM118
                offset, shape = offsets[name]["saved_offsets"], tensors.get_slice(name).get_shape()
                ends = [start + size for start, size in zip(offset, shape, strict=True)]
                found[name] = tuple(map(max, zip(ends, found.get(name, ends), strict=True)))
    return found


def test_units_equal_whole_weights(tmp_path: Path) -> None:
    """More tiles than rows, shards that are not full, and one that is empty are among them."""
    settings = ["37:4:0:0", "37:4:1:0", "40:7:0:2.5", "37:100:1:2.5", "4:2:1:0"]
    work("tiled_units", *((workers, settings) for workers in (1, 2, 3)))


@pytest.mark.matrix
def test_tiles_from_disk_equal_memory(folder: Path) -> None:
    whole = written(folder, "whole-1", parameter_tier="device", gradient_tier="device", optimizer_tier="device")
    tiles = written(folder, "tiles-1", tiles=5, **ON_DISK)
    train((1, [whole, tiles]))
    assert "embedding and head in 5" in tiles.log.read_text()
    assert_equal(tiles, whole)


@pytest.mark.slow
def test_gathered_tiles_equal_whole_units(folder: Path) -> None:
    whole, tiles = (written(folder, f"gathered-{number}", 2, model="tied", tiles=number) for number in (1, 4))
    train((2, [whole, tiles]))
    assert_equal(tiles, whole)


@pytest.mark.matrix
def test_tiles_in_every_layout_go_on_from_every_other(folder: Path) -> None:
    """Also with moments of 8 bits, whose blocks tiles would cut, one forward for a step, and hybrid sharding."""
    whole = {model: written(folder, f"all-{model}", model=model) for model in ("tied", "untied")}
    settings: list[tuple[int, str, dict[str, Any]]] = [
        (1, "tied", {"tiles": 3, **ON_DISK, "micro_batch": 4}),
        (1, "tied", {"tiles": 3, "parameter_tier": "disk"}),
        (2, "untied", {"tiles": 4, **ON_DISK}),
        (2, "untied", {"tiles": 500}),
        (4, "tied", {"tiles": 2, "replicate": 2}),
        (2, "tied", {"tiles": 4, "gradient_tier": "host", "recompute": "full"}),
    ]
    runs = [written(folder, f"all-{n}", one[0], model=one[1], **one[2]) for n, one in enumerate(settings)]
    on = {workers: [run for run, one in zip(runs, settings, strict=True) if one[0] == workers] for workers in (1, 2, 4)}
    train((1, [*whole.values(), *on[1]]), (2, on[2]), (4, on[4]))
    for run, (_, model, _) in zip(runs, settings, strict=True):
        assert_equal(run, whole[model], rel=1e-5)

    again = {
        written(folder, "again-1", 1, (runs[2], SAVED), tiles=2, **ON_DISK): whole["untied"],
        written(folder, "again-2", 1, (runs[3], SAVED)): whole["untied"],
        written(folder, "again-3", 1, (runs[4], SAVED), model="tied", tiles=7, **ON_DISK): whole["tied"],
    }
    gathers = written(folder, "again-4", 2, (whole["tied"], SAVED), model="tied", tiles=5)
    train((1, again), (2, [gathers]))
    for run, reference in (again | {gathers: whole["tied"]}).items():
        assert_equal(run, reference, SAVED, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["int8", "bf16"])
def test_where_states_of_tiles_rest_changes_no_bit(moments: str, folder: Path) -> None:
    ways: list[dict[str, Any]] = [{"parameter_tier": "disk"}, ON_DISK]
    how: dict[str, Any] = {"precision": "bf16", "moments": moments, "tiles": 2}
    runs = [written(folder, f"{moments}-{n}", **how, **where) for n, where in enumerate(ways)]
    train((1, runs))
    for step in (SAVED, STEPS):
        first, second = (load_file(next(checkpoint_path(run.checkpoints, step).glob("*.safetensors"))) for run in runs)
        assert first.keys() == second.keys()
        assert all(tensor.equal(second[name]) for name, tensor in first.items())


@pytest.mark.matrix
@pytest.mark.parametrize("how", [{"parameter_tier": "disk"}, ON_DISK], ids=["device", "disk"])
def test_a_gradient_of_a_tile_that_is_not_finite_changes_nothing(how: dict[str, Any], folder: Path) -> None:
    name = f"poisoned-{len(how)}"
    run = written(folder, name, precision="bf16", tiles=5, **how)
    work("poisoned_runs", (1, ["all", "model.embed_tokens", "gradient", str(run.path)]))
    assert all(record["skipped"] for record in metrics(run) if "loss" in record)
    saved = load_file(next(checkpoint_path(run.checkpoints, STEPS).glob("*.safetensors")))
    weights = load_file(folder / "untied" / "model.safetensors")
    for key, tensor in saved.items():
        kind, _, rest = key.partition(".")
        if kind == "model":
            low = saved[f"optimizer.{rest}.low"]
            assert tensor.equal(weights[rest].bfloat16()), key
            assert not low.any() or weights[rest].dtype == torch.float32
        elif not key.endswith(".low"):
            assert not tensor.any(), key


@pytest.mark.matrix
def test_a_quarter_of_the_largest_head_is_never_in_memory(tmp_path: Path) -> None:
    """256,000 tokens of 4,096 numbers on disk, 2.1 GB and as much of a gradient."""
    num_bytes, *grown, loss = json.loads(work("large_head", (1, [str(tmp_path), "256000", "4096", "32"])))
    assert num_bytes == 2 * 256_000 * 4096
    assert loss > 0
    assert max(grown) < num_bytes / 4


@pytest.mark.matrix
def test_a_quarter_of_a_head_is_never_in_memory(tmp_path: Path) -> None:
    """Of 0.5 GB, enough for a leak to show beside what products leave behind."""
    num_bytes, *grown, _ = json.loads(work("large_head", (1, [str(tmp_path), "128000", "2048", "64"])))
    assert max(grown) < num_bytes / 4
