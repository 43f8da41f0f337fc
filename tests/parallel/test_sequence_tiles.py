"""MLPs over tiles of the sequence: the numbers of MLPs that are called once, and less in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tiny import llama_config, mixture_config, neox_config
from tonnage.model.adapters import AdapterSpec, Trains, prepare
from tonnage.model.anatomy import dissect, mlps_of, norms_of
from tonnage.model.build import allocate, build_on_meta
from tonnage.model.dropout import Drawn
from tonnage.model.tiny import draw, shrink
from tonnage.parallel.recompute import RecomputeMode, recompute_blocks
from tonnage.parallel.sequence_tiles import tile_sequence

MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")
IDS = torch.randint(3, 90, (2, 23), generator=torch.Generator().manual_seed(1))
TILE = 7  # which divides neither a row nor both
FAMILIES: dict[str, Any] = {
    "llama": llama_config(),
    "neox": neox_config(),
    # Norms of what an MLP puts out, which keep that.
    "gemma2": Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8
    ),
}
LORA = AdapterSpec(4, 2.0, ("all-linear",), (), 0.3)


def built(config: Any, trains: Trains | None = None) -> tuple[PreTrainedModel, Drawn | None]:
    model = build_on_meta(config, torch.float32, attention_name="eager")
    drawn = None
    if trains is not None:
        drawn = Drawn()
        prepare(model, dissect(model), trains, torch.float32, drawn)
    allocate(model, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    draw(model.eval(), 1.0)
    return model, drawn


def learnt(model: PreTrainedModel, drawn: Drawn | None = None) -> dict[str, Tensor]:
    """The loss and all gradients of a backward pass."""
    keys = torch.arange(IDS.numel()) * 7919
    with (drawn or Drawn()).for_tokens(keys if drawn else None):
        loss = model(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-6)
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())), name
        assert float(gradient.abs().max()) > 0, name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_whole_rows(family: str, mode: RecomputeMode) -> None:
    whole, _ = built(FAMILIES[family])
    tiled, _ = built(FAMILIES[family])
    tile_sequence(dissect(tiled).blocks, TILE)
    recompute_blocks(dissect(tiled).blocks, mode)
    assert_close(learnt(tiled), learnt(whole))
    with torch.no_grad():
        assert torch.allclose(tiled(IDS).logits, whole(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_adapters_drop_the_same_of_each_token(mode: RecomputeMode) -> None:
    whole, drawn = built(FAMILIES["llama"], Trains(LORA))
    tiled, drawn_in_tiles = built(FAMILIES["llama"], Trains(LORA))
    tile_sequence(dissect(tiled).blocks, TILE, drawn_in_tiles)
    recompute_blocks(dissect(tiled).blocks, mode)
    assert_close(learnt(tiled, drawn_in_tiles), learnt(whole, drawn))


def test_a_block_that_is_recomputed_runs_its_mlp_twice_and_keeps_its_input_alone() -> None:
    """Not three times: the block stops once all that was kept is there again."""
    model, _ = built(FAMILIES["llama"])
    mlp, calls = mlps_of(dissect(model).blocks[0])[0], list[int]()
    compute: Callable[[Tensor], Tensor] = mlp.forward

    def counted(hidden: Tensor) -> Tensor:
        calls.append(hidden.shape[1])
        return compute(hidden)

    mlp.forward = counted
    tile_sequence(dissect(model).blocks, TILE)
    recompute_blocks(dissect(model).blocks, "full")
    learnt(model)
    assert sum(calls) == 2 * IDS.numel()
    assert max(calls) == TILE


def test_little_is_kept_between_the_passes() -> None:
    kept = {}
    for number in (IDS.numel(), TILE):
        model, _ = built(FAMILIES["llama"])
        tile_sequence(dissect(model).blocks, number)
        saved: list[int] = []

        def note(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            mlps_of(dissect(model).blocks[0])[0](torch.randn(1, IDS.numel(), 96, requires_grad=True))
        kept[number] = sum(saved)
    assert kept[TILE] == 96 * IDS.numel() < kept[IDS.numel()] / 3


def test_rows_no_longer_than_a_tile_are_computed_as_ever() -> None:
    whole, _ = built(FAMILIES["llama"])
    tiled, _ = built(FAMILIES["llama"])
    tile_sequence(dissect(tiled).blocks, IDS.numel())
    ours, theirs = learnt(tiled), learnt(whole)
    assert all(torch.equal(ours[name], gradient) for name, gradient in theirs.items())


@pytest.mark.parametrize("family", ["falcon", "phi3", "olmo2", "gpt2", "starcoder2"])
def test_families_whose_mlps_take_hidden_states_alone(family: str) -> None:
    block = dissect(build_on_meta(shrink(CONFIG_MAPPING[family]()), torch.float32, attention_name="eager")).blocks[0]
    assert len(mlps_of(block)) == 1
    assert norms_of(block)


def test_experts_are_left_alone() -> None:
    model = build_on_meta(mixture_config("qwen3_moe"), torch.float32, attention_name="eager")
    assert not any(mlps_of(block) for block in dissect(model).blocks)
    blocks: Sequence[Any] = dissect(model).blocks
    forwards = [block.mlp.forward for block in blocks]
    tile_sequence(blocks, TILE)
    assert [block.mlp.forward for block in blocks] == forwards
