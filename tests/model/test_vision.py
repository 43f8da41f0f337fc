"""Which models take images, and which towers are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tonnage.model.towers import text_config
from tonnage.model.vision import added_features, behind_blocks, image_token


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    made: PreTrainedConfig = getattr(transformers, f"{family}Config")(**changes)
    return made


@pytest.mark.parametrize("family", ["Llava", "LlavaNext", "InternVL", "Idefics3", "Qwen2_5_VL", "Mistral3", "Gemma3"])
def test_what_takes_images_says_which_token_stands_for_them(family: str) -> None:
    config = config_of(family)
    assert image_token(config) == config.image_token_id


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "CLIP"])
def test_what_takes_none_has_no_such_token(family: str) -> None:
    assert image_token(config_of(family)) is None


def test_a_tower_says_how_many_features_are_added_behind_blocks() -> None:
    config = config_of("Qwen3VL")
    assert added_features(config) == len(config.vision_config.deepstack_visual_indexes) == 3
    assert added_features(config_of("Qwen2_5_VL")) == 0


def test_a_stage_adds_no_features_that_those_before_have_added() -> None:
    ids, places = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, 2, 5])
    added = torch.arange(18.0).view(3, 6)
    arguments = behind_blocks(added, 2, places, ids, blocks=1)
    assert arguments["visual_pos_masks"].tolist() == [[False, True, True], [False, False, True]]
    first, *others = arguments["deepstack_visual_embeds"]
    assert not first.any()
    assert torch.equal(torch.cat(others, dim=1), added[:, 2:])
    assert behind_blocks(added[:, :0], 2, places, ids) == {}


def test_attention_across_is_no_model_of_text_with_features() -> None:
    """Llama 3.2 Vision has no causal language model of text alone, and is given none."""
    config = config_of("Mllama")
    assert image_token(config) is None
    assert text_config(config) is config


def test_a_model_of_text_without_a_head_is_given_that_of_the_whole() -> None:
    config = config_of("Qwen2_5_VL", text_config={"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 99})
    text = text_config(config)
    assert type(text) is not type(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    assert model.lm_head.weight.shape == (99, 64)
    assert type(model.base_model).__name__ == "Qwen2_5_VLTextModel"
