"""A model is asked how its documents keep to themselves: what it answers, and that it cannot be fooled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tonnage.errors import UserError
from tonnage.model import attention
from tonnage.model.attention import NAME, PackedRow
from tonnage.model.tiny import draw, shrink
from tonnage.training import isolation
from tonnage.training.isolation import Isolation, isolation_of, outgrows

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
HYBRID: dict[str, Any] = {
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}


def of(name: str, **changes: Any) -> PreTrainedConfig:
    """The configuration that a family has by default."""
    config: PreTrainedConfig = CONFIG_MAPPING[name](**changes).get_text_config()
    return config


ANSWERS: dict[str, tuple[PreTrainedConfig, str, bool]] = {
    "llama": (of("llama"), "packed", True),
    "gemma2, softcaps": (of("gemma2"), "packed", True),
    "mistral, a window": (of("mistral"), "packed", True),
    "a mixture of experts": (of("qwen3_moe"), "packed", True),
    "latent attention": (of("deepseek_v3"), "packed", True),
    "sinks": (of("gpt_oss"), "packed", True),
    "convolutions": (transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]), "padded", False),
    "a recurrence in every block but one": (
        transformers.GraniteMoeHybridConfig(**SHAPE, **HYBRID, layer_types=["attention", "mamba"]),
        "padded",
        False,
    ),
    "the same family without it": (
        transformers.GraniteMoeHybridConfig(**SHAPE, **HYBRID, layer_types=["attention"] * 2),
        "packed",
        True,
    ),
    "blocks that keep the row to themselves": (transformers.NemotronConfig(**SHAPE), "padded", False),
    "no function from outside": (of("bloom"), "padded", False),
    "attention in chunks": (of("llama4_text"), "padded", False),
    "a state alone": (of("mamba2"), "padded", False),
}


LONGER = {
    "gemma2, softcaps",
    "a mixture of experts",
    "latent attention",
    "sinks",
    "a recurrence in every block but one",
    "attention in chunks",
    "a state alone",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if name in LONGER else ()) for name in ANSWERS]
)
def test_what_models_answer(name: str) -> None:
    config, arrangement, shares = ANSWERS[name]
    found = isolation_of(config, device=CPU)
    assert (found.arrangement, found.shares_prefixes) == (arrangement, shares)
    assert bool(found.why_not_packed) == (arrangement == "padded")


@pytest.mark.parametrize("name", ["bert", pytest.param("prophetnet", marks=pytest.mark.slow)])
def test_a_model_that_looks_ahead_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"model type {name}: documents that are not computed as each is alone"):
        isolation_of(of(name), device=CPU)


def test_a_model_that_cannot_be_built_is_refused() -> None:
    with pytest.raises(UserError, match="no tiny model of the family"):
        isolation_of(of("llama", hidden_act="no such function"), device=CPU)


def test_borders_that_are_ignored_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With packed attention that takes the row for one document, no family is packed."""

    def one_document(query: Any, key: Any, value: Any, row: PackedRow, scores: Any) -> Any:
        return attend(query, key, value, PackedRow((query.shape[2],)), scores)

    attend = attention._in_one_row
    monkeypatch.setattr(attention, "_in_one_row", one_document)
    found = isolation_of(of("llama"), device=CPU)
    assert (found.arrangement, found.attention) == ("padded", "sdpa")
    assert "the loss of a token is off by" in found.why_not_packed


@pytest.mark.matrix
def test_recompute_that_changes_a_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own selective checkpoint, with what Gemma 3n writes to in place."""

    def as_torch_does(blocks: Sequence[torch.nn.Module], mode: str) -> None:
        how = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.bmm.default])
        for block in blocks if mode == "selective" else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=how)

    assert not isolation_of(of("gemma3n_text"), device=CPU).inexact_recompute
    monkeypatch.setattr(isolation, "recompute_blocks", as_torch_does)
    found = isolation_of(of("gemma3n_text"), device=CPU).inexact_recompute
    assert list(found) == ["selective"]
    assert "the gradient of" in found["selective"]
    assert not isolation_of(of("llama"), device=CPU).inexact_recompute


def test_a_trial_that_shows_nothing_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of nothing: whatever a layout does, losses are equal."""

    def draw_nothing(model: torch.nn.Module, gain: float, seed: int = 0) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1e-3)

    monkeypatch.setattr(isolation, "draw", draw_nothing)
    with pytest.raises(UserError, match="whose tokens change nothing in what comes after them"):
        isolation_of(of("llama"), device=CPU)


@pytest.mark.slow
def test_positions_of_long_documents_change_the_answer() -> None:
    """Phi 3's long factors apply to all of a row in which one document is long."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48, "rope_theta": 10000.0}
    config = of("phi3", rope_parameters=rope, original_max_position_embeddings=4096, max_position_embeddings=131072)
    assert not outgrows(config, 4096)
    assert outgrows(config, 4097)
    assert isolation_of(config, device=CPU, long_documents=False).arrangement == "packed"
    with pytest.raises(UserError, match="not computed as each is alone"):
        isolation_of(config, device=CPU, long_documents=True)


def test_the_answer_is_kept_by_architecture_and_not_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = isolation_of(of("llama"), device=CPU, cache=tmp_path)
    assert found == Isolation("packed", NAME, shares_prefixes=True)
    asked: list[str] = []

    def ask(config: PreTrainedConfig, *_: object) -> Isolation:
        asked.append(config.model_type)
        return found

    monkeypatch.setattr(isolation, "_ask", ask)
    isolation_of(of("llama", hidden_size=1024, num_hidden_layers=7, use_cache=False), device=CPU, cache=tmp_path)
    assert not asked
    isolation_of(of("llama", tie_word_embeddings=True), device=CPU, cache=tmp_path)
    assert asked == ["llama"]


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3n_text", "falcon_h1", "deepseek_v3", "gemma4_text"])
def test_tiny_models_are_tiny_and_of_the_same_kind(name: str) -> None:
    config = of(name)
    small = shrink(config)
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    if kinds := getattr(config, "layer_types", None):
        assert set(small.layer_types) == set(kinds)
    draw(model, 1.0)
    ids = torch.arange(12).unsqueeze(0)
    first = model(ids, use_cache=False).logits[0, -1]
    ids[0, 2] += 1
    assert (model(ids, use_cache=False).logits[0, -1] - first).abs().max() > 1e-3, "a token that nothing looks at"
