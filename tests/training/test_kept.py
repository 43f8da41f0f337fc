"""What transformers keeps in fp32 stays so: as stored, as gathered from other ranks, whatever is computed again."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from forked import work
from tiny import MIXTURES, mixture_config
from tonnage.model.build import on_meta

ERNIE = "['model.layers.1.mlp.gate.moe_statics.e_score_correction_bias', 'model.layers.1.mlp.gate.weight']"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", MIXTURES)
def test_types_are_those_that_transformers_reads_weights_in(
    family: str, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(family)
    AutoModelForCausalLM.from_config(mixture_config(family)).save_pretrained(folder, save_original_format=False)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ours = on_meta(mixture_config(family), dtype)
    assert {name: one.dtype for name, one in ours.named_parameters()} == {
        name: one.dtype for name, one in read.named_parameters()
    }
    assert {name: one.dtype for name, one in ours.named_buffers()} == {
        name: one.dtype for name, one in read.named_buffers()
    }


@pytest.mark.matrix
def test_a_router_in_fp32_is_computed_with_in_fp32() -> None:
    """Gradients are to the bit those of a model that no rank divides."""
    alone = work("training.kept_workers", (1, ["ernie4_5_moe:bf16:3:none", "ernie4_5_moe:fp16:3:selective"]))
    assert alone.splitlines() == [
        f"ernie4_5_moe:bf16:3:none {ERNIE} 22 0.0e+00",  # all others are stored in 16 bits
        f"ernie4_5_moe:fp16:3:selective {ERNIE} 22 0.0e+00",
    ]
    settings = ["0:full", "1:selective", "2:none", "3:none", "3:selective", "3:full"]
    told = work("training.kept_workers", (2, [f"ernie4_5_moe:bf16:{setting}" for setting in settings]))
    assert told.splitlines() == [f"ernie4_5_moe:bf16:{setting} {ERNIE} 0 0.0e+00" for setting in settings]
