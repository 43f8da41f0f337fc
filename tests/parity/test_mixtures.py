"""Mixtures of experts: every layout equals plain transformers, whatever the router does with its tokens.

Their weights are large, so that a token's path through the experts shows in its loss, and experts are starved on
purpose: in the first step no token goes to the last. Five experts are on two ranks, which do not divide them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import final_weights, metrics, plain_loop
from ready import of_families, run_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forked import train
from tiny import MIXTURES, byte_tokenizer, mixture_config
from tonnage.decide.decision import Decision

STEPS, SEQUENCES = 3, 6
MAIN = "qwen3_moe"
"""Shares of its experts do not add up to one, so that no gradient of its router is rounding alone, which Adam would
make as large as any other."""


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decision]:
    """What was decided for a run that is ready for its workers: of a family, on so many, with other keys of config."""
    optimizer = {"lr": 3e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 0}
    folder = tmp_path_factory.mktemp("mixtures")
    return of_families(folder, write_mixture, sequences=SEQUENCES, steps=STEPS, optimizer=optimizer)


def write_mixture(family: str, directory: Path) -> None:
    """A model directory with the names that the model itself has; in ``MAIN`` no token goes to the last expert."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(mixture_config(family), dtype=torch.float32)
    for name, weight in model.named_parameters():
        if family == MAIN and name.endswith("mlp.gate.weight"):
            with torch.no_grad():  # of a, -a, b, -b and 0, the last is never among the two largest
                weight[1], weight[3], weight[4] = -weight[0], -weight[2], 0.0
    model.save_pretrained(directory, save_original_format=False)
    byte_tokenizer().save_pretrained(directory)


def assert_plain(decisions: Iterable[Decision]) -> None:
    """Losses, norms and last weights are those of the plain loop."""
    decisions = list(decisions)
    steps, weights = plain_loop(decisions[0])
    assert steps[-1]["loss"] != pytest.approx(steps[0]["loss"], rel=1e-3)
    for decision in decisions:
        got = metrics(run_of(decision))
        assert len(got) == STEPS
        for ours, plain in zip(got, steps, strict=True):
            where = f"{decision.plan.layout}, step {ours['step']}"
            assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5), where
            assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), where
        trained = final_weights(run_of(decision), STEPS)
        for name, weight in trained.items():
            assert float((weight - weights[name]).norm()) <= 1e-4 * float(weights[name].norm()), name


ONE: list[dict[str, Any]] = [
    {"recompute": "full"},
    {"recompute": "none", "micro_batch": 1},
    {"optimizer_tier": "disk", "gradient_tier": "disk", "parameter_tier": "disk"},
    {"optimizer_tier": "disk", "gradient_tier": "disk", "parameter_tier": "disk", "tiles": 3, "micro_batch": 2},
]
TWO: list[dict[str, Any]] = [
    *({"zero": zero, "recompute": "full" if zero % 2 else "none", "micro_batch": 1} for zero in range(4)),
    {"zero": 3, "optimizer_tier": "host", "gradient_tier": "host", "activation_tier": "host", "recompute": "full"},
    {"zero": 3, "recompute": "selective", "parameter_tier": "disk"},
    {"zero": 3, "recompute": "full", "tiles": 2},
    {"zero": 3, "recompute": "selective", "tiles": 6, "micro_batch": 1},
]


@pytest.mark.matrix
def test_a_mixture_equals_the_plain_loop_in_every_layout(write: Callable[..., Decision]) -> None:
    alone = [write(MAIN, **memory) for memory in ONE]
    together = [write(MAIN, 2, **memory) for memory in TWO]
    train((1, map(run_of, alone)), (2, map(run_of, together)))
    assert_plain([*alone, *together])
    name = "model.layers.0.mlp.experts.down_proj"
    for decision in (*alone, *together):
        before = load_file(Path(decision.config.model) / "model.safetensors")[name]
        after = final_weights(run_of(decision), 1)[name]
        assert after[4] == pytest.approx(before[4] * (1 - 3e-3 * 0.1), rel=1e-6), "what no token reached only decays"
        assert float((after[0] - before[0]).abs().mean()) > 1e-3


@pytest.mark.matrix
@pytest.mark.parametrize("family", [family for family in MIXTURES if family != MAIN])
def test_every_family_equals_the_plain_loop(family: str, write: Callable[..., Decision]) -> None:
    alone = [write(family, recompute="full", micro_batch=2)]
    together = [write(family, 2, zero=zero, recompute="selective", micro_batch=1) for zero in (1, 3)]
    together += [write(family, 2, zero=3, recompute="none", micro_batch=1, tiles=4)]
    train((1, map(run_of, alone)), (2, map(run_of, together)))
    assert_plain([*alone, *together])


@pytest.mark.matrix
def test_a_mixture_in_a_pipeline_and_compiled_equals_the_plain_loop(write: Callable[..., Decision]) -> None:
    pipelines = [
        write(MAIN, 2, parallel={"pipeline": 2, "schedule": schedule}, micro_batch=2)
        for schedule in ("1f1b", "zero_bubble")
    ]
    compiled = [write(MAIN, 2, compile="on", recompute="full")]
    train((2, map(run_of, [*pipelines, *compiled])))
    assert_plain([*pipelines, *compiled])
    for decision in (*pipelines, *compiled):
        assert metrics(run_of(decision))[0]["experts"]["most"] > 1


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.matrix)])
def test_lower_precisions_and_int8_moments_stay_close(precision: str, write: Callable[..., Decision]) -> None:
    exact = write(MAIN)
    alone = [
        write(MAIN, precision=precision, micro_batch=1, moments=moments, recompute=recompute)
        for moments, recompute in (("fp32", "full"), ("int8", "none"))
    ]
    together = [write(MAIN, 2, precision=precision, zero=3, moments="int8", micro_batch=1)]
    train((1, map(run_of, [exact, *alone])), (2, map(run_of, together)))
    for decision in (*alone, *together):
        for ours, theirs in zip(metrics(run_of(decision)), metrics(run_of(exact)), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2), decision.plan.layout


@pytest.mark.matrix
def test_a_mixture_saved_by_two_goes_on_with_one_and_three(write: Callable[..., Decision]) -> None:
    saved = write(MAIN, 2, zero=3, moments="int8")
    start = run_of(saved), 1
    others = [write(MAIN, workers, start, zero=3, moments="int8", micro_batch=1) for workers in (1, 3)]
    train((2, [run_of(saved)]), (1, [run_of(others[0])]), (3, [run_of(others[1])]))
    reference = metrics(run_of(saved))[1:]
    for decision in others:
        got = metrics(run_of(decision))
        assert [step["step"] for step in got] == [2, 3]
        for ours, theirs in zip(got, reference, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.matrix
def test_the_routers_loss_is_the_same_in_every_layout(write: Callable[..., Decision]) -> None:
    """``test_routing`` holds it against transformers."""
    alone = [write(MAIN, router_loss=0.5, recompute="full"), write(MAIN, router_loss=0.5, micro_batch=1), write(MAIN)]
    together = [write(MAIN, 2, router_loss=0.5, zero=zero, recompute="selective", micro_batch=1) for zero in (1, 3)]
    train((1, map(run_of, alone)), (2, map(run_of, together)))
    reference, without = metrics(run_of(alone[0])), metrics(run_of(alone[2]))
    assert all("router_loss" not in step for step in without)
    assert reference[0]["loss"] == pytest.approx(without[0]["loss"] + 0.5 * reference[0]["router_loss"], rel=1e-5)
    for decision in (alone[1], *together):
        for ours, theirs in zip(metrics(run_of(decision)), reference, strict=True):
            for key, exact in (("loss", 1e-5), ("router_loss", 1e-5), ("grad_norm", 1e-4)):
                assert ours[key] == pytest.approx(theirs[key], rel=exact), (decision.plan.layout, key)
            assert ours["experts"] == theirs["experts"]
    assert reference[0]["experts"]["least"] == 0, "the last expert of every block has no token in the first step"
    assert reference[0]["experts"]["most"] > 1
    records = [json.loads(line) for line in run_of(together[0]).metrics.read_text().splitlines()]
    (shares,) = [record["expert_shares"] for record in records if "expert_shares" in record]
    assert [len(block) for block in shares] == [5, 5]
    assert [sum(block) for block in shares] == pytest.approx([1, 1], abs=1e-4)
