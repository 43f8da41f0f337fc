"""Gradients that add up in fp32 as they are computed: the sums are those of autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedConfig

from tonnage.kernels import sums
from tonnage.kernels.products import use_fast_products
from tonnage.kernels.sums import PIECE, add
from tonnage.model.anatomy import dissect
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel
from tonnage.training.resting import accumulate_in_fp32

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {"neox": GPTNeoXConfig, "llama": LlamaConfig}


@pytest.mark.parametrize("shape", [(1, 7), (3000, 700), (2, PIECE + 5)])
def test_a_sum_of_another_type_piece_by_piece_is_the_same_sum(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, part = torch.randn(shape), torch.randn(shape).bfloat16()
    expected = whole + part
    for small in (part.numel(), 0):  # torch's own, and ours
        monkeypatch.setattr(sums, "SMALL", small)
        total = whole.clone()
        add(total, part)
        assert torch.equal(total, expected)


def test_only_where_there_is_a_sum_of_another_type() -> None:
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert not sums.adds_up(weight)
    weight.grad = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert not sums.adds_up(weight)
    weight.grad = None
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(2, 3)
    assert sums.adds_up(weight)
    assert not sums.adds_up(weight.t()), "what autograd turns back"


def batch(seed: int, tokens: int = 40) -> MicroBatch:
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (1, tokens), generator=chance)
    positions = torch.arange(3, tokens - 1)
    return MicroBatch(ids, (tokens,), positions, ids[0, positions + 1], torch.ones(len(positions)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_micro_batches_add_up_as_autograd_adds_them(
    family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradients() -> dict[str, Tensor]:
        torch.manual_seed(0)
        config = FAMILIES[family](**SIZES, vocab_size=50, tie_word_embeddings=tied)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        use_fast_products(model)
        loss_model = LossModel(model, dissect(model))
        accumulate_in_fp32(model.parameters())
        for seed in range(3):
            loss_model(batch(seed), 7.0).backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    here = gradients()
    assert {one.dtype for one in here.values()} == {torch.float32}
    asked = []

    def never(weight: Tensor) -> bool:
        asked.append(weight)
        return False

    for place in ("kernels.sums", "kernels.embedding", "training.head"):
        monkeypatch.setattr(f"tonnage.{place}.adds_up", never)
    for_autograd = gradients()
    assert len(asked) > 12, "those who compute gradients ask"
    assert here.keys() == for_autograd.keys()
    assert all(here[name].equal(one) for name, one in for_autograd.items())
