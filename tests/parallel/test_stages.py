"""A model cut into stages gives the same bits as in one piece, in sixteen shapes, and its parts have the same names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tonnage.errors import UserError
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.parallel.stages import keep_stage
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama, tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "neox": GPTNeoXConfig(**SHAPE),
    "neox, tied": GPTNeoXConfig(**SHAPE, tie_word_embeddings=True),
    "mistral": MistralConfig(**GROUPED, sliding_window=5),
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**GROUPED),
    "gemma2, scaled embedding": Gemma2Config(**GROUPED, sliding_window=5, query_pre_attn_scalar=8),
    "gemma3, two rotary tables": Gemma3TextConfig(**GROUPED, sliding_window=5, query_pre_attn_scalar=8),
    "phi, biased head": PhiConfig(**SHAPE),
    "phi3": Phi3Config(**SHAPE, pad_token_id=0),
    "gpt2, learned positions": GPT2Config(vocab_size=97, n_embd=32, n_layer=4, n_head=4),
    "olmo": OlmoConfig(**SHAPE),
    "olmo2": Olmo2Config(**SHAPE),
    "granite, scaled embedding": GraniteConfig(**SHAPE, embedding_multiplier=3.0, logits_scaling=4.0),
    "cohere": CohereConfig(**SHAPE, logit_scale=0.5),
    "opt, projected embedding": OPTConfig(
        vocab_size=97,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        word_embed_proj_dim=16,
        max_position_embeddings=64,
    ),
}
STAGES = (1, 2, 1)
LENGTHS = (9, 1, 14)


def batch() -> MicroBatch:
    ids = torch.randint(97, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([2, 3, 5, 12, 20])
    return MicroBatch(ids, LENGTHS, positions, ids[0, positions + 1], torch.ones(len(positions)))


def built(config: PreTrainedConfig, number: int | None = None) -> tuple[LossModel, set[str]]:
    """The whole model, or a stage of it, and the names of parameters that are in other stages alone."""
    model = build_on_meta(copy.deepcopy(config), torch.float32)
    anatomy, doors, elsewhere = dissect(model), None, set[str]()
    if number is not None:
        stage = keep_stage(model, anatomy, number, STAGES)
        anatomy, doors, elsewhere = stage.anatomy, stage.doors, set(stage.elsewhere)
    allocate(model, torch.device("cpu"))
    initialise_randomly(model, seed=3)
    return LossModel(model, anatomy, doors), elsewhere


def gradients(model: LossModel) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in model.model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_give_the_bits_of_the_whole(family: str) -> None:
    config = FAMILIES[family]
    whole, _ = built(config)
    names = {name for name, _ in whole.model.named_parameters(remove_duplicate=False)}
    loss = whole(batch(), 5.0)
    loss.backward()
    want = gradients(whole)

    stages = [built(config, number) for number in range(len(STAGES))]
    received: list[torch.Tensor | None] = [None]
    outputs = []
    for stage, elsewhere in stages:
        assert elsewhere == names - {name for name, _ in stage.model.named_parameters(remove_duplicate=False)}
        outputs.append(stage(batch(), 5.0, received[-1]))
        received.append(outputs[-1].detach().requires_grad_())
    gradient = None
    got: dict[str, torch.Tensor] = {}
    for (stage, _), output, entered in reversed(list(zip(stages, outputs, received, strict=False))):
        output.backward(gradient)
        gradient = entered.grad if entered is not None else None
        for name, value in gradients(stage).items():
            got[name] = got[name] + value if name in got else value

    assert torch.equal(outputs[-1], loss)
    assert got.keys() == want.keys() == {name for name, _ in whole.model.named_parameters()}
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def test_blocks_that_return_more_than_hidden_states_are_refused() -> None:
    model = build_on_meta(copy.deepcopy(FAMILIES["neox"]), torch.float32)
    anatomy = dissect(model)
    for block in anatomy.blocks[1:]:  # as where a family takes the first of a tuple, and gets the first row of a batch
        block.register_forward_pre_hook(lambda _, inputs: (inputs[0][0],))
    with pytest.raises(UserError, match="simply hand hidden states on"):
        keep_stage(model, anatomy, 0, STAGES)
