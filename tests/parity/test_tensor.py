"""Blocks computed by several ranks together (``parallel.tensor``): the same numbers as one rank, in every layout.

Losses, gradient norms and final weights are held against the plain loop, for a family with grouped queries and tied
embeddings over a vocabulary of odd size, and one with fused queries, keys and values, biases and a head of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import final_weights, metrics, plain_loop
from ready import Start, ready
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, Gemma2Config, PhiConfig, PreTrainedConfig, Qwen3Config

from forked import train, work
from tiny import alpaca_rows, byte_tokenizer, llama_config, neox_config, write_model, write_rows
from tonnage.checkpoint.description import ExportForm
from tonnage.checkpoint.export import Start as StartedFrom
from tonnage.checkpoint.export import export
from tonnage.checkpoint.save import complete_checkpoints
from tonnage.decide.decision import Decision
from tonnage.rundir.directory import RunDirectory

STEPS, SAVED, SAVED_AGAIN, LONG = 4, 2, 4, 8
SHAPE: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 257,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": llama_config(num_hidden_layers=2, vocab_size=259),
    "neox": neox_config(num_hidden_layers=2, hidden_size=96, intermediate_size=200),
    # Norms of the heads; logits that are squashed and embeddings that are scaled; a bias of the head.
    "qwen3": Qwen3Config(**GROUPED),
    "gemma2": Gemma2Config(**GROUPED, sliding_window=9, query_pre_attn_scalar=8),
    "phi": PhiConfig(**SHAPE),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    write_rows(folder / "rows.jsonl", alpaca_rows(200))
    for family, config in FAMILIES.items():
        write_model(folder / family, config)
        with_biases(folder / family / "model.safetensors")
    return folder


def with_biases(file: Path) -> None:
    """Biases that are not zero, so that one in the wrong place shows."""
    chance, tensors = torch.Generator().manual_seed(1), load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensor.normal_(std=0.1, generator=chance)
    save_file(tensors, file, {"format": "pt"})


def decided(
    folder: Path,
    family: str,
    workers: int,
    tensor: int = 1,
    name: str = "",
    start: Start | None = None,
    **keys: Any,
) -> Decision:
    """A run that is ready for its workers; ``start`` is the run and the step that it goes on from."""
    text: dict[str, Any] = {
        "model": str(folder / family),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": 96,
            "template": "plain",
            "over_length": "drop",
            "max_loss": 1.0,
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 8},
        "steps": STEPS,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 2},
        "precision": "fp32",
        "memory": {"micro_batch": 2, "zero": 3, "recompute": "none"},
        "parallel": {"tensor": tensor},
        "launch": {"workers": workers, "threads": 1},
        "checkpoint": {"keep": 99},
        "track": [],
        "output": str(folder / f"{family}-{workers}-{tensor}-{name}"),
        "seed": 3,
    }
    for key, value in keys.items():
        text[key] = text[key] | value if isinstance(value, dict) else value
    return ready(folder, text, start)


Reference = tuple[list[dict[str, float]], dict[str, Tensor]]
References = Callable[[str], Reference]


@pytest.fixture(scope="module")
def references(folder: Path) -> References:
    return cache(lambda family: plain_loop(decided(folder, family, 1)))


def assert_same_numbers(run: RunDirectory, reference: Reference) -> None:
    steps, weights = reference
    got = metrics(run)
    assert len(got) == len(steps)
    for ours, plain in zip(got, steps, strict=True):
        where = f"{run.path.name}, step {ours['step']}"
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5), where
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), where
    found = final_weights(run)
    assert weights.keys() - found.keys() <= {"lm_head.weight"}  # which may be the embedding
    for name, weight in found.items():
        difference = float((weight - weights[name]).norm() / weights[name].norm())
        assert difference < 1e-5, f"{run.path.name}, {name}"


def train_all(decisions: list[Decision], references: References) -> None:
    train((decisions[0].plan.workers, [RunDirectory(decision.config.output) for decision in decisions]))
    for decision in decisions:
        assert_same_numbers(RunDirectory(decision.config.output), references(Path(decision.config.model).name))


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(folder: Path, references: References) -> None:
    keys = {"llama": "none", "neox": "selective"}
    train_all([decided(folder, name, 2, 2, memory={"recompute": kind}) for name, kind in keys.items()], references)


@pytest.mark.matrix
def test_other_families_and_recompute(folder: Path, references: References) -> None:
    keys: dict[str, dict[str, str]] = {"phi": {}, "llama": {"recompute": "full", "activation_tier": "host"}}
    train_all([decided(folder, name, 2, 2, "other", memory=memory) for name, memory in keys.items()], references)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_rest_of_the_families(family: str, folder: Path, references: References) -> None:
    train_all([decided(folder, family, 2, 2, "other")], references)


@pytest.mark.matrix
def test_two_by_two_ranks_compute_what_one_does(folder: Path, references: References) -> None:
    stages: list[dict[str, Any]] = [
        {"memory": {"zero": 3, "recompute": "selective"}},
        {"memory": {"zero": 2, "recompute": "full", "activation_tier": "host"}},
        {"memory": {"zero": 0}},
    ]
    train_all(
        [
            decided(folder, family, 4, 2, f"stage-{number}", **keys)
            for family in ("llama", "neox")
            for number, keys in enumerate(stages)
        ],
        references,
    )


@pytest.mark.matrix
def test_compiled_blocks_and_16_bits(folder: Path, references: References) -> None:
    compiled = decided(folder, "llama", 2, 2, "compiled", compile="on", memory={"recompute": "none"})
    elsewhere = {"recompute": "full", "activation_tier": "host"}
    away = decided(folder, "llama", 2, 2, "away", compile="on", memory=elsewhere)
    alone = decided(folder, "llama", 1, 1, "bf16", precision="bf16")
    halves = decided(folder, "llama", 2, 2, "bf16", precision="bf16")
    rounded = decided(folder, "llama", 2, 2, "rounded", precision="bf16", memory={"moments": "bf16"})
    scaled = decided(folder, "llama", 2, 2, "fp16", precision="fp16")
    runs = {
        name: RunDirectory(one.config.output)
        for name, one in zip("ceahrs", (compiled, away, alone, halves, rounded, scaled), strict=True)
    }
    train((2, [runs[name] for name in "cehrs"]), (1, [runs["a"]]))
    for name in "ce":
        assert "not compiled" not in runs[name].log.read_text()
        assert_same_numbers(runs[name], references("llama"))
    assert all(step["host"]["copied_bytes"] > 0 for step in metrics(runs["e"]))
    for name in "hrs":
        for ours, one in zip(metrics(runs[name]), metrics(runs["a"]), strict=True):
            assert ours["loss"] == pytest.approx(one["loss"], rel=2e-3), (name, ours["step"])


@pytest.mark.matrix
def test_a_run_goes_on_in_another_layout_and_back(folder: Path) -> None:
    def written(name: str, workers: int, tensor: int, start: Start | None = None) -> RunDirectory:
        keys: dict[str, Any] = {"steps": LONG, "checkpoint": {"every": SAVED}, "memory": {"micro_batch": 1}}
        return RunDirectory(decided(folder, "llama", workers, tensor, name, start, **keys).config.output)

    whole, layouts = written("whole", 4, 2), [(4, 1), (1, 1), (2, 2), (2, 1)]
    on = {at: written("on", *at, (whole, SAVED)) for at in layouts}
    back = [written(f"back-{at[0]}-{at[1]}", 4, 2, (run, SAVED_AGAIN)) for at, run in on.items()]

    train((4, [whole, on[4, 1]]), (2, [on[2, 2], on[2, 1]]), (1, [on[1, 1]]), (4, back))
    reference = {record["step"]: record for record in metrics(whole)}
    for run, after in [*((run, SAVED) for run in on.values()), *((run, SAVED_AGAIN) for run in back)]:
        got = metrics(run)
        assert [record["step"] for record in got] == list(range(after + 1, LONG + 1)), run.path.name
        for record in got:
            where, want = f"{run.path.name}, step {record['step']}", reference[record["step"]]
            assert record["loss"] == pytest.approx(want["loss"], rel=1e-5), where
            for same in ("tokens", "supervised_tokens", "lr", "epoch"):
                assert record[same] == want[same], where


@pytest.mark.matrix
def test_what_is_saved_again_without_a_step_is_exported_bit_for_bit(folder: Path) -> None:
    """From fp32 masters in four parts to halves in two, to halves on one rank, and back."""

    def written(name: str, workers: int, tensor: int, start: Start | None = None) -> RunDirectory:
        keys: dict[str, Any] = {"steps": 2, "precision": "bf16"}
        return RunDirectory(decided(folder, "neox", workers, tensor, name, start, **keys).config.output)

    whole = written("bits", 4, 2)
    halves = written("bits-halves", 2, 2, (whole, 2))
    alone = written("bits-alone", 1, 1, (halves, 3))
    back = written("bits-back", 4, 2, (alone, 4))
    work(
        "train_runs",
        (4, [str(whole.path)]),
        *((workers, [f"{run.path}+"]) for workers, run in ((2, halves), (1, alone), (4, back))),
    )
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    exported = []
    for number, run in enumerate((whole, halves, alone, back)):
        target = folder / f"exported-{number}"
        export(
            complete_checkpoints(run.checkpoints)[-1],
            target,
            ExportForm(AutoConfig.from_pretrained(folder / "neox"), folder / "tokenizer", [256], torch.float32),
            StartedFrom(folder / "neox"),
        )
        exported.append((target / "model.safetensors").read_bytes())
    assert all(one == exported[0] for one in exported)
