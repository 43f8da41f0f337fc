"""Which parameters are decayed, over every family that transformers builds, beside what its Trainer decays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer
from transformers.pytorch_utils import Conv1D

from sweep import families
from tonnage.model.anatomy import undecayed
from tonnage.model.packed_layers import stacks_of

FEW = ("cohere", "falcon_mamba", "gemma3n_text", "gpt2", "gpt_oss", "qwen3_5_moe_text", "rwkv")
LEFT = [
    pytest.param(name, marks=pytest.mark.matrix if number % 8 else pytest.mark.slow)
    for number, name in enumerate(families.NAMES)
    if name not in FEW
]


@pytest.mark.parametrize("name", [*FEW, *LEFT])
def test_matrices_alone_are_decayed(name: str) -> None:
    """Against the Trainer: it goes by names alone, decays vectors that are called neither bias nor norm, and nothing in
    a module whose name has norm in it."""
    model = families.built(name)
    spared = undecayed(model)
    trainer: Any = None
    theirs = set(Trainer.get_decay_parameter_names(trainer, model))
    for path, module in model.named_modules():
        kind = type(module).__name__
        for last, one in module._parameters.items():
            if one is None:
                continue
            full = f"{path}.{last}"
            if "bias" in last or (kind.endswith(("Norm", "Norm3D", "NormGated")) and last == "weight"):
                assert full in spared, full
            if last == "weight" and type(module) in (nn.Linear, Conv1D, nn.Conv1d, nn.Embedding):
                assert (full in spared) == ("bias" in path.rpartition(".")[2]), full
            if one.dim() < 2 or last in ("A_log", "D", "dt_bias", "sinks"):
                assert full in spared, full
            if kind.endswith("Router") and last == "weight":
                assert full not in spared, full
        assert not spared & {f"{path}.{stack}" for stack in stacks_of(module)}
    names = {one for one, _ in model.named_parameters()}
    ours = names - spared
    assert ours, name
    if name not in ("axk2", "roberta-prelayernorm"):  # whose linear layers lie in modules that are called norm
        assert ours <= theirs


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("gpt_oss", {}, "mlp.experts.gate_up_proj_bias"),
        ("cohere", {"use_qk_norm": True}, "self_attn.q_norm.weight"),
        ("falcon_mamba", {}, "mixer.A_log"),
    ],
)
def test_biases_norms_and_state_space_parameters_of_two_dimensions_are_not(
    family: str, changes: dict[str, bool], name: str
) -> None:
    model = families.built(family, **changes)
    (first,) = (one for one in model.state_dict() if one.endswith(f".0.{name}"))
    assert model.get_parameter(first).dim() == 2
    assert first in undecayed(model)


def test_additions_are_decayed_of_any_rank() -> None:
    layer = nn.Linear(3, 2)
    layer.register_parameter("lora_A", nn.Parameter(torch.zeros(1, 3)))
    layer.register_parameter("lora_B", nn.Parameter(torch.zeros(2, 1)))
    assert undecayed(layer) == {"bias"}
