"""Training with products in fp8: every layout equals torchao's own layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import metrics, plain_loop
from ready import of_families, run_of
from safetensors import safe_open
from test_adapters import with_peft
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import AutoModelForCausalLM

from forked import train, work
from tiny import byte_tokenizer, llama_config
from tonnage.decide.decision import Decision
from tonnage.decide.exports import export_checkpoint
from tonnage.errors import UserError

STEPS, SEQUENCES = 10, 6
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 0, "eps": 1e-5}
FP8: dict[str, Any] = {"precision": "fp8-emulated"}
LORA: dict[str, Any] = {"adapter": {"rank": 4, "alpha": 12}, "optimizer": OPTIMIZER | {"lr": 1e-2}}


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decision]:
    return of_families(
        tmp_path_factory.mktemp("fp8"), write_model, sequences=SEQUENCES, steps=STEPS, optimizer=OPTIMIZER
    )


def write_model(family: str, directory: Path) -> None:
    torch.manual_seed(0)
    config = llama_config(hidden_size=96, intermediate_size=128, tie_word_embeddings=False, initializer_range=0.2)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).bfloat16()
    made.save_pretrained(directory, save_original_format=False)
    byte_tokenizer().save_pretrained(directory)


def by_torchao(model: Any) -> Any:
    """torchao's conversion of all linear layers but the head."""
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")
    return model


def losses(decision: Decision) -> list[float]:
    return [record["loss"] for record in metrics(run_of(decision))]


ALONE: list[dict[str, Any]] = [{"recompute": "full", "micro_batch": 1}, {"recompute": "selective"}]
TOGETHER: list[dict[str, Any]] = [
    {"zero": 0, "recompute": "none", "micro_batch": 1},
    {"zero": 3, "recompute": "full", "micro_batch": 1},
    {"zero": 3, "recompute": "selective", "parameter_tier": "disk"},
    {"parallel": {"pipeline": 2}, "recompute": "full"},
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("keys", "alone", "together"),
    [({}, ALONE[1], TOGETHER[1]), pytest.param(LORA, ALONE[0], TOGETHER[0], marks=pytest.mark.matrix)],
    ids=["whole", "adapter"],
)
def test_losses_have_the_bits_of_those_with_torchaos_layers(
    write: Callable[..., Decision], keys: dict[str, Any], alone: dict[str, Any], together: dict[str, Any]
) -> None:
    """Over ten steps in bf16, in the same layout, by workers that convert the model as torchao does
    (``by_torchao_runs``)."""
    ours, theirs = (
        [write("llama", **FP8, **keys, **alone), write("llama", 2, **FP8, **keys, **together)] for _ in "12"
    )
    train((1, [run_of(ours[0])]), (2, [run_of(ours[1])]))
    work("by_torchao_runs", (1, [str(run_of(theirs[0]).path)]), (2, [str(run_of(theirs[1]).path)]))
    for mine, other in zip(ours, theirs, strict=True):
        assert losses(mine) == losses(other)
        assert len(losses(mine)) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, LORA], ids=["whole", "adapter"])
def test_every_layout_computes_as_plain_transformers_with_torchao(
    write: Callable[..., Decision], keys: dict[str, Any]
) -> None:
    """The first step, computed in fp32 but for what is rounded to fp8 (``fp8_in_fp32``). Later ones drift apart, as a
    number on the border between two rounded ones goes to either side. Gradients are others already: those of what
    documents begin with alike are summed before they are rounded, and scales for a weight's are a micro-batch's."""
    alone = [write("llama", steps=1, **FP8, **keys, **memory) for memory in ALONE]
    together = [write("llama", 2, steps=1, **FP8, **keys, **memory) for memory in TOGETHER]
    paths = ([str(run_of(one).path) for one in decisions] for decisions in (alone, together))
    work("fp8_in_fp32", *zip((1, 2), paths, strict=True))
    added = with_peft(alone[0]) if keys else lambda model: model
    (plain,), _ = plain_loop(alone[0], lambda model: added(by_torchao(model)))
    (exact,), _ = plain_loop(alone[0], added)
    for decision in [*alone, *together]:
        (got,) = metrics(run_of(decision))
        assert got["loss"] == pytest.approx(plain["loss"], rel=1e-6), decision.plan.layout
        assert got["grad_norm"] == pytest.approx(plain["grad_norm"], rel=3e-3), decision.plan.layout
    assert abs(plain["loss"] / exact["loss"] - 1) > 1e-4


@pytest.mark.matrix
def test_a_run_that_goes_on_has_the_same_bits(write: Callable[..., Decision]) -> None:
    whole = write("llama", **FP8)
    train((1, [run_of(whole)]))
    again = write("llama", start=(run_of(whole), 3), **FP8)
    train((1, [run_of(again)]))
    assert losses(again) == losses(whole)[3:]


@pytest.mark.matrix
def test_an_export_is_in_bf16(write: Callable[..., Decision], tmp_path: Path) -> None:
    """With the names and types that a run in bf16 exports."""
    decisions = [write("llama", steps=1, **FP8), write("llama", steps=1, precision="bf16")]
    train((1, map(run_of, decisions)))
    described = []
    for number, decision in enumerate(decisions):
        export_checkpoint(run_of(decision), tmp_path / str(number))
        with safe_open(tmp_path / str(number) / "model.safetensors", framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            described.append({key: (one.get_dtype(), one.get_shape()) for key, one in slices.items()})
        AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
    assert described[0] == described[1]
    assert {dtype for dtype, _ in described[0].values()} == {"BF16"}


def test_a_processor_is_refused_before_anything_is_weighed(
    write: Callable[..., Decision], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tonnage.training.weigh.weigh", lambda *_: pytest.fail("weighed"))
    with pytest.raises(UserError, match=r"(?s)fp8 on a CPU.*precision=fp8-emulated"):
        write("llama", precision="fp8")


@pytest.mark.slow
def test_a_plan_says_what_is_in_fp8_and_what_it_is_good_for(write: Callable[..., Decision]) -> None:
    plan = write("llama", **FP8).plan
    assert plan.reasons["fp8"].startswith("products of 14 linear layers in fp8")
    assert any("for tests alone" in warning for warning in plan.warnings)
