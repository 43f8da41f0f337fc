"""Which pattern decides for which parameter."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tiny import llama_config
from tonnage.errors import UserError
from tonnage.model.adapters import EVERYTHING, AdapterSpec, Trains, prepare
from tonnage.model.anatomy import Anatomy, dissect
from tonnage.model.build import on_meta
from tonnage.model.groups import groups_of


def model_of(trains: Trains = EVERYTHING, *, tied: bool = False) -> tuple[PreTrainedModel, Anatomy]:
    model = on_meta(llama_config(num_hidden_layers=3, tie_word_embeddings=tied), torch.float32)
    anatomy = dissect(model)
    prepare(model, anatomy, trains, torch.float32)
    return model, anatomy


def test_the_first_match_counts_and_blocks_are_counted() -> None:
    groups = groups_of(*model_of(), ["*embed*", "blocks[-1:].*", "*q_proj.weight"])
    assert groups["model.embed_tokens.weight"] == 0
    assert groups["model.layers.2.self_attn.q_proj.weight"] == 1
    assert groups["model.layers.2.input_layernorm.weight"] == 1
    assert groups["model.layers.0.self_attn.q_proj.weight"] == 2
    assert "model.layers.0.self_attn.k_proj.weight" not in groups


def test_a_tied_head_is_known_by_both_names() -> None:
    assert groups_of(*model_of(tied=True), ["lm_head.*"]) == {"model.embed_tokens.weight": 0}


def test_only_what_is_trained_is_matched() -> None:
    parts = model_of(Trains(AdapterSpec(4, 1.0)))
    assert set(groups_of(*parts, ["*lora_B"]).values()) == {0}
    with pytest.raises(UserError, match=r"optimizer.groups: \*embed\*: no trained parameters"):
        groups_of(*parts, ["*embed*"])


def test_a_group_that_nothing_is_left_for_is_refused() -> None:
    with pytest.raises(UserError, match=r"q_proj\.weight: all that matches is matched by a group before"):
        groups_of(*model_of(), ["*proj*", "q_proj.weight"])
