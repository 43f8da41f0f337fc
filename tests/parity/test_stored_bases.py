"""Low-rank additions over a base that stays as a quantised checkpoint has it equal peft's over the same numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, OFTConfig, get_peft_model
from plain import metrics, plain_loop
from ready import of_families, run_of
from transformers import PreTrainedConfig

from forked import train
from stored_models import FORMS, MIXTURES, changed, experts_in_4_bits, in_form, widened
from tiny import byte_tokenizer, llama_config, write_model
from tonnage.decide.decision import Decision
from tonnage.model.adapters import initialise

TARGETS = {"deepseek_v3": ["q_b_proj", "o_proj"]}
USUAL = ["q_proj", "v_proj", "o_proj"]
OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "clip": 0.5, "warmup": 0, "eps": 1e-5}


def config_of(kind: str) -> PreTrainedConfig:
    if kind == "gpt_oss":
        return MIXTURES["gpt_oss"]()
    if kind == "deepseek_v3":
        return MIXTURES["deepseek_v3"]()
    return llama_config(tie_word_embeddings=False, intermediate_size=192, initializer_range=0.2)


def write_base(kind: str, directory: Path) -> None:
    """A base in the form that a kind names, and beside it the same in fp32."""
    torch.manual_seed(0)
    whole = write_model(directory.parent / f"{kind}-whole", config_of(kind), torch.bfloat16)
    if kind == "gpt_oss":
        changed(whole, directory, experts_in_4_bits, quantization_config={"quant_method": "mxfp4"})
    else:
        form = "fp8" if kind == "deepseek_v3" else kind
        changed(whole, directory, lambda tensors: in_form(tensors, form), quantization_config=FORMS[form][1])
    byte_tokenizer().save_pretrained(directory)
    widened(directory, directory.parent / f"{kind}-widened")
    shutil.rmtree(whole)


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decision]:
    """What was decided for a run that is ready for its workers."""
    folder = tmp_path_factory.mktemp("stored")
    return of_families(folder, write_base, sequences=4, steps=5, optimizer=OPTIMIZER)


def adapter(kind: str, **more: Any) -> dict[str, Any]:
    return {"rank": 4, "alpha": 12, "targets": TARGETS.get(kind, USUAL), **more}


def with_peft(decision: Decision) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        own = decision.config.adapter
        assert not isinstance(own, str)
        additions = LoraConfig(r=4, lora_alpha=12, target_modules=list(own.targets))
        rotations = OFTConfig(oft_block_size=16, target_modules=list(own.targets))
        adapted = get_peft_model(model, rotations if own.kind == "oft" else additions)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if parameter.requires_grad:
                    ours = name.removeprefix("base_model.model.").removesuffix(".default.weight")
                    start = {ours: torch.empty_like(parameter)}
                    initialise(start, decision.config.seed)
                    parameter.copy_(start[ours])
        return adapted

    return change


def assert_as_peft(decisions: list[Decision]) -> None:
    """Losses and norms are those of peft over the base in fp32."""
    first = decisions[0]
    base = first.config.model_copy(update={"model": f"{first.config.model}-widened"})
    steps, _ = plain_loop(replace(first, config=base), with_peft(first))
    assert abs(steps[-1]["loss"] - steps[0]["loss"]) > 2e-3 * steps[0]["loss"]
    for decision in decisions:
        for one, plain in zip(metrics(run_of(decision)), steps, strict=True):
            where = f"{decision.plan.layout}, step {one['step']}"
            assert one["loss"] == pytest.approx(plain["loss"], rel=1e-5), where
            assert one["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), where


MOST_BYTES = {"gptq": 0.65, "awq": 0.65, "nvfp4": 0.65, "mxfp4": 0.6, "fp8": 1.2, "gpt_oss": 1.6, "deepseek_v3": 1.4}
"""Of a number of the blocks, norms and routers in fp32 and, of gpt-oss, attention with them."""
KINDS = tuple(MOST_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(one, marks=pytest.mark.matrix if one == "awq" else ()) for one in KINDS])
def test_losses_over_a_base_as_it_is_stored_are_those_of_peft(write: Callable[..., Decision], kind: str) -> None:
    keys = {"adapter": adapter(kind), "recompute": "none", "micro_batch": 1}
    alone = [write(kind, **keys)]
    together = [write(kind, 2, zero=3, **keys)] if kind in ("gptq", "gpt_oss") else []
    if kind == "nvfp4":
        alone.append(write(kind, **keys, parameter_tier="disk"))
    train((1, map(run_of, alone)), *([(2, map(run_of, together))] if together else []))
    assert_as_peft([*alone, *together])
    for decision in (*alone, *together):
        frozen, stored = decision.plan.model.frozen, decision.plan.weights.stored
        assert stored
        assert frozen.num_bytes < MOST_BYTES[kind] * (frozen.parameters - frozen.outside) + frozen.outside_bytes


@pytest.mark.matrix
def test_it_is_widened_on_request(write: Callable[..., Decision]) -> None:
    alone = write("gptq", adapter=adapter("gptq", quantize="widened"), recompute="none")
    train((1, [run_of(alone)]))
    assert_as_peft([alone])
    frozen = alone.plan.model.frozen
    assert frozen.num_bytes == 4 * frozen.parameters


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_rotations_over_a_base_as_it_is_stored_are_those_of_peft(write: Callable[..., Decision], kind: str) -> None:
    rotated = {"kind": "oft", "oft_block_size": 16, "targets": USUAL}
    alone = [write(kind, adapter=rotated, recompute="full"), write(kind, adapter=rotated, parameter_tier="disk")]
    train((1, map(run_of, alone)))
    assert_as_peft(alone)
    assert all(decision.plan.weights.stored for decision in alone)
