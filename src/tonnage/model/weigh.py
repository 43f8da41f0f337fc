"""Weigh a model without its weights: count its parameters on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from tonnage.model.anatomy import dissect
from tonnage.model.build import build_on_meta


@dataclass(frozen=True)
class Weight:
    """What a model weighs."""

    model_type: str
    num_parameters: int
    embedding_parameters: int
    """Of the embedding where it is not also the head."""
    num_blocks: int
    hidden_size: int
    vocab_size: int


def weigh(config: PreTrainedConfig, vocab_size: int | None = None) -> Weight:
    """Count the parameters of the model that ``config`` describes, its vocabulary grown to ``vocab_size`` if smaller.

    Raises:
        UserError: the family's parts cannot be found, or it cannot train on packs.
    """
    model = build_on_meta(config, torch.bfloat16, vocab_size)
    anatomy = dissect(model)
    return Weight(
        model_type=config.model_type,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        embedding_parameters=0 if anatomy.tied else anatomy.embedding.weight.numel(),
        num_blocks=len(anatomy.blocks),
        hidden_size=anatomy.head.in_features,
        vocab_size=anatomy.head.out_features,
    )
