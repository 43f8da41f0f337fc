"""ZeRO stages, hybrid sharding, recompute and accumulation: settings that change no number.

Every combination trains five steps in fp32 and is held against the plain loop: losses, gradient norms, final weights.
In bf16 every combination is run twice, bit for bit the same, and all stay close to each other.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from plain import final_weights, metrics, plain_loop
from torch import Tensor
from torch._inductor import config as inductor

from forked import train
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.decide.decision import Decision, decide
from tonnage.decide.written import write_run
from tonnage.errors import UserError
from tonnage.launch.local import run_workers
from tonnage.parallel.world import join_world
from tonnage.rundir.directory import RunDirectory
from tonnage.training.trial import can_compile

STEPS, PACKS_PER_STEP = 5, 16
ACCUMULATIONS, RECOMPUTES = (1, 4), ("none", "selective", "full")
STAGES: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((3, 1),),
    2: ((0, 1), (1, 1), (2, 1), (3, 1)),
    4: ((0, 1), (1, 1), (2, 1), (3, 1), (3, 2)),
}
"""Workers -> (ZeRO stage, groups that replicate)."""
HYBRIDS = ((0, 1), (3, 2))
"""What CI tries on four workers: whole replicas, and replicas that shard. Two workers try the others."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    write_rows(folder / "rows.jsonl", alpaca_rows(300))
    write_model(folder / "model", llama_config())
    return folder


def decided(
    folder: Path,
    workers: int,
    zero: int,
    replicate: int,
    accumulation: int,
    recompute: str,
    precision: str = "fp32",
    steps: int = STEPS,
    again: int = 0,
    compile: str = "off",
    kernels: str = "auto",
) -> Decision:
    name = f"{precision}-{workers}-zero{zero}-{replicate}x-{accumulation}-{recompute}-{again}-{compile}-{kernels}"
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
        "batch": {"sequences": PACKS_PER_STEP},
        "steps": steps,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 2},
        "precision": precision,
        "compile": compile,
        "kernels": kernels,
        "memory": {"zero": zero, "recompute": recompute, "micro_batch": PACKS_PER_STEP // workers // accumulation},
        "parallel": {"replicate": replicate},
        "launch": {"workers": workers, "threads": 1},
        "track": [],
        "output": str(folder / name),
        "seed": 3,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(text))
    decision = decide(str(path), [])
    assert decision.plan.layout.micro_batches == accumulation
    write_run(RunDirectory(decision.config.output), decision)
    return decision


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return plain_loop(decided(folder, 1, 0, 1, 1, "none"))


def every_setting(workers: int) -> list[tuple[int, int, int, str]]:
    return [
        (zero, replicate, accumulation, recompute)
        for zero, replicate in STAGES[workers]
        for accumulation in ACCUMULATIONS
        for recompute in RECOMPUTES
    ]


def in_turn(workers: int) -> list[tuple[int, int, int, str]]:
    """Every stage and accumulation with one kind of recompute each."""
    kinds = [(stage, accumulation) for stage in STAGES[workers] for accumulation in ACCUMULATIONS]
    return [(*stage, accumulation, RECOMPUTES[at % 3]) for at, (stage, accumulation) in enumerate(kinds)]


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        pytest.param(2, in_turn(2), id="2", marks=pytest.mark.slow),
        pytest.param(1, every_setting(1), id="1", marks=pytest.mark.slow),
        pytest.param(2, sorted({*every_setting(2)} - {*in_turn(2)}), id="2, the rest", marks=pytest.mark.matrix),
        pytest.param(4, [one for one in in_turn(4) if one[:2] in HYBRIDS], id="4", marks=pytest.mark.slow),
        pytest.param(4, [one for one in in_turn(4) if one[:2] not in HYBRIDS], id="4, rest", marks=pytest.mark.matrix),
    ],
)
def test_every_setting_equals_the_plain_loop(
    workers: int,
    settings: list[tuple[int, int, int, str]],
    folder: Path,
    reference: tuple[list[dict[str, float]], dict[str, Tensor]],
) -> None:
    runs = {setting: RunDirectory(decided(folder, workers, *setting).config.output) for setting in settings}
    train((workers, runs.values()))
    equal_the_plain_loop(workers, runs, reference)


@pytest.mark.matrix
@pytest.mark.parametrize("workers", [1, 2])
def test_without_kernels_runs_equal_the_plain_loop(
    workers: int, folder: Path, reference: tuple[list[dict[str, float]], dict[str, Tensor]]
) -> None:
    settings = [(3, 1, accumulation, "none") for accumulation in ACCUMULATIONS]
    runs = {
        setting: RunDirectory(decided(folder, workers, *setting, kernels="plain").config.output) for setting in settings
    }
    train((workers, runs.values()))
    assert all("kernels that are off: attention, products" in run.log.read_text() for run in runs.values())
    equal_the_plain_loop(workers, runs, reference)


def equal_the_plain_loop(
    workers: int,
    runs: dict[tuple[int, int, int, str], RunDirectory],
    reference: tuple[list[dict[str, float]], dict[str, Tensor]],
) -> None:
    steps, weights = reference
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    for setting, run in runs.items():
        got = metrics(run)
        assert len(got) == STEPS
        for ours, plain in zip(got, steps, strict=True):
            where = f"{workers} workers, {setting}, step {ours['step']}"
            assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5), where
            assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), where
        for name, weight in final_weights(run).items():
            difference = float((weight - weights[name]).norm() / weights[name].norm())
            assert difference < 1e-5, f"{workers} workers, {setting}, {name}"


BF16_STEPS = 2


@pytest.fixture(scope="module")
def bf16_losses(folder: Path) -> list[float]:
    """Losses of one worker in bf16."""
    run = RunDirectory(decided(folder, 1, 3, 1, 1, "none", "bf16", BF16_STEPS, again=2).config.output)
    train((1, [run]))
    return [step["loss"] for step in metrics(run)]


@pytest.mark.matrix
@pytest.mark.parametrize("workers", [2])
def test_bf16_repeats_itself_and_stages_agree(workers: int, folder: Path, bf16_losses: list[float]) -> None:
    runs = {
        (setting, again): RunDirectory(decided(folder, workers, *setting, "bf16", BF16_STEPS, again).config.output)
        for setting in in_turn(workers)
        for again in (0, 1)
    }
    train((workers, runs.values()))
    assert bf16_losses[-1] < bf16_losses[0]
    for setting in in_turn(workers):
        first, second = (metrics(runs[setting, again]) for again in (0, 1))
        assert len(first) == BF16_STEPS
        for a, b, one in zip(first, second, bf16_losses, strict=True):
            where = f"{workers} workers, {setting}, step {a['step']}"
            assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"]), where
            assert a["loss"] == pytest.approx(one, rel=2e-3), where


@pytest.mark.matrix
def test_compiled_blocks_equal_the_plain_loop(
    folder: Path, reference: tuple[list[dict[str, float]], dict[str, Tensor]]
) -> None:
    runs = [RunDirectory(decided(folder, 2, 3, 1, 1, "full", compile="on").config.output)]
    train((2, runs))
    for run in runs:
        assert "not compiled" not in run.log.read_text()
        for ours, plain in zip(metrics(run), reference[0], strict=True):
            assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


@pytest.mark.matrix
def test_without_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` goes on and says why, where it tries: on a GPU. ``on`` does not start."""
    for variable, value in (("CXX", "no-such-compiler"), ("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))):
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))  # which read its variables when it was imported
    monkeypatch.setattr(inductor, "force_disable_caches", True)
    auto = RunDirectory(decided(folder, 1, 3, 1, 1, "none", steps=2, compile="auto").config.output)
    run_workers(auto, 1, 1)
    assert len(metrics(auto)) == 2
    assert "compiled" not in auto.log.read_text()
    said: list[str] = []
    with join_world() as world:
        assert not can_compile("auto", llama_config(), world, torch.float32, said.append)
    assert said[0].startswith("blocks are not compiled, because one could not be")
    on = RunDirectory(decided(folder, 1, 3, 1, 1, "none", steps=2, compile="on").config.output)
    with pytest.raises(UserError, match="does not compile"):
        run_workers(on, 1, 1)
