"""Which layers are fake-quantised, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, TorchAoConfig
from transformers.quantizers.base import get_keys_to_not_convert

from tiny import llama_config, mixture_config, neox_config
from tonnage.errors import UserError
from tonnage.kernels.fake_quantized import Scheme
from tonnage.model.anatomy import dissect
from tonnage.model.build import on_meta
from tonnage.model.fake_quantized import fake_quantize


def model_of(config: PreTrainedConfig) -> Any:
    return on_meta(config, torch.float32)


@pytest.mark.parametrize("config", [llama_config(intermediate_size=192), neox_config()], ids=["llama", "neox"])
def test_layers_are_those_that_transformers_quantises(config: PreTrainedConfig) -> None:
    model = model_of(config)
    fake_quantize(model, dissect(model), Scheme("int8"))
    ours = {name for name, module in model.named_modules() if hasattr(module, "fake_quantizers")}
    left_out = get_keys_to_not_convert(model)  # what ``TorchAoConfig`` leaves as it is
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert ours == linear - set(left_out)
    assert ours


def test_a_layer_that_is_switched_off_is_as_it_was() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config(intermediate_size=192, initializer_range=0.2))
    ids = torch.arange(40)[None]
    exact = model(ids).logits
    quantizers = fake_quantize(model, dissect(model), Scheme("int4", 32))
    rounded = model(ids).logits
    with quantizers.used(False):
        assert torch.equal(model(ids).logits, exact)
    assert float((rounded - exact).norm()) > 1e-2 * float(exact.norm())


@pytest.mark.parametrize(
    ("config", "scheme", "message"),
    [
        (GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=258), Scheme("int8"), r"attn\.c_attn"),
        (mixture_config("qwen3_moe"), Scheme("int8"), r"experts"),
        (llama_config(), Scheme("int4", 128), r"groups of 128, and model\.layers\.0\.self_attn\.q_proj has rows of 96"),
        (llama_config(intermediate_size=192), Scheme("int4", 128), r"quantize_aware\.group_size=32"),
        (llama_config(), Scheme("mxfp4", 32), r"quantize_aware=int8, whose group is a row"),
    ],
)
def test_what_torchao_does_not_quantise_is_refused(config: PreTrainedConfig, scheme: Scheme, message: str) -> None:
    model = model_of(config)
    with pytest.raises(UserError, match=message):
        fake_quantize(model, dissect(model), scheme)


@pytest.mark.parametrize("scheme", [Scheme("int8"), Scheme("int8-int4", 32), Scheme("mxfp4", 32)], ids=str)
def test_a_model_that_transformers_quantises_computes_the_same(scheme: Scheme, tmp_path: Path) -> None:
    """Logits of what was evaluated are those of what is served: ``TorchAoConfig`` of the same scheme."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(llama_config(intermediate_size=192, initializer_range=0.2))
    made.bfloat16().save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    served = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=TorchAoConfig(scheme.for_torchao())
    )
    ids = torch.arange(64)[None]
    exact, wanted = plain(ids).logits, served(ids).logits
    fake_quantize(plain, dissect(plain), scheme)
    assert float((plain(ids).logits - wanted).norm()) <= 1e-2 * float((exact - wanted).norm())
