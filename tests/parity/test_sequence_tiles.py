"""MLPs over tiles of the sequence: losses and gradient norms of runs, with every other way to save memory beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from plain import metrics
from ready import of_families, run_of

from forked import train
from tiny import llama_config, mixture_config, write_model
from tonnage.errors import UserError
from tonnage.rundir.directory import RunDirectory

STEPS, TILES = 4, 5
FULL: dict[str, Any] = {"recompute": "full"}
ON_HOST: dict[str, Any] = {**FULL, "optimizer_tier": "host", "gradient_tier": "host", "activation_tier": "host"}
ON_DISK: dict[str, Any] = {**FULL, "optimizer_tier": "disk", "gradient_tier": "disk", "parameter_tier": "disk"}
LORA: dict[str, Any] = {"adapter": {"rank": 4, "dropout": 0.2}}
PACKED: dict[str, Any] = {"adapter": {"rank": 4, "quantize": "nf4"}}
FAMILIES: dict[str, Any] = {
    "llama": llama_config(hidden_size=128, intermediate_size=256, num_attention_heads=4, initializer_range=0.2),
    "qwen3_moe": mixture_config("qwen3_moe"),
}
Write = Callable[..., RunDirectory]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Makes a run ready for its workers."""
    write = of_families(
        tmp_path_factory.mktemp("sequence-tiles"),
        lambda family, path: write_model(path, FAMILIES[family]),
        sequences=4,
        steps=STEPS,
        optimizer={"lr": 3e-3, "clip": 0.5, "warmup": 0},
    )

    def written(workers: int, number: int, family: str = "llama", **named: Any) -> RunDirectory:
        decision = write(family, workers, moments="fp32", sequence_tiles=number, **named)
        assert decision.plan.layout.sequence_tiles == number
        return run_of(decision)

    return written


def assert_same(runs: Sequence[tuple[RunDirectory, RunDirectory]], rel: float = 1e-6) -> None:
    """Of pairs of runs, whole and in tiles."""
    for whole, tiled in runs:
        want, got = metrics(whole), metrics(tiled)
        assert len(want) == len(got) == STEPS
        assert abs(want[-1]["loss"] - want[0]["loss"]) > 1e-2, whole.path
        assert got[0]["loss"] == pytest.approx(want[0]["loss"], rel=1e-6)
        for ours, theirs in zip(got, want, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=rel), tiled.path
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=100 * rel), tiled.path


WAYS: list[tuple[int, dict[str, Any]]] = [
    (1, FULL | LORA),
    (2, FULL | {"zero": 3}),
    (1, {"recompute": "none"}),
    (1, {"recompute": "selective"}),
    (1, ON_HOST),
    (1, ON_DISK),
    (1, FULL | PACKED),
    *((2, FULL | {"zero": zero}) for zero in (0, 1, 2)),
    (2, {"zero": 3, **PACKED, **FULL}),
    (2, FULL | {"parallel": {"tensor": 2}}),
    (2, {"recompute": "none", "parallel": {"tensor": 2}, **LORA}),
    (2, FULL | {"parallel": {"pipeline": 2}, "micro_batch": 1}),
]


@pytest.mark.matrix
@pytest.mark.parametrize("ways", [WAYS[:2], WAYS[2:]], ids=["some", "others"])
def test_runs_in_tiles_are_those_of_whole_rows(written: Write, ways: list[tuple[int, dict[str, Any]]]) -> None:
    """With every recompute and tier on one worker; ZeRO 0 to 3, divided matrices and stages on two; additions that
    drop inputs, over a packed base too."""
    pairs = [(workers, written(workers, 1, **how), written(workers, TILES, **how)) for workers, how in ways]
    train(*((number, [run for workers, *both in pairs if workers == number for run in both]) for number in (1, 2)))
    assert_same([(whole, tiled) for _, whole, tiled in pairs])


@pytest.mark.matrix
def test_halves_and_rounded_weights_too(written: Write) -> None:
    """Sums over tiles are taken in fp32; what is rounded to bf16 is rounded in other places."""
    ways: list[dict[str, Any]] = [
        FULL | {"precision": "bf16", "micro_batch": 2},
        {"recompute": "none", "quantize_aware": {"scheme": "int4", "group_size": 32}},
    ]
    pairs = [(written(1, 1, **how), written(1, TILES, **how)) for how in ways]
    train((1, [run for both in pairs for run in both]))
    assert_same(pairs[:1], rel=1e-2)
    assert_same(pairs[1:])


@pytest.mark.slow
def test_experts_are_refused_by_name(written: Write) -> None:
    with pytest.raises(UserError, match=r"memory\.sequence_tiles: 5 tiles, and no block of model type qwen3_moe has"):
        written(1, TILES, "qwen3_moe")
