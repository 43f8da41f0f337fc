"""How many blocks are recomputed whole changes no bit: losses and gradient norms, with clipping active."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from plain import metrics
from ready import of_families, run_of

from forked import train
from tiny import llama_config, write_model
from tonnage.rundir.directory import RunDirectory

BLOCKS, STEPS = 4, 4
NONE: dict[str, Any] = {"recompute": "none"}
ALL: dict[str, Any] = {"recompute": "full"}
SOME: list[dict[str, Any]] = [{"recompute_blocks": number} for number in (1, 2, 3)]
"""With ``recompute: auto``, which a number settles."""
ON_DISK = {"optimizer_tier": "disk", "gradient_tier": "disk", "parameter_tier": "disk", "zero": 3}
ON_HOST = {"optimizer_tier": "host", "gradient_tier": "host", "activation_tier": "host"}


Write = Callable[..., RunDirectory]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Makes a run ready for its workers."""
    write = of_families(
        tmp_path_factory.mktemp("recomputed"),
        lambda _, path: write_model(path, llama_config(num_hidden_layers=BLOCKS)),
        sequences=4,
        steps=STEPS,
        optimizer={"lr": 3e-3, "clip": 0.5, "warmup": 0},
    )

    def written(workers: int, memory: dict[str, Any], **more: Any) -> RunDirectory:
        decision = write("llama", workers, **({"micro_batch": 1, "moments": "fp32"} | memory), **more)
        if "recompute_blocks" in memory:
            assert decision.plan.layout.recomputed == (memory["recompute_blocks"], BLOCKS)
        return run_of(decision)

    return written


def numbers(run: RunDirectory) -> list[tuple[float, float]]:
    found = [(record["loss"], record["grad_norm"]) for record in metrics(run)]
    assert len(found) == STEPS
    return found


@pytest.mark.matrix
def test_half_of_the_blocks_recomputed_equal_none_and_all(written: Write) -> None:
    runs = [written(1, memory) for memory in (NONE, SOME[1], ALL)]
    train((1, runs))
    assert [numbers(run) for run in runs] == 3 * [numbers(runs[0])]


@pytest.mark.matrix
def test_losses_and_norms_are_those_of_none_and_of_all(written: Write) -> None:
    """On one worker, and with ZeRO 3 on two; gradients are summed in another order there."""
    alone = [written(1, memory) for memory in (NONE, ALL, *SOME)]
    shared = [written(2, {"zero": 3, **memory}) for memory in (NONE, ALL, *SOME)]
    train((1, alone), (2, shared))
    want, of_two = numbers(alone[0]), numbers(shared[0])
    assert want[-1][0] < want[0][0] - 0.5
    assert max(norm for _, norm in want) > 0.5
    assert [numbers(run) for run in alone] == 5 * [want]
    assert [numbers(run) for run in shared] == 5 * [of_two]
    for (loss, norm), (other_loss, other_norm) in zip(of_two, want, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-5)
        assert norm == pytest.approx(other_norm, rel=1e-4)


@pytest.mark.matrix
def test_what_rests_elsewhere_and_axes_go_with_it(written: Write) -> None:
    """Inputs of the blocks that are recomputed, and those alone, in the host's memory; blocks that stream from disk;
    divided matrices; frozen blocks with additions."""
    alone = [written(1, memory) for memory in (NONE, *({**SOME[1], **tier} for tier in (ON_HOST, ON_DISK)))]
    adapted = [written(1, memory, adapter={"rank": 4}) for memory in (NONE, *SOME)]
    divided = [written(2, memory, parallel={"tensor": 2}) for memory in (NONE, *SOME)]
    train((1, [*alone, *adapted]), (2, divided))
    for runs in (alone, adapted, divided):
        assert [numbers(run) for run in runs] == len(runs) * [numbers(runs[0])]
    assert "inputs of 2 blocks in host memory" in alone[1].log.read_text()
