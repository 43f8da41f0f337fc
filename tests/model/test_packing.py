"""A packed document gets exactly the numbers it would get alone, in every family, and its gradients too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
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

from tiny import llama_config, load, neox_config
from tonnage.data import Pack
from tonnage.data.packs.prefixes import Prefix
from tonnage.errors import UserError
from tonnage.model.anatomy import dissect
from tonnage.model.attention import packed_attention
from tonnage.model.build import allocate, build_on_meta
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel
from tonnage.training.weigh import Conditions, weigh

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "neox, parallel residual": GPTNeoXConfig(**SHAPE),
    "neox, sequential, tied": GPTNeoXConfig(**SHAPE, use_parallel_residual=False, tie_word_embeddings=True),
    "mistral, sliding window": MistralConfig(**GROUPED, sliding_window=5),
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**GROUPED),
    "gemma2, softcaps": Gemma2Config(**GROUPED, sliding_window=5, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**GROUPED, sliding_window=5, query_pre_attn_scalar=8),
    "phi, biased head": PhiConfig(**SHAPE),
    "phi3, fused products": Phi3Config(**SHAPE, pad_token_id=0),
    "gpt2, learned positions": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4),
    "olmo, no norm weights": OlmoConfig(**SHAPE),
    "olmo2": Olmo2Config(**SHAPE),
    "granite, scaled logits": GraniteConfig(**SHAPE, logits_scaling=4.0),
    "cohere, scaled logits": CohereConfig(**SHAPE, logit_scale=0.5),
    "opt, offset positions": OPTConfig(
        vocab_size=97,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
    ),
}
LENGTHS = (9, 1, 14, 6)


def documents(vocab_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and target weights of each document; the first token is never a target."""
    torch.manual_seed(1)
    made = []
    for length in LENGTHS:
        weights = (torch.rand(length) < 0.7).float()
        weights[0] = 0.0
        made.append((torch.randint(vocab_size, (length,)), weights))
    return made


def micro_batch(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> MicroBatch:
    ids, weights = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    supervised = weights.nonzero().squeeze(1)
    return MicroBatch(
        ids.unsqueeze(0),
        tuple(len(i) for i, _ in parts),
        supervised - 1,
        ids[supervised],
        weights[supervised],
    )


def in_both(config: PreTrainedConfig, folder: Path) -> tuple[Any, LossModel]:
    """The same weights as transformers has them and as we do, in fp32."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model = build_on_meta(config, torch.float32)
    allocate(model, torch.device("cpu"))
    load(model, folder)
    return plain, LossModel(model, dissect(model))


def alone(plain: Any, parts: list[tuple[torch.Tensor, torch.Tensor]], total: float) -> list[float]:
    """Losses of documents one by one, summed up, and their gradients, divided by ``total``."""
    losses = []
    for ids, weights in parts:
        logits = plain(ids.unsqueeze(0), use_cache=False).logits[0, :-1].float()
        loss = (F.cross_entropy(logits, ids[1:], reduction="none") * weights[1:]).sum() if len(ids) > 1 else None
        if loss is not None:
            (loss / total).backward()
        losses.append(0.0 if loss is None else loss.item())
    return losses


def check_gradients(ours: LossModel, plain: Any) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in ours.model.named_parameters():
        want_grad = expected[name].grad
        assert parameter.grad is not None
        assert want_grad is not None
        torch.testing.assert_close(parameter.grad, want_grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone_in_plain_transformers(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    plain, ours = in_both(config, tmp_path)
    parts = documents(config.vocab_size)
    total = float(sum(weights.sum() for _, weights in parts))
    losses = alone(plain, parts, total)

    # Each document's loss inside the pack, by supervising only that document.
    for number, want in enumerate(losses):
        only = [(ids, weights if i == number else weights * 0) for i, (ids, weights) in enumerate(parts)]
        with torch.no_grad():
            assert ours(micro_batch(only), 1.0).item() == pytest.approx(want, rel=1e-6, abs=1e-6)

    loss = ours(micro_batch(parts).rounded(16), total)
    loss.backward()
    assert loss.item() == pytest.approx(sum(losses) / total, rel=1e-6)
    check_gradients(ours, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=pytest.mark.slow if one in ("gemma2, softcaps", "gemma3") else ()) for one in FAMILIES],
)
def test_documents_that_share_what_they_begin_with_equal_alone(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    profile = weigh(config, None, Conditions(precision="fp32", document_tokens=12), recomputes=("none",))
    assert profile.shares_prefixes
    plain, ours = in_both(config, tmp_path)
    torch.manual_seed(2)
    header, passage, other = (torch.randint(config.vocab_size, (length,)) for length in (4, 3, 5))
    prefixes = (Prefix(4, -1), Prefix(7, 0), Prefix(5, -1))
    ids, begins = [], []
    for begin, prefix, own in (
        *(([header, passage], 1, own) for own in (2, 1, 6)),
        *(([header], 0, own) for own in (5, 3)),
        *(([other], 2, own) for own in (1, 4)),
        ([], -1, 6),
    ):
        ids.append(torch.cat([*begin, torch.randint(config.vocab_size, (own,))]))
        begins.append(prefix)
    weights = [(torch.rand(len(one)) < 0.7).float() for one in ids]  # some of them within a prefix, too
    for one in weights:
        one[0], one[-1] = 0.0, 0.5
    order = torch.randperm(len(ids)).tolist()
    pack = Pack(
        torch.cat([ids[n] for n in order]).int().numpy(),
        torch.cat([weights[n] for n in order]).numpy(),
        np.array([len(ids[n]) for n in order], np.int32),
        np.array(order),
        np.array([begins[n] for n in order], np.int16),
        np.zeros(len(order), np.int32),
    )
    total = float(sum(one.sum() for one in weights))
    losses = alone(plain, list(zip(ids, weights, strict=True)), total)
    batch = MicroBatch.of([pack], prefixes)
    assert batch.num_tokens == sum(map(len, ids)) - 2 * 3 - 4 * 4 - 5
    loss = ours(batch.rounded(16), total)
    loss.backward()
    assert loss.item() == pytest.approx(sum(losses) / total, rel=1e-6)
    check_gradients(ours, plain)


@pytest.mark.parametrize("config", [llama_config(), neox_config()], ids=["llama", "neox"])
def test_another_document_changes_nothing(config: PreTrainedConfig) -> None:
    model = build_on_meta(config, torch.float32)
    allocate(model, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = LossModel(model, dissect(model))
    (a, wa), (_, _), (c, wc), _ = documents(config.vocab_size)
    torch.manual_seed(3)
    other = torch.randint(config.vocab_size, (len(c),))
    with torch.no_grad():
        first = ours(micro_batch([(c, wc * 0), (a, wa)]), 1.0)
        second = ours(micro_batch([(other, wc * 0), (a, wa)]), 1.0)
        leaking = ours(micro_batch([(torch.cat([c, a]), torch.cat([wc * 0, wa]))]), 1.0)
    assert first.item() == second.item()
    assert abs(leaking.item() - first.item()) > 1e-3


def test_a_family_without_attention_back_ends_is_refused_by_name() -> None:
    config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(UserError, match="BloomForCausalLM"):
        build_on_meta(config, torch.float32)


@pytest.mark.parametrize("argument", ["sinks", "position_bias", "indices", "block_indices", "never_seen_before"])
def test_attention_that_is_given_what_ours_does_not_know_is_refused(argument: str) -> None:
    one = torch.zeros(1, 2, 3, 4)
    more: dict[str, Any] = {argument: torch.ones(2)}
    with pytest.raises(UserError, match=f"attention that is given {argument}"):
        packed_attention(torch.nn.Identity(), one, one, one, None, **more)
    more = {argument: None}
    packed_attention(torch.nn.Identity(), one, one, one, None, **more)


def test_a_mask_and_a_model_that_looks_ahead_are_refused() -> None:
    one = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UserError, match="attention_mask"):
        packed_attention(torch.nn.Identity(), one, one, one, torch.ones(1, 1, 3, 3))
    with pytest.raises(UserError, match="is_causal=False"):
        packed_attention(torch.nn.Identity(), one, one, one, None, is_causal=False)
