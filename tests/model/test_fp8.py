"""Which layers are computed in fp8, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig

from tiny import llama_config, mixture_config, neox_config
from tonnage.errors import UserError
from tonnage.model.anatomy import dissect
from tonnage.model.build import on_meta
from tonnage.model.fp8 import compute_in_fp8


def model_of(config: PreTrainedConfig) -> Any:
    return on_meta(config, torch.float32)


def changed(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if hasattr(module, "fp8_products")}


@pytest.mark.parametrize("config", [llama_config(), neox_config()], ids=["llama", "neox"])
def test_layers_are_those_that_torchao_converts(config: PreTrainedConfig) -> None:
    """With the filter of its examples: no head, and sizes that are multiples of 16."""
    model, other = model_of(config), model_of(config)
    in_fp8 = compute_in_fp8(model, dissect(model), "fp8-emulated")
    head = next(name for name, module in other.named_modules() if module is dissect(other).head)

    def fits(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name != head and all(size % 16 == 0 for size in module.weight.shape)

    convert_to_float8_training(other, module_filter_fn=fits)
    theirs = {name for name, module in other.named_modules() if isinstance(module, Float8Linear)}
    assert changed(model) == theirs
    assert in_fp8.layers == len(theirs)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in other.named_parameters()]


def test_logits_are_those_of_torchaos_layers() -> None:
    torch.manual_seed(0)
    config = llama_config(intermediate_size=192, initializer_range=0.2)
    model, other = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    other.load_state_dict(model.state_dict())
    ids = torch.arange(40)[None]
    exact = model(ids).logits.detach()
    compute_in_fp8(model, dissect(model), "fp8-emulated")
    recipe = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(other, config=recipe, module_filter_fn=lambda _, name: name != "lm_head")
    ours = model(ids).logits.detach()
    assert torch.equal(ours, other(ids).logits.detach())
    assert float((ours - exact).norm()) > 1e-2 * float(exact.norm())


def test_what_does_not_fit_stays_as_it_is() -> None:
    model = model_of(llama_config(intermediate_size=200))
    in_fp8 = compute_in_fp8(model, dissect(model), "fp8-emulated")
    assert {name.rpartition(".")[2] for name in changed(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert in_fp8.others == 3 * len(dissect(model).blocks)
    assert f"head and {in_fp8.others} other matrices of the blocks in bf16" in str(in_fp8)


def test_experts_and_their_routers_stay_as_they_are() -> None:
    model = model_of(mixture_config("qwen3_moe"))
    in_fp8 = compute_in_fp8(model, dissect(model), "fp8-emulated")
    assert not [name for name in changed(model) if "expert" in name or "gate" in name]
    assert in_fp8.layers
    assert in_fp8.others


def test_a_model_without_such_layers_is_refused() -> None:
    model = model_of(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=258))
    with pytest.raises(UserError, match="no linear layer of the blocks whose inputs and outputs are multiples of 16"):
        compute_in_fp8(model, dissect(model), "fp8-emulated")
