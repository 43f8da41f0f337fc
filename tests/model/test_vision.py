"""Which models take images, and which towers are refused."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tonnage.errors import UserError
from tonnage.model.towers import text_config
from tonnage.model.vision import check_tower, image_token


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


def test_features_behind_several_blocks_are_refused() -> None:
    config = config_of("Qwen3VL")
    assert config.vision_config.deepstack_visual_indexes
    with pytest.raises(UserError, match=r"qwen3_vl: rows with images, and a tower whose features .* several blocks"):
        check_tower(config)
    check_tower(config_of("Qwen2_5_VL"))


def test_attention_across_is_no_model_of_text_with_features() -> None:
    """Llama 3.2 Vision has no causal language model of text alone, and is given none."""
    config = config_of("Mllama")
    assert image_token(config) is None
    assert text_config(config) is config


def test_a_model_of_text_without_a_head_is_given_that_of_the_whole() -> None:
    config = config_of("Qwen2_5_VL", text_config={"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 99})
    text = text_config(config)
    assert type(text) is not type(config)
    import torch

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    assert model.lm_head.weight.shape == (99, 64)
    assert type(model.base_model).__name__ == "Qwen2_5_VLTextModel"
