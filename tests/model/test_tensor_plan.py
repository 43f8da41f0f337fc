"""What transformers' plans become, and what is refused before anything is loaded."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, OlmoConfig, Phi3Config, PreTrainedConfig

from tiny import llama_config, neox_config
from tonnage.errors import UserError
from tonnage.model.anatomy import dissect
from tonnage.model.build import build_on_meta
from tonnage.model.tensor_plan import TensorPlan, check_degree, fitting_degrees, tensor_plan


def planned(config: PreTrainedConfig) -> tuple[TensorPlan, dict[int, str]]:
    model = build_on_meta(config, torch.float32)
    return tensor_plan(model, dissect(model)), {id(module): path for path, module in model.named_modules()}


def test_attention_and_mlp_are_entered_once_each() -> None:
    plan, names = planned(llama_config(num_hidden_layers=1))
    assert [names[id(module)] for module in plan.entrances] == ["model.layers.0.self_attn", "model.layers.0.mlp"]
    assert {names[id(module)].rpartition(".")[2] for module in plan.rows} == {"o_proj", "down_proj"}
    assert len(plan.columns) == 5


def test_a_layer_whose_neighbours_are_not_divided_is_entered_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what the neighbour does to the same input would be counted by every rank."""
    config = neox_config(num_hidden_layers=1)
    divided = dict(config.base_model_tp_plan or {})
    del divided["layers.*.attention.query_key_value"], divided["layers.*.attention.dense"]
    monkeypatch.setattr(type(config), "base_model_tp_plan", divided)
    plan, names = planned(config)
    assert [names[id(module)] for module in plan.entrances] == ["gpt_neox.layers.0.mlp"]
    del divided["layers.*.mlp.dense_4h_to_h"]
    divided["layers.*.attention.dense"] = "rowwise"
    plan, names = planned(config)
    assert [names[id(module)] for module in plan.entrances] == ["gpt_neox.layers.0.mlp.dense_h_to_4h"]


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64), "no plan of transformers for model type gpt2"),
        (Phi3Config(hidden_size=32, num_hidden_layers=1, vocab_size=64, pad_token_id=0), "that treats model.layers"),
    ],
)
def test_families_that_cannot_be_divided_are_refused(config: PreTrainedConfig, found: str) -> None:
    with pytest.raises(UserError, match=found):
        planned(config)


def test_heads_that_do_not_divide_are_refused_with_the_numbers_that_would() -> None:
    config = llama_config(num_attention_heads=12, num_key_value_heads=6)
    check_degree(config, 6)
    with pytest.raises(UserError, match=r"12 attention heads and 6 key-value heads.*\n.*needed.*1, 2, 3, 6"):
        check_degree(config, 4)
    assert fitting_degrees(config, 8) == [1, 2, 3, 6]
    assert fitting_degrees(OlmoConfig(vocab_size=5, num_attention_heads=4, num_key_value_heads=4), 4) == [1, 2]
