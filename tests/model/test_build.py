"""Random weights do not depend on the layout; checkpoints load whole, by name, and say what they lack."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXForCausalLM, PreTrainedModel

from tiny import llama_config, load, neox_config, write_model
from tonnage.errors import UserError
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.training.weigh import weigh


def built(config: object, vocab_size: int | None = None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = build_on_meta(config, dtype, vocab_size)  # type: ignore[arg-type]
    allocate(model, torch.device("cpu"))
    return model


def embedding(model: PreTrainedModel) -> torch.Tensor:
    table = model.get_input_embeddings()
    assert isinstance(table, torch.nn.Embedding)
    return table.weight


def test_random_weights_follow_the_seed_and_the_family_rule() -> None:
    first, again, other = built(neox_config()), built(neox_config()), built(neox_config())
    initialise_randomly(first, 0)
    initialise_randomly(again, 0)
    initialise_randomly(other, 1)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.dim() == 2:
            assert not torch.equal(a, c)
            assert a.std().item() == pytest.approx(0.02, rel=0.1), name
        else:
            assert torch.equal(a, torch.ones_like(a) if "norm.weight" in name else torch.zeros_like(a)), name
    blocks = [first.get_parameter(f"gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight") for i in (0, 1)]
    assert not torch.equal(blocks[0], blocks[1])


def test_scaled_initialisation_of_residual_products_is_kept() -> None:
    model = built(GPT2Config(vocab_size=97, n_embd=64, n_layer=8, n_head=4))
    initialise_randomly(model, 0)
    scaled = model.get_parameter("transformer.h.0.mlp.c_proj.weight").std().item()
    assert scaled == pytest.approx(0.02 / (2 * 8) ** 0.5, rel=0.1)


def test_what_a_family_has_no_rule_for_is_filled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As routers of ERNIE 4.5 with transformers 5.17, which lets them be what was in memory."""
    monkeypatch.setattr(GPTNeoXForCausalLM, "_init_weights", lambda *_: None)
    first, again = built(neox_config()), built(neox_config())
    initialise_randomly(first, 0)
    initialise_randomly(again, 0)
    for (name, a), b in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
        if a.dim() == 2:
            assert a.std().item() == pytest.approx(0.02, rel=0.1), name
        else:
            assert torch.equal(a, torch.ones_like(a) if "norm.weight" in name else torch.zeros_like(a)), name


@pytest.mark.parametrize("config", [llama_config(), neox_config()], ids=["tied", "untied"])
def test_loads_what_transformers_loads(config: object, tmp_path: Path) -> None:
    write_model(tmp_path, config)  # type: ignore[arg-type]
    model = built(config)
    load(model, tmp_path)
    want = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for (name, ours), theirs in zip(model.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    for (name, buffer), other in zip(model.named_buffers(), want.buffers(), strict=True):
        assert torch.equal(buffer, other), name


def test_wrong_shapes_are_refused_with_both(tmp_path: Path) -> None:
    write_model(tmp_path, neox_config())
    model = built(neox_config(hidden_size=64, intermediate_size=512))
    with pytest.raises(UserError) as caught:
        load(model, tmp_path)
    assert "(128,)" in str(caught.value)
    assert "(64,)" in str(caught.value)


@pytest.mark.parametrize("config", [llama_config(), neox_config()], ids=["tied", "untied"])
def test_a_grown_vocabulary_keeps_old_rows_and_gives_new_ones_their_mean(config: object, tmp_path: Path) -> None:
    write_model(tmp_path, config)  # type: ignore[arg-type]
    old = embedding(AutoModelForCausalLM.from_pretrained(tmp_path))
    model = built(config, vocab_size=300)
    load(model, tmp_path, grows=True)
    new = embedding(model)
    assert new.shape[0] == model.config.vocab_size == 300
    assert torch.equal(new[: old.shape[0]], old)
    torch.testing.assert_close(new[old.shape[0] :], old.mean(0).expand(300 - old.shape[0], -1), rtol=1e-4, atol=1e-6)


def test_weigh_counts_what_transformers_counts(tmp_path: Path) -> None:
    for config in (llama_config(), neox_config()):
        weight = weigh(config)
        model = AutoModelForCausalLM.from_config(config)
        assert weight.num_parameters == sum(p.numel() for p in model.parameters())
        assert weight.num_blocks == config.num_hidden_layers
    assert weigh(llama_config()).embedding_parameters == 0
    assert weigh(neox_config()).embedding_parameters == 258 * 128
