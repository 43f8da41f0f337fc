"""How many blocks are recomputed whole changes no bit: losses and gradient norms, with clipping active."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plain import metrics

from forked import train
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.decide.decision import decide
from tonnage.decide.written import write_run
from tonnage.rundir.directory import RunDirectory

BLOCKS, STEPS = 4, 4
NONE: dict[str, Any] = {"recompute": "none"}
ALL: dict[str, Any] = {"recompute": "full"}
SOME: list[dict[str, Any]] = [{"recompute_blocks": number} for number in (1, 2, 3)]
"""With ``recompute: auto``, which a number settles."""
ON_DISK = {"optimizer_tier": "disk", "gradient_tier": "disk", "parameter_tier": "disk", "zero": 3}
ON_HOST = {"optimizer_tier": "host", "gradient_tier": "host", "activation_tier": "host"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recomputed")
    write_rows(folder / "rows.jsonl", alpaca_rows(100))
    write_model(folder / "model", llama_config(num_hidden_layers=BLOCKS))
    return folder


def written(folder: Path, workers: int, memory: dict[str, Any], **more: Any) -> RunDirectory:
    """A run that is ready for its workers."""
    number = len(list(folder.glob("run-*")))
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
        "optimizer": {"lr": 3e-3, "clip": 0.5, "warmup": 0},
        "precision": "fp32",
        "memory": {"micro_batch": 1, "moments": "fp32", **memory},
        "launch": {"workers": workers, "threads": 1},
        "track": [],
        "output": str(folder / f"run-{number}"),
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(text | more))
    decision = decide(str(path), [])
    if "recompute_blocks" in memory:
        assert decision.plan.layout.recomputed == (memory["recompute_blocks"], BLOCKS)
    run = RunDirectory(decision.config.output)
    write_run(run, decision)
    return run


def numbers(run: RunDirectory) -> list[tuple[float, float]]:
    found = [(record["loss"], record["grad_norm"]) for record in metrics(run)]
    assert len(found) == STEPS
    return found


def test_half_of_the_blocks_recomputed_equal_none_and_all(folder: Path) -> None:
    runs = [written(folder, 1, memory) for memory in (NONE, SOME[1], ALL)]
    train((1, runs))
    assert [numbers(run) for run in runs] == 3 * [numbers(runs[0])]


@pytest.mark.slow
def test_losses_and_norms_are_those_of_none_and_of_all(folder: Path) -> None:
    """On one worker, and with ZeRO 3 on two; gradients are summed in another order there."""
    alone = [written(folder, 1, memory) for memory in (NONE, ALL, *SOME)]
    shared = [written(folder, 2, {"zero": 3, **memory}) for memory in (NONE, ALL, *SOME)]
    train((1, alone), (2, shared))
    want, of_two = numbers(alone[0]), numbers(shared[0])
    assert want[-1][0] < want[0][0] - 0.5
    assert max(norm for _, norm in want) > 0.5
    assert [numbers(run) for run in alone] == 5 * [want]
    assert [numbers(run) for run in shared] == 5 * [of_two]
    for (loss, norm), (other_loss, other_norm) in zip(of_two, want, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-5)
        assert norm == pytest.approx(other_norm, rel=1e-4)


@pytest.mark.slow
def test_what_rests_elsewhere_and_axes_go_with_it(folder: Path) -> None:
    """Inputs of the blocks that are recomputed, and those alone, in the host's memory; blocks that stream from disk;
    divided matrices; frozen blocks with additions."""
    alone = [written(folder, 1, memory) for memory in (NONE, *({**SOME[1], **tier} for tier in (ON_HOST, ON_DISK)))]
    adapted = [written(folder, 1, memory, adapter={"rank": 4}) for memory in (NONE, *SOME)]
    divided = [written(folder, 2, memory, parallel={"tensor": 2}) for memory in (NONE, *SOME)]
    train((1, [*alone, *adapted]), (2, divided))
    for runs in (alone, adapted, divided):
        assert [numbers(run) for run in runs] == len(runs) * [numbers(runs[0])]
    assert "inputs of 2 blocks in host memory" in alone[1].log.read_text()
