"""A rank's slice of a row, and models of which workers cannot have slices."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from tonnage.data import Pack
from tonnage.kernels.dropout import token_keys
from tonnage.model.anatomy import dissect
from tonnage.model.attention import NAME, packing_arguments, register
from tonnage.model.context import Context
from tonnage.training.batch import MicroBatch
from tonnage.training.isolation import packed_rows
from tonnage.training.loss import LossModel
from tonnage.training.slices_trial import why_undivided


def row(lengths: list[int]) -> MicroBatch:
    """Documents whose second half is supervised, with a column."""
    total = sum(lengths)
    weights = np.concatenate([(np.arange(length) >= max(1, length // 2)) for length in lengths]).astype(np.float32)
    none = np.full(len(lengths), -1, np.int16)
    carried = {"worth": np.arange(len(lengths)) + 0.5}
    return MicroBatch.of(
        [
            Pack(
                np.arange(total, dtype=np.int32),
                weights,
                np.array(lengths),
                np.arange(len(lengths)) + 7,
                none,
                none * 0,
                carried=carried,
            )
        ]
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("round_to", [1, 8])
def test_slices_are_the_row(ranks: int, round_to: int) -> None:
    whole = row([9, 2, 17, 1, 8])
    slices = [whole.divided(Context("", ranks, rank), round_to) for rank in range(ranks)]
    sizes = {one.num_tokens for one in slices}
    assert len(sizes) == 1
    size = sizes.pop()
    assert size % round_to == 0
    assert size * ranks - whole.num_tokens < ranks * round_to
    together = torch.cat([one.input_ids for one in slices], dim=1)
    assert together[:, : whole.num_tokens].equal(whole.input_ids)
    assert torch.cat([one.positions + at * size for at, one in enumerate(slices)]).equal(whole.positions)
    given, taken = ([one.moves[at] for one in slices] for at in (0, 1))
    assert [list(one) for one in zip(*given, strict=True)] == [list(one) for one in taken]
    counts = [sum(one) for one in taken]
    assert max(counts) - min(counts) <= 1
    assert [sum(one) for one in given] == [len(one.positions) for one in slices]
    for name in ("targets", "weights"):
        assert torch.cat([getattr(one, name)[one.weights > 0] for one in slices]).equal(getattr(whole, name))
    assert torch.cat([one.columns["worth"][one.weights > 0] for one in slices]).equal(whole.columns["worth"])
    assert [sum(counts) for counts in zip(*(one.targets_of for one in slices), strict=True)] == list(whole.targets_of)
    assert sum(one.weight for one in slices) == whole.weight
    parts = np.array([one.own_lengths[: len(whole.lengths)] for one in slices])
    assert parts.sum(0).tolist() == list(whole.lengths)
    assert all(sum(one.own_lengths) == size for one in slices)


def test_positions_and_masks_of_dropout_are_those_of_documents() -> None:
    whole = row([9, 2, 17])
    contexts = [Context("", 4, rank) for rank in range(4)]
    slices = [whole.divided(context) for context in contexts]
    alike = [packing_arguments(one.lengths, torch.device("cpu"), (), one.context) for one in slices]
    positions = packing_arguments(whole.lengths, torch.device("cpu"))["position_ids"]
    assert torch.cat([one["position_ids"] for one in alike], dim=1).equal(positions)
    drawn = [replace(one, draw=5).keys() for one in slices]
    assert all(keys is not None for keys in drawn)
    expected = token_keys(5, np.repeat([7, 8, 9], whole.lengths), np.concatenate([np.arange(n) for n in whole.lengths]))
    assert torch.cat([keys for keys in drawn if keys is not None]).equal(expected)


def test_a_blank_is_one_for_each() -> None:
    blanks = [MicroBatch.blank().divided(Context("", 3, rank)) for rank in range(3)]
    assert [one.num_tokens for one in blanks] == [1, 1, 1]
    assert all(sum(one.lengths) == 3 and not len(one.positions) for one in blanks)


def loss_model(**changes: Any) -> LossModel:
    shape: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = LlamaConfig(**shape, **heads, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=register())
    assert model.config._attn_implementation == NAME
    return LossModel(model, dissect(model))


def documents() -> list[Tensor]:
    return [torch.arange(length) % 90 + 3 for length in (40, 9, 70, 23)]


def test_only_attention_connects_the_tokens_of_most_models() -> None:
    assert why_undivided(loss_model, packed_rows(documents())) == ""


def test_a_token_that_sees_the_one_before_it_is_noticed() -> None:
    model = loss_model()

    def shift(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        return output + 0.5 * output.roll(1, dims=1)

    model.anatomy.blocks[1].get_submodule("mlp").register_forward_hook(shift)
    assert "what leaves the last block is off by" in why_undivided(
        partial(copy.deepcopy, model), packed_rows(documents())
    )
    other = loss_model()
    other.anatomy.embedding.register_forward_hook(shift)
    assert "what comes to attention 0 is off by" in why_undivided(
        partial(copy.deepcopy, other), packed_rows(documents())
    )


def test_positions_that_depend_on_the_longest_document_are_noticed() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = loss_model(rope_parameters=rope, max_position_embeddings=32)
    assert "attention 0" in why_undivided(partial(copy.deepcopy, model), packed_rows(documents()))
